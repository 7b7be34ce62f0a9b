"""The protocol between nodes, in every interleaving: programs of a kernel, ring, proxy, receiving thread and kernel.

Memory is weak. A store waits in a buffer of its agent, and buffers drain in any order; only a fence, or an atomic
operation that releases, waits until the own one is empty. Loads that nothing orders are made in front of what they
follow in the text. Every state that can be reached is visited. Each mistake below leads to wrong bytes or to a stop.

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


def sender(epochs: int, slices: int, capacity: int, mistake: str) -> tuple[Step, ...]:
    """The proxy's sending thread."""
    steps: list[Step] = []
    for tail in range(epochs * (slices + 1)):
        entry = Step("load", lambda _, tail=tail: ("entry", tail % capacity), register="entry")  # type: ignore[misc]
        ready = Step("reach", lambda _, tail=tail: ("sequence", tail % capacity), lambda _, tail=tail: tail + 1)  # type: ignore[misc]
        send = [
            *(Step("load slice", lambda _, part=part: (part,), register=f"part {part}") for part in range(PROGRAMS)),  # type: ignore[misc]
            Step("send"),
        ]
        release = store("tail", value=tail + 1)
        if mistake == "released too early":
            steps += [ready, release, entry, *send]
        else:
            steps += [entry, ready] if mistake == "entry read too early" else [ready, entry]
            steps += [*send, Step("fence"), release]
    return tuple(steps)


def receiver(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The proxy's receiving thread."""
    steps: list[Step] = []
    for _ in range(epochs * (slices + 1)):
        steps.append(Step("receive", register="message"))
        if mistake != "written before it is open":
            steps.append(Step("reach", lambda _: ("opened",), lambda registers: registers["message"][0]))
        for part in range(PROGRAMS):
            steps.append(Step("put down", lambda _, part=part: (part,)))  # type: ignore[misc]
        if mistake != "flag not behind the data":
            steps.append(Step("fence"))
        steps.append(
            Step(
                "store", lambda registers: ("flag", registers["message"][1]), lambda registers: registers["message"][0]
            )
        )
    return tuple(steps)


def kernel(epochs: int, slices: int, mistake: str) -> tuple[Step, ...]:
    """The receiving kernel, which reads each slice behind its flag, and work behind it that reads the output again."""
    steps: list[Step] = []
    places = [(number, part) for number in range(slices) for part in range(PROGRAMS)]

    def check(number: int, part: int, epoch: int) -> Step:
        return Step("check", lambda _: ("output", number, part), lambda _: epoch)

    for epoch in range(1, epochs + 1):
        steps += [Step("fence"), store("opened", value=epoch)]
        for number in range(slices):
            reads = [check(number, part, epoch) for part in range(PROGRAMS)]
            wait = Step("reach", lambda _, number=number: ("flag", number), lambda _, epoch=epoch: epoch)  # type: ignore[misc]
            steps += [*reads, wait] if mistake == "not acquired" else [wait, *reads]
        steps.append(Step("reach", lambda _: ("flag", END), lambda _, epoch=epoch: epoch))  # type: ignore[misc]
        steps += [check(*place, epoch) for place in places]
    return tuple(steps)


class State(NamedTuple):
    """A state: places in the texts, registers, stores on their way, memory, messages on their way."""

    at: tuple[int, ...]
    registers: tuple[tuple[tuple[str, Any], ...], ...]
    buffers: tuple[tuple[tuple[Address, Any], ...], ...]
    memory: frozenset[tuple[Address, Any]]
    channel: tuple[tuple[Any, ...], ...]


class WrongBytes(AssertionError):
    """A kernel has read something else than its slice."""


def explore(epochs: int, slices: int, capacity: int, mistake: str = "") -> int:
    """Visit all states, and return their number. Raises WrongBytes, or AssertionError where nothing can go on."""
    agents = (
        *(program(part, epochs, slices, capacity, mistake) for part in range(PROGRAMS)),
        sender(epochs, slices, capacity, mistake),
        receiver(epochs, slices, mistake),
        kernel(epochs, slices, mistake),
    )
    none = ((),) * len(agents)
    first = State((0,) * len(agents), none, none, frozenset({(("launched",), 1)}), ())
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


def successors(state: State, agents: tuple[tuple[Step, ...], ...]) -> Any:
    """The states that follow. A step that no other agent can notice is taken alone, as its order does not matter."""
    memory = dict(state.memory)
    moves = []
    for agent, steps in enumerate(agents):
        if state.at[agent] < len(steps):
            step = steps[state.at[agent]]
            moved = advance(state, agent, step, memory)
            if moved is not None:
                if step.kind in ("store", "put down") or (step.kind == "fence" and not state.buffers[agent]):
                    yield moved  # into the own buffer only
                    return
                moves.append(moved)
        drained: set[Address] = set()
        for place, (address, value) in enumerate(state.buffers[agent]):
            if address not in drained:  # stores to one address stay in order
                drained.add(address)
                rest = state.buffers[agent][:place] + state.buffers[agent][place + 1 :]
                buffers = (*state.buffers[:agent], rest, *state.buffers[agent + 1 :])
                moves.append(state._replace(buffers=buffers, memory=frozenset({**memory, address: value}.items())))
    yield from moves


def advance(state: State, agent: int, step: Step, memory: dict[Address, Any]) -> State | None:
    """The state behind a step; None if it has to wait."""
    registers = dict(state.registers[agent])
    own = dict(state.buffers[agent])  # the latest of each address
    address, value = step.address(registers), step.value(registers)
    buffer, channel, skip, before = state.buffers[agent], state.channel, 0, memory

    def load(where: Address) -> Any:
        return own.get(where, memory.get(where, 0))

    if step.kind == "store":
        buffer = (*buffer, (address, value))
    elif step.kind == "put down":
        _, number, *parts = registers["message"]
        if number != END:
            buffer = (*buffer, (("output", number, *address), parts[address[0]]))  # type: ignore[index]
    elif step.kind == "fence":
        if buffer:
            return None
    elif step.kind == "reach":
        if not load(address) >= value:
            return None
    elif step.kind == "load":
        registers[step.register] = load(address)
    elif step.kind == "load slice":
        number = registers["entry"][1] if registers["entry"] else END
        registers[step.register] = load(("send", number, *address)) if number != END else 0
    elif step.kind == "send":
        parts = [registers.pop(f"part {part}") for part in range(PROGRAMS)]
        channel = (*channel, (*(registers.pop("entry") or (0, END)), *parts))
    elif step.kind == "receive":
        if not channel:
            return None
        registers["message"], channel = channel[0], channel[1:]
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
        channel,
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
        ("released too early", 1, 2, 1),
        ("not waited until all have left", 2, 1, 3),
        ("written before it is open", 2, 1, 2),
        ("flag not behind the data", 1, 1, 2),
        ("not acquired", 1, 1, 2),
    ],
)
def test_mistakes_are_found(mistake: str, epochs: int, slices: int, capacity: int) -> None:
    with pytest.raises(AssertionError):
        explore(epochs, slices, capacity, mistake)
