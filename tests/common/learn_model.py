"""The protocol by which ranks learn what comes again while no host waits (``collectives/learning``), as a model.

A window is one lesson here, and every call is one. Each rank is a host and a device; the device is that of
``device_model``. A host posts what it offers, says how far it is, looks at the verdict of its window, and runs the
call. Rank 0 gives the verdicts. Before each call a rank keeps its input, frees it and has another one at the same
address, has another one besides, or one that nobody can map, or an output that its peers have not mapped. Mapping takes
its time, and may fail. Peers may hear at any time that memory was freed, before they hear it from posts. ``MISTAKES``
are protocols that look as good.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import device_model
from device_model import (
    DEVICE_MISTAKES,
    FREES,
    HAS_NEW_OUTPUT,
    HAS_PRIVATE,
    KEEPS,
    LEFT_OUT,
    PRIVATE,
    STAGED,
    Plan,
    WrongError,
)

CHECKS_FIRST = "rank 0 looks how far its peers are, and says then that they may begin a window in step"
LOOKS_FIRST = "look at the verdict, and say then that the window has begun"
TAKES_IT_FOR_NO = "run without waiting for the end of a verdict that is being made"
DOES_NOT_ASK = "be in step though a rank has not read yet what the others know"
OVERWRITES = "post over what a peer has not read yet"
USES_AT_ONCE = "read where memory was offered, without hearing whether all ranks have mapped it"
KEEPS_TO_ITSELF = "say nothing of what could not be mapped"
CLOSES_EARLY = "close what is gone while calls that may read there are under way"
READS_UNMAPPED = "read where memory was expected that its owner has freed, and that is unmapped"
FREES_BUSY = "free memory, and say so, while calls that use it are under way"
LOOKS_AT_ONE = "confirm a list of tensors if the first one is where it is expected"
USES_A_PART = "go ahead once all have mapped the first tensor of each list"
MISTAKES = (
    CHECKS_FIRST,
    LOOKS_FIRST,
    TAKES_IT_FOR_NO,
    DOES_NOT_ASK,
    OVERWRITES,
    USES_AT_ONCE,
    KEEPS_TO_ITSELF,
    CLOSES_EARLY,
    READS_UNMAPPED,
    FREES_BUSY,
    LOOKS_AT_ONE,
    USES_A_PART,
    *DEVICE_MISTAKES,
)

LAG = 1
"""Calls of a window go by what was posted in calls up to so many before."""

RING = 2
"""Posts on record."""

ALL_ALIKE = (KEEPS, HAS_NEW_OUTPUT)
"""What concerns no tensor of a list in particular."""

IDLE, SAID, LOOKED, PROPOSED, CHECKED, MISSED = range(6)
"""What a host does."""

NOTHING, IN_THE_MAKING, IN_STEP, NOT_IN_STEP = range(4)
"""Verdicts."""


class Post(NamedTuple):
    """What a rank says of a call.

    Attributes:
        memory: name of each of its inputs; ``PRIVATE`` for one that it does not offer.
        output: peers can write to its output.
        gone: names.
        failed: of others' memory, owner and name, what this rank cannot map.
        pending: there is memory that it has not mapped yet.
    """

    memory: tuple[int, ...]
    output: bool
    gone: frozenset[int]
    failed: frozenset[tuple[int, int]]
    pending: bool


class Host(NamedTuple):
    """A host.

    Attributes:
        phase: see above.
        lesson: the last call begun.
        looked: of rank 0, how its verdict will be; the verdict that it has seen too early, by mistake.
        memory, newest, output: of its last call: names of the inputs, the newest of each that has one, whether peers
            can write to the output.
        freed: names, until the peers have heard of it.
        ring: posts on record, with their calls.
        read: the last call of which it has read all posts, or knows that some rank has not posted it.
        queue: what it has read and does not go by yet; empty for calls that some rank has not posted.
        known: owner and name of what all have heard of, and the window in which they did.
        usable: owner and name of what all ranks have mapped.
        refused: of what some rank cannot map.
        pending: of what this one has not mapped yet.
        failed: of what it could not, until the peers have heard of it.
        expected: inputs of the last call that it goes by; empty before.
        again: they were those of the call before, too.
        modes: what was expected in each call; empty for those that were staged.
    """

    phase: int
    lesson: int
    looked: int
    memory: tuple[int, ...]
    newest: tuple[int, ...]
    output: bool
    freed: frozenset[int]
    ring: tuple[tuple[int, Post], ...]
    read: int
    queue: tuple[tuple[int, tuple[Post, ...]], ...]
    known: frozenset[tuple[int, int, int]]
    usable: frozenset[tuple[int, int]]
    refused: frozenset[tuple[int, int]]
    pending: frozenset[tuple[int, int]]
    failed: frozenset[tuple[int, int]]
    expected: tuple[tuple[int, ...], ...]
    again: bool
    modes: tuple[tuple[tuple[int, ...], ...], ...]


class State(NamedTuple):
    """All of it; verdicts by window, of which that of window 0 is not used."""

    hosts: tuple[Host, ...]
    devices: tuple[device_model.Rank, ...]
    verdicts: tuple[int, ...]


def explore(
    ranks: int,
    calls: int,
    mistake: str = "",
    options: tuple[int, ...] = device_model.ALL,
    *,
    learnt: bool = True,
    may_fail: bool = False,
    tensors: int = 1,
) -> int:
    """Visit all states; how many there are.

    Args:
        ranks, calls: how many.
        mistake: one of ``MISTAKES``.
        options: what ranks may do before a call.
        learnt: the first call goes ahead; else nothing is known.
        may_fail: memory may not be mappable, or not at once.
        tensors: of a call's list. What a rank does before a call it does to one of them.

    Raises:
        WrongError: as ``device_model.explore``, and if a host waits for another one but in a miss.
    """
    first = _first(ranks, calls, learnt, tensors)
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        followers = [*_followers(state, calls, mistake, options, may_fail)]
        if not followers and any(device.run < calls for device in state.devices):
            raise WrongError(f"ranks wait for each other: {state}")
        for follower in reversed(followers):  # the first ranks go first: that is where most mistakes show
            known = len(seen)
            seen.add(follower)  # a state is large: it is hashed once
            if len(seen) > known:
                todo.append(follower)
    return len(seen)


def _first(ranks: int, calls: int, learnt: bool, tensors: int) -> State:
    inputs = tuple(range(1, tensors + 1))
    everyone = ((owner, name) for owner in range(ranks) for name in inputs)
    names = frozenset(everyone) if learnt else frozenset[tuple[int, int]]()
    none = frozenset[tuple[int, int]]()
    host = Host(
        *(IDLE, 0, NOTHING, inputs, inputs, True, frozenset[int](), (), 0, ()),
        *(frozenset((*name, -2) for name in names), names, none, none, none),
        *((inputs,) * ranks if learnt else (), learnt, ()),
    )
    device = device_model.Rank(
        *((), names, frozenset[tuple[int, int, int]](), 0),
        *(device_model.STARTS, (0,) * (calls + tensors + 1), ()),
    )
    verdicts = (IN_STEP, IN_STEP if learnt else NOTHING, *(NOTHING,) * (calls - 1))
    return State((host,) * ranks, (device,) * ranks, verdicts)


def _followers(state: State, calls: int, mistake: str, options: tuple[int, ...], may_fail: bool) -> Iterator[State]:
    for me, host in enumerate(state.hosts):
        device = state.devices[me]
        if device.run < len(device.plans):
            for devices in device_model.device_steps(state.devices, me, mistake):
                yield state._replace(devices=devices)
        others = enumerate(state.hosts)
        freed = frozenset((owner, name) for owner, other in others if owner != me for name in other.freed) & device.open
        if freed:
            yield _with(state, me, host, _closes(device, freed, mistake))
        if host.pending:
            yield _with(state, me, host._replace(pending=frozenset()), _opens(device, host.pending))
        match host.phase:
            case x if x == IDLE and host.lesson < calls:
                ready = _reads(state, me)
                if ready != host:  # it may, before its next call
                    yield _with(state, me, ready)
                yield from _begun(state, me, mistake, options)
            case x if x in (SAID, LOOKED):
                yield from _decided(state, me, mistake, may_fail)
            case x if x == MISSED:
                yield from _missed(state, me)
        if me == 0 and host.phase in (IDLE, PROPOSED, CHECKED):
            yield from _judged(state, calls, mistake)


def _with(state: State, me: int, host: Host, device: device_model.Rank | None = None) -> State:
    hosts = (*state.hosts[:me], host, *state.hosts[me + 1 :])
    if device is None:
        return state._replace(hosts=hosts)
    return state._replace(hosts=hosts, devices=(*state.devices[:me], device, *state.devices[me + 1 :]))


def _opens(device: device_model.Rank, names: frozenset[tuple[int, int]]) -> device_model.Rank:
    return device._replace(open=device.open | names)


def _begun(state: State, me: int, mistake: str, options: tuple[int, ...]) -> Iterator[State]:
    """A host posts its next call, and says that it has begun it."""
    host, device = state.hosts[me], state.devices[me]
    call = host.lesson + 1
    if mistake == LOOKS_FIRST and host.looked == NOTHING and host.phase == IDLE:
        verdict = state.verdicts[call]
        yield _with(state, me, host._replace(looked=verdict or NOT_IN_STEP))
        return
    for option, tensor in itertools.product(options, range(len(host.memory))):
        changed = None
        if tensor == 0 or option not in ALL_ALIKE:
            changed = _has(host, device, option, tensor, mistake)
        if changed is not None:
            output = option != HAS_NEW_OUTPUT
            failed = frozenset[tuple[int, int]]() if mistake == KEEPS_TO_ITSELF else changed.failed
            post = Post(changed.memory, output, changed.freed, failed, bool(changed.pending))
            ring = changed.ring
            keeps = mistake == OVERWRITES or all(other.read >= call - RING for other in state.hosts)
            if keeps:
                ring = (*(each for each in ring if each[0] != call - RING), (call, post))
            phase = LOOKED if mistake == LOOKS_FIRST else SAID
            yield _with(state, me, changed._replace(phase=phase, lesson=call, output=output, ring=ring))


def _reads(state: State, me: int) -> Host:
    """The host with all that can be read of its calls so far."""
    host = state.hosts[me]
    read, queue = host.read, host.queue
    while read < host.lesson:
        found = [dict(other.ring).get(read + 1) for other in state.hosts]
        if any(post is None and other.lesson <= read for post, other in zip(found, state.hosts, strict=True)):
            break
        read += 1
        posts = tuple(post for post in found if post is not None)
        queue = (*queue, (read, posts if len(posts) == len(found) else ()))
    return host._replace(read=read, queue=queue)


def _has(host: Host, device: device_model.Rank, option: int, tensor: int, mistake: str) -> Host | None:
    """The host with its inputs for the next call, of which one is another; None if that cannot be."""
    idle = device.run == len(device.plans) or mistake == FREES_BUSY
    memory, newest, freed = list(host.memory), list(host.newest), host.freed
    for number, name in enumerate(host.memory):
        usual = name if name != PRIVATE and name not in freed else newest[number]
        mine = option if number == tensor else KEEPS
        if mine == FREES and (not idle or usual in freed):  # who frees memory waits for its own device
            return None
        if mine == HAS_PRIVATE:
            memory[number] = PRIVATE
        elif mine in (KEEPS, HAS_NEW_OUTPUT) and usual not in freed:
            memory[number] = usual
        else:
            freed = freed | {usual} if mine == FREES else freed
            memory[number] = newest[number] = max(newest) + 1
    return host._replace(memory=tuple(memory), newest=tuple(newest), freed=freed)


def _decided(state: State, me: int, mistake: str, may_fail: bool) -> Iterator[State]:
    """A host looks at the verdict of its window, and runs its call, or has missed in it."""
    host, call = state.hosts[me], state.hosts[me].lesson
    verdict = host.looked if host.phase == LOOKED else state.verdicts[call]
    if verdict == IN_THE_MAKING and mistake != TAKES_IT_FOR_NO:
        if host.phase == LOOKED:  # it looks again
            yield _with(state, me, host._replace(phase=SAID))
        return
    host = host._replace(looked=NOTHING)
    changed = iter([(host, state.devices[me])])
    if verdict == IN_STEP:
        changed = _steps_on(host, state.devices[me], call, me, mistake, may_fail)
    for host, device in changed:
        ahead = verdict == IN_STEP and host.again
        looked_at = 1 if mistake == USES_A_PART else len(host.memory)
        ahead &= all(
            name != PRIVATE and (owner, name) in host.usable
            for owner, names in enumerate(host.expected)
            for name in names[:looked_at]
        )
        mode = host.expected if ahead else ()
        for other in state.hosts:
            if len(other.modes) >= call and other.modes[call - 1] != mode:
                raise WrongError(f"ranks do different things in call {call}: {state}")
        host = host._replace(modes=(*host.modes, mode), phase=IDLE)
        if not ahead:
            yield _with(state, me, host, _plans(device, Plan(host.memory, (STAGED,) * len(state.hosts))))
        elif host.output and (host.memory == mode[me] or (mistake == LOOKS_AT_ONE and host.memory[0] == mode[me][0])):
            read = mode if mistake == READS_UNMAPPED else _left_out(mode, device, me)
            yield _with(state, me, host, _plans(device, Plan(host.memory, read)))
        else:
            yield _with(state, me, host._replace(phase=MISSED), device)


def _left_out(mode: tuple[tuple[int, ...], ...], device: device_model.Rank, me: int) -> tuple[device_model.Names, ...]:
    """What is expected, without the inputs of ranks that have freed some of them."""
    return tuple(
        names if owner == me or all((owner, name) in device.open for name in names) else (LEFT_OUT,)
        for owner, names in enumerate(mode)
    )


def _plans(device: device_model.Rank, plan: Plan) -> device_model.Rank:
    return device._replace(plans=(*device.plans, plan))


def _closes(device: device_model.Rank, names: frozenset[tuple[int, int]], mistake: str) -> device_model.Rank:
    busy = device.run < len(device.plans) and mistake != CLOSES_EARLY
    retired = {(*each, len(device.plans)) for each in names & device.open} if busy else set()
    return device._replace(open=device.open - names, retired=device.retired | retired)


def _steps_on(
    host: Host, device: device_model.Rank, call: int, me: int, mistake: str, may_fail: bool
) -> Iterator[tuple[Host, device_model.Rank]]:
    """A window in step: go by what was posted up to ``LAG`` calls before."""
    frontier = call - LAG
    new: set[tuple[int, int]] = set()
    for lesson, posts in host.queue:
        if lesson > frontier:
            continue
        if not posts:
            host = host._replace(expected=(), again=False)
            continue
        gone = frozenset((owner, name) for owner, post in enumerate(posts) for name in post.gone)
        failed = frozenset().union(*(post.failed for post in posts))
        device = _closes(device, gone, mistake)
        known = frozenset(each for each in host.known if each[:2] not in gone)
        memories = tuple(post.memory for post in posts)
        there = {each[:2] for each in known}
        offered = {(owner, name) for owner, names in enumerate(memories) for name in names if name != PRIVATE}
        new |= offered - there
        known |= {(*each, call) for each in offered - there}
        usable = host.usable - gone
        if lesson == frontier and not any(post.pending for post in posts):
            usable |= {each[:2] for each in known if each[2] < frontier and each[:2] not in host.refused | failed}
        if mistake == USES_AT_ONCE:
            usable |= offered
        again = bool(host.expected) and memories == host.expected
        if any((owner, name) in gone for owner, names in enumerate(host.expected) for name in names):
            again = False
        host = host._replace(
            known=known,
            usable=usable,
            refused=(host.refused | failed) - gone,
            pending=host.pending - gone,
            failed=host.failed - posts[me].failed,
            freed=host.freed - posts[me].gone,
            expected=memories,
            again=again,
        )
    host = host._replace(queue=tuple(each for each in host.queue if each[0] > frontier))
    others = frozenset(each for each in new if each[0] != me)
    yield host, _opens(device, frozenset(new))
    if may_fail and others:  # of a list, the last tensor's alone: what is known of the others says nothing of it
        lost = frozenset(each for each in others if each[1] == max(name for _, name in others))
        yield host._replace(failed=host.failed | lost), _opens(device, frozenset(new) - lost)
        yield host._replace(pending=host.pending | lost), _opens(device, frozenset(new) - lost)


def _missed(state: State, me: int) -> Iterator[State]:
    """A host waits for the posts of all ranks."""
    host, device = state.hosts[me], state.devices[me]
    call, mode = host.lesson, host.modes[-1]
    found = [dict(other.ring).get(call) for other in state.hosts]
    if any(post is None and other.lesson >= call for post, other in zip(found, state.hosts, strict=True)):
        raise WrongError(f"rank {me} misses what is no longer on record in call {call}: {state}")
    if any(post is None for post in found):
        return
    posts = [post for post in found if post is not None]
    missing = {owner for owner, post in enumerate(posts) if post.memory != mode[owner] or not post.output}
    sources: tuple[device_model.Names, ...] = tuple(
        STAGED if owner in missing else names for owner, names in enumerate(mode)
    )
    late = tuple((reader, call) for reader in range(len(posts)) if reader not in missing)
    yield _with(state, me, host._replace(phase=IDLE), _plans(device, Plan(host.memory, sources, late)))


def _judged(state: State, calls: int, mistake: str) -> Iterator[State]:
    """Rank 0 says that a window will be in step, if nobody has begun it; or that it will not."""
    host = state.hosts[0]
    if host.phase == PROPOSED:
        window = state.verdicts.index(IN_THE_MAKING)
        nobody = all(other.lesson < window for other in state.hosts)
        yield _with(state, 0, host._replace(phase=CHECKED, looked=IN_STEP if nobody else NOT_IN_STEP))
        return
    if host.phase == CHECKED:
        window = host.lesson + 1 if mistake == CHECKS_FIRST else state.verdicts.index(IN_THE_MAKING)
        yield _judge(_with(state, 0, host._replace(phase=IDLE, looked=NOTHING)), window, host.looked)
        return
    window = host.lesson + 1
    if window > calls or state.verdicts[window] != NOTHING or any(other.lesson >= window for other in state.hosts):
        return
    if any(other.read < window - LAG for other in state.hosts) and mistake != DOES_NOT_ASK:
        return
    if mistake == CHECKS_FIRST:  # it has looked, and says nothing yet
        yield _with(state, 0, host._replace(phase=CHECKED, looked=IN_STEP))
        return
    yield _judge(_with(state, 0, host._replace(phase=PROPOSED)), window, IN_THE_MAKING)


def _judge(state: State, window: int, verdict: int) -> State:
    return state._replace(verdicts=(*state.verdicts[:window], verdict, *state.verdicts[window + 1 :]))
