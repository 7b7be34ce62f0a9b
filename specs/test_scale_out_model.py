"""The protocol between nodes, in every interleaving: programs of a kernel, words, proxies, transport, and kernel.

Memory is weak. A store waits in a buffer of its agent, and buffers drain in any order; only a fence, or an atomic
operation that releases, waits until the own one is empty. Loads that nothing orders are made in front of what they
follow in the text. Every state that can be reached is visited. Each mistake below leads to wrong bytes or to a stop.

A slice has a part of each program. Its parts are sent, put down and checked in one step, since none depends on another.

Many slices are under way. So each thread of a proxy is two agents here, one that begins transfers and one that ends
them, which allows more interleavings than a thread has. The sending thread takes slices in any order in which they are
ready. The transport reads the bytes of a slice at any time after its beginning, and puts them down at any time after
the other side has begun to receive it.

Of two ranks, one sends and one receives, which is all that the protocol has: the other direction has words of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import pytest

from exploring import explore

PROGRAMS = 2
END = 9
"""Number of the count of programs that have ended, among slices."""

Registers = dict[str, Any]
Address = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of an agent.

    Attributes:
        kind: what it does.
        address: its address, from the registers.
        value: what it stores, waits for, or compares with, from the registers.
        register: where it keeps what it loads.
        skip: steps that it leaves out unless it is the last to arrive, or waits for the end.
    """

    kind: str
    address: Callable[[Registers], Address] = lambda registers: ()
    value: Callable[[Registers], Any] = lambda registers: None
    register: str = ""
    skip: int = 0


def store(*address: Hashable, value: Any) -> Step:
    return Step("store", lambda _: address, lambda _: value)


def reach(*address: Hashable, value: Any) -> Step:
    return Step("reach", lambda _: address, lambda _: value)


def program(part: int, epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """A program of the sending kernel: its part of each slice; the last one to arrive goes on with the slice."""
    steps: list[Step] = []
    for epoch in range(1, epochs + 1):
        steps.append(Step("reach", lambda _: ("launched",), lambda _, epoch=epoch: epoch))  # type: ignore[misc]
        for number in range(slices):
            steps.append(store("send", number, part, value=epoch))
            handed = [store("ready", number, value=epoch)]  # send_release
            if mistake != "neither arrival nor word released":
                handed.insert(0, Step("fence"))
            kind = "arrive relaxed" if "arriv" in mistake else "arrive"
            steps.append(Step(kind, lambda _, number=number: ("count", number), skip=len(handed)))  # type: ignore[misc]
            steps += handed
        ends = [reach("over", value=epoch), store("launched", value=epoch + 1)]  # the next launch of the stream
        if mistake == "not waited until all have left":
            del ends[0]
        steps.append(Step("arrive", lambda _: ("count", END), skip=len(ends)))
        steps += ends
    return tuple(steps)


def places(epochs: int, slices: int) -> list[tuple[int, bool]]:
    """The places of slices in the order in which they are sent, and for each whether it is the last one of a call."""
    return [(place, place % slices == slices - 1) for place in range(epochs * slices)]


def begins_sending(epochs: int, slices: int) -> tuple[Step, ...]:
    """The proxy's sending thread, as far as it takes slices that are ready and begins to send them."""
    return tuple(
        Step("take", lambda _: ("ready",), lambda _, of=place // slices + 1: of) for place, _ in places(epochs, slices)
    )  # type: ignore[misc]


def reads(epochs: int, slices: int) -> tuple[Step, ...]:
    """The transport where a slice comes from."""
    steps: list[Step] = []
    for place, _ in places(epochs, slices):
        steps.append(Step("load slice", lambda _, place=place: (place,), register="parts"))  # type: ignore[misc]
        steps.append(Step("leave", lambda _, place=place: (place,)))  # type: ignore[misc]
    return tuple(steps)


def ends_sending(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The proxy's sending thread, as far as it counts the slices that have left."""
    steps: list[Step] = []
    for place, is_last in places(epochs, slices):
        if mistake == "over when begun":
            steps.append(Step("message", lambda _, place=place: (place,)))  # type: ignore[misc]
        elif mistake != "over by the first to leave" or place % slices == 0:
            steps.append(reach("left", value=place + 1))
        if is_last:
            steps += [Step("fence"), store("over", value=place // slices + 1)]
    return tuple(steps)


def begins_receiving(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The receiving thread, as far as it reads notes and begins to receive their slices."""
    steps: list[Step] = []
    for place, _ in places(epochs, slices):
        steps.append(Step("message", lambda _, place=place: (place,)))  # type: ignore[misc]
        if mistake != "written before it is open":
            steps.append(Step("reach", lambda _: ("opened",), lambda registers: registers["message"][0]))
        steps.append(Step("post", lambda _, place=place: (place,)))  # type: ignore[misc]
    return tuple(steps)


def puts_down(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The transport where a slice arrives."""
    steps: list[Step] = []
    for place, _ in places(epochs, slices):
        steps += [reach("posted", value=place + 1), reach("left", value=place + 1)]
        steps.append(Step("put down", lambda _, place=place: (place,)))  # type: ignore[misc]
        if mistake != "ended before its bytes are in place":
            steps.append(Step("fence"))
        steps.append(Step("come", lambda _, place=place: (place,)))  # type: ignore[misc]
    return tuple(steps)


def ends_receiving(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The receiving thread, as far as it counts what has come, and ends calls."""
    steps: list[Step] = []
    for place, is_last in places(epochs, slices):
        steps.append(reach("posted" if mistake == "counted when begun" else "came", value=place + 1))
        if mistake == "over by the first to come":
            is_last = place % slices == 0
        if is_last:
            steps += [Step("fence"), store("ended", value=place // slices + 1)]
    return tuple(steps)


def kernel(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The receiving kernel, which waits for the end of its call, and work behind it that reads the output."""
    steps: list[Step] = []

    def check(number: int, epoch: int) -> Step:
        return Step("check", lambda _: ("output", number), lambda _: (epoch,) * PROGRAMS)

    for epoch in range(1, epochs + 1):
        steps += [Step("fence"), store("opened", value=epoch)]
        wait, read = reach("ended", value=epoch), [check(number, epoch) for number in range(slices)]
        steps += [*read, wait] if mistake == "not acquired" else [wait, *read]
    return tuple(steps)


class State(NamedTuple):
    """A state: places in the texts, registers, stores on their way, memory, headers and bytes in the order sent."""

    at: tuple[int, ...]
    registers: tuple[tuple[tuple[str, Any], ...], ...]
    buffers: tuple[tuple[tuple[Address, Any], ...], ...]
    memory: frozenset[tuple[Address, Any]]
    headers: tuple[tuple[Any, ...], ...]
    bytes: tuple[tuple[Any, ...], ...]


class WrongBytes(AssertionError):
    """A kernel has read something else than its slice."""


def states(epochs: int, slices: int, mistake: str = "") -> int:
    """Return the number of states. Raises WrongBytes, or AssertionError where nothing can go on."""
    agents = (
        *(program(part, epochs, slices, mistake) for part in range(PROGRAMS)),
        begins_sending(epochs, slices),
        reads(epochs, slices),
        ends_sending(epochs, slices, mistake),
        begins_receiving(epochs, slices, mistake),
        puts_down(epochs, slices, mistake),
        ends_receiving(epochs, slices, mistake),
        kernel(epochs, slices, mistake),
    )

    def following(state: State) -> list[State]:
        found = list(successors(state, agents))
        if not found:
            assert all(at == len(steps) for at, steps in zip(state.at, agents, strict=True)), ("a stop", state)
        return found

    none = ((),) * len(agents)
    first = State((0,) * len(agents), none, none, frozenset({(("launched",), 1)}), (), ())
    return explore(settled(first, agents), following)


UNNOTICED = ("store", "put down", "reach", "message", "leave", "post", "come")
"""Steps whose order does not matter: they touch the own buffer only, wait for what only grows, or let others wait no
longer."""

GROWING = ("ready", "over", "launched", "opened", "ended")
"""Words that only grow, which is checked."""


def settled(state: State, agents: tuple[tuple[Step, ...], ...]) -> State:
    """The state behind all steps whose order does not matter."""
    goes_on = True
    while goes_on:
        goes_on = False
        for agent, steps in enumerate(agents):
            while state.at[agent] < len(steps):
                step = steps[state.at[agent]]
                if step.kind not in UNNOTICED and (step.kind != "fence" or state.buffers[agent]):
                    break
                moved = advance(state, agent, step, dict(state.memory))
                if moved is None:
                    break
                state, goes_on = moved, True
    return state


def successors(state: State, agents: tuple[tuple[Step, ...], ...]) -> Any:
    """The states that follow a settled one, settled."""
    memory = dict(state.memory)
    for agent, steps in enumerate(agents):
        if state.at[agent] < len(steps):
            step = steps[state.at[agent]]
            ready = [None] if step.kind != "take" else ready_slices(state, step, memory)
            for number in ready:
                moved = advance(state, agent, step, memory, number)
                if moved is not None:
                    yield settled(moved, agents)
        drained: set[Address] = set()
        for place, (address, value) in enumerate(state.buffers[agent]):
            if address not in drained:  # stores to one address stay in order
                drained.add(address)
                assert address[0] not in GROWING or value >= memory.get(address, 0), ("it shrinks", address, state)
                rest = state.buffers[agent][:place] + state.buffers[agent][place + 1 :]
                buffers = (*state.buffers[:agent], rest, *state.buffers[agent + 1 :])
                found = state._replace(buffers=buffers, memory=frozenset({**memory, address: value}.items()))
                yield settled(found, agents)


def ready_slices(state: State, step: Step, memory: dict[Address, Any]) -> list[int]:
    """The slices of an epoch that are ready, and that the sending thread has not taken."""
    epoch = step.value({})
    words = [address[1] for address, value in memory.items() if address[0] == "ready" and value == epoch]
    return [int(number) for number in words if (epoch, number) not in state.headers]  # type: ignore[call-overload]


def advance(
    state: State, agent: int, step: Step, memory: dict[Address, Any], number: int | None = None
) -> State | None:
    """The state behind a step; None if it has to wait. ``number``: of the slice that it takes."""
    registers = dict(state.registers[agent])
    own = dict(state.buffers[agent])  # the latest of each address
    address, value = step.address(registers), step.value(registers)
    buffer, headers, wire, skip, before = state.buffers[agent], state.headers, state.bytes, 0, memory

    def load(where: Address) -> Any:
        return own.get(where, memory.get(where, 0))

    if step.kind == "store":
        buffer = (*buffer, (address, value))
    elif step.kind == "put down":
        buffer = (*buffer, (("output", headers[address[0]][1]), wire[address[0]]))  # type: ignore[index]
    elif step.kind == "fence":
        if buffer:
            return None
    elif step.kind == "reach":
        if not load(address) >= value:
            return None
    elif step.kind == "load slice":
        if len(headers) <= address[0]:  # type: ignore[operator]
            return None
        taken = headers[address[0]][1]  # type: ignore[index]
        registers[step.register] = tuple(load(("send", taken, part)) for part in range(PROGRAMS))
    elif step.kind == "take":
        headers = (*headers, (value, number))
    elif step.kind == "message":
        if len(headers) <= address[0]:  # type: ignore[operator]
            return None
        registers["message"] = headers[address[0]]  # type: ignore[index]
    elif step.kind == "leave":
        if len(headers) <= address[0]:  # type: ignore[operator]
            return None
        wire = (*wire, registers.pop("parts", ()))
        memory = {**memory, ("left",): len(wire)}
    elif step.kind in ("post", "come"):
        memory = {**memory, ({"post": "posted", "come": "came"}[step.kind],): address[0] + 1}  # type: ignore[operator]
    elif step.kind == "check":
        if load(address) != value:
            raise WrongBytes(f"{address}: {load(address)} in place of {value}")
    else:
        if buffer and step.kind == "arrive":
            return None
        count = (memory.get(address, 0) + 1) % PROGRAMS
        memory = {**memory, address: count}
        skip = step.skip * (count != 0)
    return State(
        (*state.at[:agent], state.at[agent] + 1 + skip, *state.at[agent + 1 :]),
        (*state.registers[:agent], tuple(sorted(registers.items())), *state.registers[agent + 1 :]),
        (*state.buffers[:agent], buffer, *state.buffers[agent + 1 :]),
        state.memory if memory is before else frozenset(memory.items()),
        headers,
        wire,
    )


@pytest.mark.parametrize(("epochs", "slices"), [(1, 2), (2, 1), (2, 2)])
def test_every_interleaving(epochs: int, slices: int) -> None:
    assert states(epochs, slices) > 100


@pytest.mark.parametrize(
    ("mistake", "epochs", "slices"),
    [
        ("neither arrival nor word released", 1, 1),
        ("arrival not released", 1, 1),
        ("over when begun", 2, 1),
        ("over by the first to leave", 2, 2),
        ("not waited until all have left", 2, 1),
        ("written before it is open", 2, 1),
        ("ended before its bytes are in place", 1, 1),
        ("counted when begun", 1, 1),
        ("over by the first to come", 1, 2),
        ("not acquired", 1, 1),
    ],
)
def test_mistakes_are_found(mistake: str, epochs: int, slices: int) -> None:
    with pytest.raises(AssertionError):
        states(epochs, slices, mistake)
