"""Programs as text, in the words of ``str(program)``, so that a test shows the program that it is about."""

from __future__ import annotations

import re

from sidelane.program import ir
from sidelane.program.collective import Buffer, Collective, ReduceOp, Reduction, Span


def parse(
    collective: Collective,
    listing: str,
    *,
    staging: int | tuple[int, ...] = 0,
    flags: int = 16,
    prelaunched: bool = False,
    variant: str = "listed",
) -> ir.Program:
    """Read a program from lines like those of ``describe``, under lines like ``rank 0 dma:0``.

    Args:
        collective: what the program claims to do.
        listing: the queues; a command may carry its index, and blank lines do not matter.
        staging: bytes, of all ranks or of each.
        flags: of each rank.
        prelaunched: as in ``Program``.
        variant: as in ``Program``.
    """
    queues: list[ir.Queue] = []
    for line in filter(None, map(str.strip, listing.splitlines())):
        if header := re.fullmatch(r"rank (\d+) (\w+):(\d+)", line):
            rank, kind, index = header.groups()
            queues.append(ir.Queue(int(rank), ir.Engine(ir.EngineKind(kind), int(index)), ()))
        else:
            queue = queues.pop()
            command = _command(re.sub(r"^\d+: ", "", line), queue.rank)
            queues.append(ir.Queue(queue.rank, queue.engine, (*queue.commands, command)))
    sizes = (staging,) * collective.world_size if isinstance(staging, int) else staging
    return ir.Program(collective, variant, tuple(queues), sizes, flags, prelaunched)


def without(listing: str, *lines: str) -> str:
    """Leave out lines; each must be there exactly once."""
    for line in lines:
        listing = replace(listing, line, "")
    return listing


def replace(listing: str, old: str, new: str) -> str:
    """Replace one line, which must be there exactly once (``rank 0 dma:0 / wait ...`` names the queue of a line)."""
    queue, _, command = old.rpartition(" / ")
    lines = listing.splitlines()
    hits = []
    current = ""
    for number, line in enumerate(lines):
        if re.fullmatch(r"rank \d+ \w+:\d+", line.strip()):
            current = line.strip()
        elif line.strip() == command and (not queue or queue == current):
            hits.append(number)
    assert len(hits) == 1, f"{old!r} is there {len(hits)} times"
    lines[hits[0]] = new
    return "\n".join(lines)


def span(text: str) -> Span:
    """Read ``output@1[0:8]``."""
    match = re.fullmatch(r"(\w+)@(-?\d+)\[(-?\d+):(-?\d+)\]", text)
    assert match, text
    buffer, rank, start, end = match.groups()
    return Span(int(rank), Buffer(buffer), int(start), int(end) - int(start))


def _command(text: str, rank: int) -> ir.Command:
    word, _, rest = text.partition(" ")
    match word:
        case "copy":
            dst, src = rest.split(" <- ")
            return ir.Copy(span(dst), span(src))
        case "broadcast":
            first, second, src = re.split(r", | <- ", rest)
            return ir.Broadcast((span(first), span(second)), span(src))
        case "swap":
            a, b = rest.split(" <-> ")
            return ir.Swap(span(a), span(b))
        case "reduce":
            match = re.fullmatch(r"(\S+) <- (\w+) (\w+)\((.*)\)", rest)
            assert match, text
            dst, op, dtype, srcs = match.groups()
            return ir.Reduce(span(dst), tuple(map(span, srcs.split(", "))), Reduction(ReduceOp(op), dtype))
        case "signal":
            match = re.fullmatch(r"rank (\d+) flag (\d+) (set|add) (\S+)", rest)
            assert match, text
            owner, index, op, value = match.groups()
            return ir.Signal(ir.Flag(int(owner), int(index)), _value(value), ir.SignalOp(op))
        case "wait":
            match = re.fullmatch(r"flag (-?\d+) (==|>=) (\S+)", rest)
            assert match, text
            index, comparison, value = match.groups()
            return ir.Wait(ir.Flag(rank, int(index)), _value(value), ir.Comparison(comparison))
        case "stamp":
            return ir.Stamp(int(rest))
    raise AssertionError(text)


def _value(text: str) -> ir.Value:
    match = re.fullmatch(r"(?:(?:(\d+)\*)?(epoch)\+?)?(-?\d+)?", text)
    assert match, text
    factor, epoch, base = match.groups()
    value = ir.Value(int(base or 0), int(factor or 1) if epoch else 0)
    return ir.EPOCH if value == ir.EPOCH else value
