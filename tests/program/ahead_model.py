"""The protocol by which ranks read each other's inputs where they come again (``collectives/ahead.py``), as a model.

Each rank is a host, which makes calls, and a device, which runs them later and in order; a device has four steps in a
call. All orders of all steps are visited. Before each call a rank keeps its input where its peers expect it, or frees
it and has another one at the same address, or has another one besides, or one that nobody can map, or an output that
its peers have not mapped. ``MISTAKES`` are protocols that look as good.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TRUSTS = "end a call without the owners' confirmation"
CONFIRMS_EARLY = "confirm before the right bytes are there"
WRITES_EARLY = "write over what a peer may still be reading into"
WRITES_TO_THE_LAST = "write to where a peer's output was in its last call"
KNOWS_BY_ADDRESS = "take memory for what peers expect if its address is the same"
ASSUMES_THE_OUTPUT = "miss only if the input is elsewhere"
CLOSES_EARLY = "close what is gone while calls that may read there are under way"
HEARS_AT_ONCE = "wait for the peers as soon as one of them is heard to wish for it"
OVERWRITES = "begin the next call before the peers have read"
MISTAKES = (
    TRUSTS,
    CONFIRMS_EARLY,
    WRITES_EARLY,
    WRITES_TO_THE_LAST,
    KNOWS_BY_ADDRESS,
    ASSUMES_THE_OUTPUT,
    CLOSES_EARLY,
    HEARS_AT_ONCE,
    OVERWRITES,
)

KEEPS, FREES, HAS_MORE, HAS_PRIVATE, HAS_NEW_OUTPUT = range(5)
"""What a rank does before a call."""

ALL = (KEEPS, FREES, HAS_MORE, HAS_PRIVATE, HAS_NEW_OUTPUT)

IDLE, OFFERED, MISSED = range(3)
"""What a host does."""

STARTS, READS, WRITES, ENDS = range(4)
"""What a device does next."""

LAG = 1
PRIVATE = 0
STAGED = -1
"""Where what is read lies: not in memory of the caller."""


class Post(NamedTuple):
    """What a rank says of a call.

    Attributes:
        ahead: it waits for nobody, or has missed.
        memory: name of its input, as peers will understand it.
        output: of which call the output is that peers can write to; 0 if they cannot, less if they cannot in truth.
        gone: names.
    """

    ahead: bool
    memory: int
    output: int
    gone: frozenset[int] = frozenset()


Names = int | tuple[int, ...]
"""Of an input; of the inputs of a call with a list of tensors."""


class Plan(NamedTuple):
    """What a device does in a call.

    Attributes:
        memory: name of the input in truth; names.
        sources: where it reads, by rank.
        late: ranks whose outputs it writes to, since they have read elsewhere; and the output it writes to.
    """

    memory: Names
    sources: tuple[Names, ...]
    late: tuple[tuple[int, int], ...] = ()


class Rank(NamedTuple):
    """A rank.

    Attributes:
        phase: of its host.
        memory: name of its input for the last call.
        newest: name.
        freed: names of what it has freed and peers may have mapped.
        posts, plans: of its calls so far; the last plan may be missing.
        wish: the call from which on it wishes to be heard.
        since: the first call that goes ahead; 0 while they wait for each other.
        expected: inputs of all ranks in calls that go ahead, or in the last one that was settled.
        open: what it has mapped: owner and name.
        retired: what it closes when its device has ended a call: owner, name and call.
        run: calls that its device has ended.
        step: what that does next.
        held: for each of its names the call whose input is there.
        found: what it has read in this call, by rank.
    """

    phase: int
    memory: int
    newest: int
    freed: frozenset[int]
    posts: tuple[Post, ...]
    plans: tuple[Plan, ...]
    wish: int
    since: int
    expected: tuple[int, ...]
    open: frozenset[tuple[int, int]]
    retired: frozenset[tuple[int, int, int]]
    run: int
    step: int
    held: tuple[int, ...]
    found: tuple[int, ...]


State = tuple[Rank, ...]


class WrongError(AssertionError):
    """The protocol does what it must not."""


def explore(ranks: int, calls: int, mistake: str = "", options: tuple[int, ...] = ALL) -> int:
    """Visit all states; how many there are.

    Raises:
        WrongError: a call ends with other bytes than those of its owners; a rank writes to an output that is not in
            that call, or reads where nothing is mapped; ranks wait for each other for ever, or do different things.
    """
    everywhere = frozenset((owner, 1) for owner in range(ranks))
    nothing: frozenset[int] = frozenset()
    start = Rank(
        IDLE, 1, 1, nothing, (), (), 0, 1, (1,) * ranks, everywhere, frozenset(), 0, STARTS, (0,) * (calls + 2), ()
    )
    first: State = (start,) * ranks
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        followers = [*_followers(state, calls, mistake, options)]
        if not followers and any(rank.run < calls for rank in state):
            raise WrongError(f"ranks wait for each other: {state}")
        for follower in followers:
            if follower not in seen:
                seen.add(follower)
                todo.append(follower)
    return len(seen)


def _followers(state: State, calls: int, mistake: str, options: tuple[int, ...]) -> Iterator[State]:
    for me, rank in enumerate(state):
        if rank.phase == IDLE and len(rank.posts) < calls:
            for changed in _begun(state, me, mistake, options):
                yield _with(state, me, changed)
        elif rank.phase != IDLE and all(len(other.posts) >= len(rank.posts) for other in state):
            yield _with(
                state, me, _settled(state, me, mistake) if rank.phase == OFFERED else _missed(state, me, mistake)
            )
        if rank.run < len(rank.plans):
            yield from device_steps(state, me, mistake)


def _with(state: State, me: int, rank: Rank) -> State:
    return (*state[:me], rank, *state[me + 1 :])


def _begun(state: State, me: int, mistake: str, options: tuple[int, ...]) -> Iterator[Rank]:
    """A host makes its next call."""
    rank = state[me]
    call = len(rank.posts) + 1
    ahead = rank.since > 0
    if ahead:
        if any(len(other.posts) < call - LAG for other in state):
            return
        heard = call if mistake == HEARS_AT_ONCE else call - LAG
        if any(rank.since <= other.wish <= heard for other in state):
            ahead = False
    for other in state:
        if len(other.posts) >= call and other.posts[call - 1].ahead != ahead:
            raise WrongError(f"ranks do different things in call {call}: {state}")
    for option in options:
        changed = _has(rank, me, option)
        if changed is None:
            continue
        output = call if option != HAS_NEW_OUTPUT else -call if mistake == ASSUMES_THE_OUTPUT else 0
        post = Post(ahead, changed.memory, output, frozenset() if ahead else changed.freed)
        if not ahead:
            changed = changed._replace(since=0, posts=(*rank.posts, post))
            if changed.memory == PRIVATE:
                yield changed._replace(plans=(*rank.plans, Plan(PRIVATE, (STAGED,) * len(state))))
            else:
                yield changed._replace(phase=OFFERED)
            continue
        looks = option == FREES and mistake == KNOWS_BY_ADDRESS
        there = changed.memory == rank.expected[me] or looks
        if there:
            post = post._replace(memory=rank.expected[me])
        changed = changed._replace(posts=(*rank.posts, post))
        if there and post.output:
            yield changed._replace(plans=(*rank.plans, Plan(changed.memory, rank.expected)))
        else:
            wish = call if rank.wish < rank.since else rank.wish
            yield changed._replace(phase=MISSED, wish=wish)


def _has(rank: Rank, me: int, option: int) -> Rank | None:
    """The rank with its input for the next call; None if that cannot be."""
    usual = rank.expected[me] if rank.expected[me] not in rank.freed else rank.newest
    if usual in rank.freed:
        option = HAS_MORE if option in (KEEPS, HAS_NEW_OUTPUT) else option
    match option:
        case x if x in (KEEPS, HAS_NEW_OUTPUT):
            return rank._replace(memory=usual)
        case x if x == HAS_PRIVATE:
            return rank._replace(memory=PRIVATE)
        case x if x == FREES:
            if rank.run < len(rank.plans) or usual in rank.freed:  # who frees memory waits for its own device
                return None
            return rank._replace(memory=rank.newest + 1, newest=rank.newest + 1, freed=rank.freed | {usual})
    return rank._replace(memory=rank.newest + 1, newest=rank.newest + 1)


def _settled(state: State, me: int, mistake: str) -> Rank:
    """All have posted a call in which they wait for each other."""
    rank, ranks = state[me], len(state)
    call = len(rank.posts)
    posts = [other.posts[call - 1] for other in state]
    if not all(post.memory for post in posts):
        return rank._replace(phase=IDLE, plans=(*rank.plans, Plan(rank.memory, (STAGED,) * ranks)))
    memories = tuple(post.memory for post in posts)
    gone = {(owner, name) for owner, post in enumerate(posts) for name in post.gone}
    busy = rank.run < len(rank.plans) and mistake != CLOSES_EARLY
    retired = {(*each, len(rank.plans)) for each in gone & rank.open} if busy else set()
    opened = (rank.open - gone) | {(owner, name) for owner, name in enumerate(memories)}
    return rank._replace(
        phase=IDLE,
        plans=(*rank.plans, Plan(rank.memory, memories)),
        freed=rank.freed - posts[me].gone,
        open=opened,
        retired=rank.retired | retired,
        since=call + 1 if memories == rank.expected else 0,
        expected=memories,
    )


def _missed(state: State, me: int, mistake: str) -> Rank:
    """All have posted a call that goes ahead and this rank has missed in."""
    rank = state[me]
    call = len(rank.posts)
    posts = [other.posts[call - 1] for other in state]
    changed = {owner for owner, post in enumerate(posts) if post.memory != rank.expected[owner]}
    waiting = changed | {owner for owner, post in enumerate(posts) if not post.output}
    sources = tuple(STAGED if owner in changed else name for owner, name in enumerate(rank.expected))
    late: tuple[tuple[int, int], ...] = ()
    if me in changed:
        last = mistake == WRITES_TO_THE_LAST
        late = tuple((reader, posts[reader].output - last) for reader in range(len(state)) if reader not in waiting)
    return rank._replace(phase=IDLE, plans=(*rank.plans, Plan(rank.memory, sources, late)))


def each_of(names: Names) -> tuple[int, ...]:
    return names if isinstance(names, tuple) else (names,)


def device_steps(state: State, me: int, mistake: str) -> Iterator[State]:
    rank = state[me]
    call, plan = rank.run + 1, rank.plans[rank.run]
    peers = [peer for peer in range(len(state)) if peer != me]
    if rank.step == STARTS:
        held = list(rank.held)
        for name in each_of(plan.memory):
            if name != PRIVATE:
                held[name] = call
        yield _with(state, me, rank._replace(step=READS, held=tuple(held), found=(0,) * len(state)))
    elif rank.step == READS:
        if all(_is_behind(state[peer], call, STARTS) for peer in peers):
            found = list(rank.found)
            for peer in peers:
                read = [_read(state, me, peer, call, name) for name in each_of(plan.sources[peer])]
                found[peer] = call if all(each == call for each in read) else -1
            yield _with(state, me, rank._replace(step=WRITES, found=tuple(found)))
    elif rank.step == WRITES:
        early = mistake == OVERWRITES or (mistake == WRITES_EARLY and plan.late)
        if early or all(_is_behind(state[peer], call, READS) for peer in peers):
            for reader, output in plan.late:
                other = state[reader]
                if other.run != call - 1 or other.step == STARTS or output != call:
                    raise WrongError(f"rank {me} writes to output {output} of rank {reader} in call {call}: {state}")
                found = list(other.found)
                found[me] = call
                state = _with(state, reader, other._replace(found=tuple(found)))
            yield _with(state, me, rank._replace(step=ENDS))
    elif mistake == TRUSTS or all(_has_confirmed(state[peer], me, call, mistake) for peer in peers):
        wrong = [peer for peer in peers if rank.found[peer] != call]
        if wrong:
            raise WrongError(f"rank {me} ends call {call} with other bytes of ranks {wrong}: {state}")
        retired = frozenset(each for each in rank.retired if each[2] > call)
        yield _with(state, me, rank._replace(run=call, step=STARTS, found=(), retired=retired))


def _is_behind(rank: Rank, call: int, step: int) -> bool:
    return (rank.run + 1, rank.step) > (call, step)


def _has_confirmed(owner: Rank, reader: int, call: int, mistake: str) -> bool:
    if owner.run >= call:
        return True
    if owner.run < call - 1 or owner.step == STARTS:
        return False
    late = any(reader == each for each, _ in owner.plans[call - 1].late)
    return not late or mistake == CONFIRMS_EARLY or owner.step > WRITES


def _read(state: State, me: int, owner: int, call: int, name: int) -> int:
    """The call whose bytes a device reads."""
    if name == STAGED:
        return call
    rank = state[me]
    if (owner, name) not in rank.open and not any(each[:2] == (owner, name) for each in rank.retired):
        raise WrongError(f"rank {me} reads memory {name} of rank {owner}, which it has not mapped: {state}")
    return state[owner].held[name]
