"""The protocol between nodes, in every interleaving: programs of a kernel, ring, proxies, transport, and kernel.

Memory is weak. A store waits in a buffer of its agent, and buffers drain in any order; only a fence, or an atomic
operation that releases, waits until the own one is empty. Loads that nothing orders are made in front of what they
follow in the text. Every state that can be reached is visited. Each mistake below leads to wrong bytes or to a stop.

A slice has a part of each program. Its parts are sent, put down and checked in one step, since none depends on another.

Many slices are under way. So each thread of a proxy is two agents here, one that begins transfers and one that ends
them, which allows more interleavings than a thread has. The transport reads the bytes of a slice at any time after its
beginning, and puts them down at any time after the other side has begun to receive it.

Of two ranks, one sends and one receives, which is all that the protocol has: the other direction has words of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import pytest
from marks import long

PROGRAMS = 2
END = 9
"""Number of a call's end among its slices."""

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


def push(epoch: int, number: int, capacity: int, mistake: str) -> list[Step]:
    """``send_release``; number END is the end of the call."""

    def slot(registers: Registers) -> int:
        return int(registers["ticket"]) % capacity

    steps = [
        Step("add", lambda _: ("head",), register="ticket"),
        Step("reach", lambda _: ("tail",), lambda registers: registers["ticket"] - capacity + 1),
        Step("store", lambda registers: ("entry", slot(registers)), lambda _: (epoch, number)),
        Step("fence"),
        Step("store", lambda registers: ("sequence", slot(registers)), lambda registers: registers["ticket"] + 1),
    ]
    if mistake == "no room":
        del steps[1]
    if mistake == "sequence not released":
        steps = [step for step in steps if step.kind != "fence"]
    return steps


def program(part: int, epochs: int, slices: int, capacity: int, mistake: str) -> tuple[Step, ...]:
    """A program of the sending kernel: its part of each slice; the last one to arrive goes on with the slice."""
    steps: list[Step] = []
    for epoch in range(1, epochs + 1):
        steps.append(Step("reach", lambda _: ("launched",), lambda _, epoch=epoch: epoch))  # type: ignore[misc]
        for number in range(slices):
            steps.append(store("send", number, part, value=epoch))
            pushed = push(epoch, number, capacity, mistake)
            kind = "arrive relaxed" if mistake == "arrival not released" else "arrive"
            steps.append(Step(kind, lambda _, number=number: ("count", number), skip=len(pushed)))  # type: ignore[misc]
            steps += pushed
        ends = push(epoch, END, capacity, mistake)
        if mistake != "not waited until all have left":
            ends.append(Step("reach", lambda _: ("tail",), lambda registers: registers["ticket"] + 1))
        ends.append(store("launched", value=epoch + 1))  # the next launch of the stream
        steps.append(Step("arrive", lambda _: ("count", END), skip=len(ends)))
        steps += ends
    return tuple(steps)


def numbers(epochs: int, slices: int) -> list[tuple[int, bool]]:
    """The places of a call's descriptors in the order of tickets, and for each whether it is the end of a call."""
    return [(place, place % (slices + 1) == slices) for place in range(epochs * (slices + 1))]


def begins_sending(epochs: int, slices: int, capacity: int, mistake: str) -> tuple[Step, ...]:
    """The proxy's sending thread, as far as it takes entries of the ring and begins to send their slices."""
    steps: list[Step] = []
    for place, _ in numbers(epochs, slices):
        entry = Step("load", lambda _, place=place: ("entry", place % capacity), register="entry")  # type: ignore[misc]
        ready = Step("reach", lambda _, place=place: ("sequence", place % capacity), lambda _, place=place: place + 1)  # type: ignore[misc]
        steps += [entry, ready] if mistake == "entry read too early" else [ready, entry]
        steps.append(Step("begin"))
    return tuple(steps)


def reads(epochs: int, slices: int) -> tuple[Step, ...]:
    """The transport where a slice comes from."""
    steps: list[Step] = []
    for place, is_end in numbers(epochs, slices):
        if not is_end:
            steps.append(Step("load slice", lambda _, place=place: (place,), register="parts"))  # type: ignore[misc]
        steps.append(Step("leave", lambda _, place=place: (place,)))  # type: ignore[misc]
    return tuple(steps)


def ends_sending(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The proxy's sending thread, as far as it gives entries back in the order of the ring."""
    steps: list[Step] = []
    for place, _ in numbers(epochs, slices):
        if mistake == "released when begun":
            steps.append(Step("message", lambda _, place=place: (place,)))  # type: ignore[misc]
        elif mistake != "released by the end at once":
            steps.append(reach("left", value=place + 1))
        else:
            steps.append(Step("message", lambda _, place=place: (place - place % (slices + 1) + slices,)))  # type: ignore[misc]
        steps += [Step("fence"), store("tail", value=place + 1)]
    return tuple(steps)


def begins_receiving(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The receiving thread, as far as it reads headers and begins to receive their slices."""
    steps: list[Step] = []
    for place, is_end in numbers(epochs, slices):
        steps.append(Step("message", lambda _, place=place: (place,)))  # type: ignore[misc]
        if mistake != "written before it is open":
            steps.append(Step("reach", lambda _: ("opened",), lambda registers: registers["message"][0]))
        steps.append(Step("post", lambda _, place=place: (place,)))  # type: ignore[misc]
        if is_end and mistake == "end not behind its slices":
            steps.append(Step("store", lambda _: ("flag", END), lambda registers: registers["message"][0]))
    return tuple(steps)


def puts_down(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The transport where a slice arrives."""
    steps: list[Step] = []
    for place, is_end in numbers(epochs, slices):
        steps += [reach("posted", value=place + 1), reach("left", value=place + 1)]
        if not is_end:
            steps.append(Step("put down", lambda _, place=place: (place,)))  # type: ignore[misc]
            if mistake != "ended before its bytes are in place":
                steps.append(Step("fence"))
        steps.append(Step("come", lambda _, place=place: (place,)))  # type: ignore[misc]
    return tuple(steps)


def ends_receiving(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The receiving thread, as far as it raises flags in the order of headers."""
    steps: list[Step] = []
    for place, _ in numbers(epochs, slices):
        steps.append(reach("posted" if mistake == "flag when begun" else "came", value=place + 1))
        steps.append(Step("message", lambda _, place=place: (place,)))  # type: ignore[misc]
        steps += [
            Step("fence"),
            Step("store", lambda found: ("flag", found["message"][1]), lambda found: found["message"][0]),
        ]
    return tuple(steps)


def kernel(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The receiving kernel, which reads each slice behind its flag, and work behind it that reads the output again."""
    steps: list[Step] = []

    def check(number: int, epoch: int) -> Step:
        return Step("check", lambda _: ("output", number), lambda _: (epoch,) * PROGRAMS)

    for epoch in range(1, epochs + 1):
        steps += [Step("fence"), store("opened", value=epoch)]
        for number in range(slices):
            wait = Step("reach", lambda _, number=number: ("flag", number), lambda _, epoch=epoch: epoch)  # type: ignore[misc]
            if slices > 1 and number == slices - 1:
                continue  # a slice without a flag, which only the end of the call tells of
            read = check(number, epoch)
            steps += [read, wait] if mistake == "not acquired" else [wait, read]
        steps.append(Step("reach", lambda _: ("flag", END), lambda _, epoch=epoch: epoch))  # type: ignore[misc]
        steps += [check(number, epoch) for number in range(slices)]
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


def explore(epochs: int, slices: int, capacity: int, mistake: str = "") -> int:
    """Visit all states, and return their number. Raises WrongBytes, or AssertionError where nothing can go on."""
    agents = (
        *(program(part, epochs, slices, capacity, mistake) for part in range(PROGRAMS)),
        begins_sending(epochs, slices, capacity, mistake),
        reads(epochs, slices),
        ends_sending(epochs, slices, mistake),
        begins_receiving(epochs, slices, mistake),
        puts_down(epochs, slices, mistake),
        ends_receiving(epochs, slices, mistake),
        kernel(epochs, slices, mistake),
    )
    none = ((),) * len(agents)
    first = State((0,) * len(agents), none, none, frozenset({(("launched",), 1)}), (), ())
    first = settled(first, agents)
    seen, waiting = {first}, [first]
    while waiting:
        state = waiting.pop()
        following = list(successors(state, agents))
        if not following:
            assert all(at == len(steps) for at, steps in zip(state.at, agents, strict=True)), ("a stop", state)
        for found in following:
            if found not in seen:
                seen.add(found)
                waiting.append(found)
    return len(seen)


UNNOTICED = ("store", "put down", "reach", "message", "begin", "leave", "post", "come")
"""Steps whose order does not matter: they touch the own buffer only, wait for what only grows, or let others wait no
longer."""

GROWING = ("sequence", "tail", "launched", "opened", "flag")
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
            moved = advance(state, agent, steps[state.at[agent]], memory)
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


def advance(state: State, agent: int, step: Step, memory: dict[Address, Any]) -> State | None:
    """The state behind a step; None if it has to wait."""
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
    elif step.kind == "load":
        registers[step.register] = load(address)
    elif step.kind == "load slice":
        if len(headers) <= address[0]:  # type: ignore[operator]
            return None
        number = headers[address[0]][1]  # type: ignore[index]
        registers[step.register] = tuple(load(("send", number, part)) for part in range(PROGRAMS))
    elif step.kind == "begin":
        headers = (*headers, registers.pop("entry") or (0, END))
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
    elif step.kind == "add":
        if buffer:
            return None
        registers[step.register] = memory.get(address, 0)
        memory = {**memory, address: registers[step.register] + 1}
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


@pytest.mark.parametrize(
    ("epochs", "slices", "capacity"), [(1, 2, 1), (2, 1, 1), long(2, 1, 2), long(1, 2, 4), long(2, 2, 1), long(2, 2, 2)]
)
def test_every_interleaving(epochs: int, slices: int, capacity: int) -> None:
    assert explore(epochs, slices, capacity) > 100


@pytest.mark.parametrize(
    ("mistake", "epochs", "slices", "capacity"),
    [
        ("sequence not released", 1, 1, 2),
        ("arrival not released", 1, 1, 2),
        ("no room", 1, 1, 1),
        ("entry read too early", 1, 1, 2),
        ("released when begun", 2, 1, 2),
        ("released by the end at once", 2, 1, 3),
        ("not waited until all have left", 2, 1, 3),
        ("written before it is open", 2, 1, 2),
        ("ended before its bytes are in place", 1, 1, 2),
        ("flag when begun", 1, 1, 2),
        ("end not behind its slices", 1, 2, 4),
        ("not acquired", 1, 1, 2),
    ],
)
def test_mistakes_are_found(mistake: str, epochs: int, slices: int, capacity: int) -> None:
    with pytest.raises(AssertionError):
        explore(epochs, slices, capacity, mistake)
