"""Names of ranks, queues, command indices and byte ranges in violations: the same words everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidelane.program.collective import Span
from sidelane.program.ir import Command, Engine, describe
from sidelane.program.verify.layout import Event


def name_command(rank: int, engine: Engine, index: int, command: Command) -> str:
    """Name a command: ``rank 0 dma:1 command 2 (copy ...)``."""
    return f"rank {rank} {engine} command {index} ({describe(command)})"


def name_event(event: Event) -> str:
    """Name a command in one invocation, or a user event."""
    if event.command is None or event.engine is None:
        return name_user(event)
    return f"{name_command(event.rank, event.engine, event.step, event.command)} in invocation {event.invocation}"


def name_user(event: Event) -> str:
    """Name a user event by the invocations around it."""
    if event.invocation == 0:
        return f"rank {event.rank}'s caller before invocation 1"
    return f"rank {event.rank}'s caller between invocations {event.invocation} and {event.invocation + 1}"


def name_bytes(rank: int, buffer: str, ranges: Iterable[tuple[int, int]]) -> str:
    """Name byte ranges of one buffer; ranges that touch become one."""
    return ", ".join(str(Span(rank, buffer, start, end - start)) for start, end in in_sequence(ranges))


def in_sequence(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ranges and join those that touch.

    >>> in_sequence([(4, 8), (0, 4), (12, 16)])
    [(0, 8), (12, 16)]
    """
    result: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def name_chain(events: Sequence[Event], flag_edges: Sequence[bool]) -> str:
    """Explain why the last event of a happens-before chain comes after the first, backwards from the last.

    Args:
        events: events of the chain, each before the next.
        flag_edges: ``flag_edges[k]`` says that event k signals what event k+1 waits for (else a queue or a rank orders
            them).

    Only the ends of flag edges are named: the events between them follow from the order inside a rank.
    """
    text = name_event(events[-1])
    for k in range(len(events) - 2, -1, -1):
        if flag_edges[k]:
            text += f"{' ' if k == len(events) - 2 else ', which '}waits for {name_event(events[k])}"
        elif k == 0 or flag_edges[k - 1]:
            text += f", which comes after {name_event(events[k])}"
    return text
