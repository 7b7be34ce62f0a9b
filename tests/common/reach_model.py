"""The protocol by which ranks reach each other's ordinary memory (``collectives/reach.py``), as a model.

Each rank is a host that makes calls; what it does between two looks at the others is one step, and all orders of the
steps are visited. Before each call a rank keeps the memory of the last one, or gets other memory at the same address,
or goes back to its first one, or takes memory that it cannot offer. Mapping may fail. ``MISTAKES`` are protocols that
look as good.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

IDLE, POSTED, MAPPED, RUNNING, WRITTEN = range(5)

SPECULATES = "write to where the memory was in the last call, without waiting for the peer's post"
BY_ADDRESS = "know what is mapped by its address, and hear of what is gone a call late"
LEAVES_EARLY = "return before the peers have written"
FORGETS_EARLY = "let go of what is gone in calls for which not all ranks have offered memory"
SAYS_ONCE = "say what is gone with the next offer, whether all peers read it or not"
KEEPS_TO_ITSELF = "stage what this rank cannot map, and tell nobody"
MISTAKES = (SPECULATES, BY_ADDRESS, LEAVES_EARLY, FORGETS_EARLY, SAYS_ONCE, KEEPS_TO_ITSELF)

PRIVATE = 0
"""Name of memory that is not offered; others count from 1."""


class Post(NamedTuple):
    """What a rank says of a call: the name of its memory, what it has freed, and then what it could not map."""

    memory: int
    gone: frozenset[int]
    failed: frozenset[tuple[int, int]] = frozenset()


class Known(NamedTuple):
    """Memory of a rank that counts as mapped: by the name that it is known by, of the name that it has in truth."""

    owner: int
    key: int
    name: int


class Plan(NamedTuple):
    """What a rank does in a call, which must be the same on all ranks: write directly, or stage; ask twice, or once."""

    direct: bool
    maps: bool


class Rank(NamedTuple):
    """A rank.

    Attributes:
        phase: in its last call.
        memory: name of its own for that call; the address is the same for all of them.
        newest: name.
        posts: of its calls so far.
        plans: likewise; the last may be missing.
        known: of all ranks.
        refused: of these, what some rank cannot map.
        held: names of its own that peers may have mapped.
    """

    phase: int = IDLE
    memory: int = PRIVATE
    newest: int = 0
    posts: tuple[Post, ...] = ()
    plans: tuple[Plan, ...] = ()
    known: frozenset[Known] = frozenset()
    refused: frozenset[tuple[int, int]] = frozenset()
    held: frozenset[int] = frozenset()

    @property
    def call(self) -> int:
        return len(self.posts)


State = tuple[Rank, ...]


class WrongError(AssertionError):
    """The protocol does what it must not."""


def explore(ranks: int, calls: int, mistake: str = "", *, may_fail: bool = True) -> int:
    """Visit all states; how many there are.

    Raises:
        WrongError: a write into memory that its owner does not offer; ranks that wait for each other for ever, or do
            different things in a call; memory that peers keep mapped without its owner's knowing.
    """
    first: State = (Rank(),) * ranks
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        _check_plans(state)
        followers = list(_followers(state, calls, mistake, may_fail))
        if all(rank.phase == IDLE for rank in state):
            _check_mappings(state)
        elif not followers:
            raise WrongError(f"ranks wait for each other: {state}")
        for follower in followers:
            known = len(seen)
            seen.add(follower)  # a state is large: it is hashed once
            if len(seen) > known:
                todo.append(follower)
    return len(seen)


def _followers(state: State, calls: int, mistake: str, may_fail: bool) -> Iterator[State]:
    for me, rank in enumerate(state):
        for changed in _steps(state, me, rank, calls, mistake, may_fail):
            yield (*state[:me], changed, *state[me + 1 :])


def _steps(state: State, me: int, rank: Rank, calls: int, mistake: str, may_fail: bool) -> Iterator[Rank]:
    peers = [other for peer, other in enumerate(state) if peer != me]
    if rank.phase == IDLE:
        if rank.call < calls:
            yield from _begun(rank, mistake)
    elif rank.phase == POSTED:
        guess = _guess(state, me) if mistake == SPECULATES else {}
        if guess and rank.memory:
            _write(state, me, guess)
            yield rank._replace(phase=WRITTEN, plans=(*rank.plans, Plan(True, False)))
        elif rank.memory == PRIVATE:  # it waits for nobody
            yield rank._replace(phase=RUNNING, plans=(*rank.plans, Plan(False, False)))
        elif all(other.call >= rank.call for other in peers):
            yield from _settled(state, me, mistake, may_fail)
    elif rank.phase == MAPPED:
        if all(other.call > rank.call or other.phase >= MAPPED or len(other.plans) == rank.call for other in peers):
            failed = frozenset().union(*(other.posts[rank.call - 1].failed for other in state))
            mine = rank.posts[-1].failed if mistake == KEEPS_TO_ITSELF else failed
            yield _ready(state, rank._replace(refused=rank.refused | mine), maps=True)
    elif rank.phase == RUNNING:
        if rank.plans[-1].direct:
            posts = _posts(state, rank.call)
            key = 0 if mistake == BY_ADDRESS else None
            names = {found.owner: found.name for found in rank.known if found.key in (key, posts[found.owner].memory)}
            _write(state, me, {peer: names[peer] for peer in range(len(state)) if peer != me})
        yield rank._replace(phase=WRITTEN)
    elif rank.phase == WRITTEN and (
        mistake == LEAVES_EARLY
        or all((other.call, other.phase in (WRITTEN, IDLE)) >= (rank.call, True) for other in peers)
    ):
        yield rank._replace(phase=IDLE)


def _begun(rank: Rank, mistake: str) -> Iterator[Rank]:
    """The next call, with each kind of memory that a caller may have for it."""
    fresh = rank.newest + 1
    first = min(rank.newest, 1)  # which its caller still has; its name comes again after peers have let go of it
    for memory, newest in {(rank.memory, rank.newest), (fresh, fresh), (PRIVATE, rank.newest), (first, rank.newest)}:
        gone = rank.held - {memory} if memory else frozenset[int]()
        if mistake == BY_ADDRESS:
            gone -= {rank.memory}
        held = rank.held - gone if mistake == SAYS_ONCE else rank.held
        post = Post(memory, gone)
        yield rank._replace(phase=POSTED, memory=memory, newest=newest, posts=(*rank.posts, post), held=held)


def _settled(state: State, me: int, mistake: str, may_fail: bool) -> Iterator[Rank]:
    """All have posted the call: let go of what is gone, and map what is new."""
    rank = state[me]
    posts = _posts(state, rank.call)
    offered = all(post.memory for post in posts)
    if offered or mistake == FORGETS_EARLY:
        gone = {(owner, name) for owner, post in enumerate(posts) for name in post.gone}
        known = frozenset(found for found in rank.known if (found.owner, found.name) not in gone)
        rank = rank._replace(known=known, refused=rank.refused - gone)
    if not offered:
        yield rank._replace(phase=RUNNING, plans=(*rank.plans, Plan(False, False)))
        return
    rank = rank._replace(held=(rank.held - posts[me].gone) | {rank.memory})
    keys = {(found.owner, found.key) for found in rank.known}
    named = [Known(owner, 0 if mistake == BY_ADDRESS else post.memory, post.memory) for owner, post in enumerate(posts)]
    new = [found for found in named if (found.owner, found.key) not in keys]
    if not new:
        yield _ready(state, rank, maps=False)
        return
    rank = rank._replace(phase=MAPPED, known=rank.known | set(new))
    yield rank
    if may_fail:
        failed = frozenset((found.owner, found.name) for found in new if found.owner != me)
        yield rank._replace(posts=(*rank.posts[:-1], posts[me]._replace(failed=failed)))


def _ready(state: State, rank: Rank, *, maps: bool) -> Rank:
    memory = {(owner, post.memory) for owner, post in enumerate(_posts(state, rank.call))}
    plan = Plan(not memory & rank.refused, maps)
    return rank._replace(phase=RUNNING, plans=(*rank.plans, plan))


def _posts(state: State, call: int) -> list[Post]:
    return [rank.posts[call - 1] for rank in state]


def _guess(state: State, me: int) -> dict[int, int]:
    """Where the memory of all peers was last, if that is known."""
    newest = {found.owner: found.name for found in sorted(state[me].known) if found.owner != me}
    return newest if len(newest) == len(state) - 1 else {}


def _write(state: State, me: int, targets: dict[int, int]) -> None:
    for peer, name in targets.items():
        other = state[peer]
        if other.call != state[me].call or other.phase == IDLE:
            raise WrongError(f"rank {me} writes to rank {peer}, which is not in that call: {state}")
        if other.memory != name:
            raise WrongError(f"rank {me} writes to memory {name} of rank {peer}, which has {other.memory}: {state}")


def _check_plans(state: State) -> None:
    for call in range(max(len(rank.plans) for rank in state)):
        plans = {rank.plans[call] for rank in state if call < len(rank.plans) and rank.posts[call].memory}
        direct = {rank.plans[call].direct for rank in state if call < len(rank.plans)}
        if len(plans) > 1 or len(direct) > 1:
            raise WrongError(f"ranks do different things in call {call + 1}: {state}")


def _check_mappings(state: State) -> None:
    for rank in state:
        for found in rank.known:
            if found.name not in state[found.owner].held:
                raise WrongError(f"rank {found.owner} does not know any more that its memory is mapped: {state}")
