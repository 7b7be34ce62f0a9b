"""Holes that ``verify`` had, each as a small program: what goes wrong with it, and what a schedule shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from listings import parse

from attack.edits import at, cut, deleted, places, replaced, respanned
from sidelane.program.builders import build
from sidelane.program.collective import ReduceOp, Reduction, all_gather, all_reduce, reduce_scatter
from sidelane.program.ir import Broadcast, Copy, Program

# An all_gather of two shards of 8 bytes, pushed. Flag 0 or 1 is the entry by rank 0 or 1, flag 2 or 3 the exit by them.
GATHER = """
rank 0 dma:0
  signal rank 1 flag 0 set epoch
  wait flag 1 >= epoch
  copy output@1[0:8] <- input@0[0:8]
  signal rank 1 flag 2 {signal}
  wait flag 3 >= epoch
rank 0 local:0
  copy output@0[0:8] <- input@0[0:8]
rank 1 dma:0
  signal rank 0 flag 1 set epoch
  wait flag 0 >= epoch
  copy output@0[8:16] <- input@1[0:8]
  signal rank 0 flag 3 set epoch
  wait flag 2 {wait}
rank 1 local:0
  copy output@1[8:16] <- input@1[0:8]
"""

# An all_reduce in which rank {r} pulls the inputs of {p} and {q} and reduces all of them itself. Flags 0 to 2 are the
# entries by those ranks, 3 to 5 their exits, 6 says that everything has been pulled.
PULLED = """
rank {r} dma:0
  signal rank {p} flag {r} set epoch
  signal rank {q} flag {r} set epoch
  wait flag {p} >= epoch
  wait flag {q} >= epoch
  copy staging@{r}[{p}2:{p}8] <- input@{p}[0:6]
  copy staging@{r}[{q}2:{q}8] <- input@{q}[0:6]
  copy staging@{r}[{r}2:{r}8] <- input@{r}[0:6]
  signal rank {r} flag 6 set epoch
  signal rank {p} flag {exit} set epoch
  signal rank {q} flag {exit} set epoch
  wait flag {exit_p} >= epoch
  wait flag {exit_q} >= epoch
rank {r} compute:0
  wait flag 6 >= epoch
"""

# Rank 1 tells rank 0, and is let go by it when the flag is 0 again.
MESSAGE = """
rank 0 dma:0
  wait flag 0 >= 1
  signal rank 0 flag 0 set 0
  signal rank 1 flag 1 set epoch
rank 1 dma:0
  signal rank 0 flag 0 {op} 1
  wait flag 1 >= epoch
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A hole.

    Attributes:
        point: of issue 18 that names it.
        wrong: what goes wrong, or what was wrong to refuse.
        make: the programs, one an invocation, over and over.
        shows: kinds of failure of which a schedule shows one; none where the programs are right.
    """

    point: int
    wrong: str
    make: Callable[[], tuple[Program, ...]]
    shows: tuple[str, ...] = ()


def _values(signal: str, wait: str) -> Callable[[], tuple[Program, ...]]:
    return lambda: (parse(all_gather((8, 8)), GATHER.format(signal=signal, wait=wait)),)


def _sums(*reductions: Sequence[str]) -> Callable[[], tuple[Program, ...]]:
    """A program whose ranks reduce by these commands, all ranks alike if there is one list of them."""
    lines: list[str] = []
    for r, commands in enumerate(reductions if len(reductions) > 1 else reductions * 3):
        p, q = (r + 1) % 3, (r + 2) % 3
        lines.append(PULLED.format(r=r, p=p, q=q, exit=3 + r, exit_p=3 + p, exit_q=3 + q))
        lines += [command.format(r=r) for command in commands]
    collective = all_reduce((2, 2, 2), Reduction(ReduceOp.SUM, "bfloat16"))
    return lambda: (parse(collective, "\n".join(lines), staging=64),)


def _destinations(count: int) -> tuple[Program, ...]:
    """One of rank 0's copies, or all three, as one broadcast."""
    program = build(all_gather([8] * 4, in_place=True), "b2b")
    copies = [place for place in places(program, Copy) if place[0] == 0][:count]
    dsts = tuple(copy.dst for place in copies if isinstance(copy := at(program, place), Copy))
    for place in copies[:0:-1]:
        program = deleted(program, place)
    copy = at(program, copies[0])
    assert isinstance(copy, Copy)
    return (replaced(program, copies[0], Broadcast(dsts, copy.src)),)  # type: ignore[arg-type]


def _pieces_that_cut_an_element() -> tuple[Program, ...]:
    program = build(reduce_scatter([8] * 2, Reduction(ReduceOp.SUM, "int32")), "b2b")
    place = next(places(program, Copy))
    copy = at(program, place)
    parts = respanned(copy, lambda span: cut(span, 0, 5)), respanned(copy, lambda span: cut(span, 5, 8))
    return (replaced(program, place, *parts),)


IN_ORDER = "  reduce output@{r}[0:6] <- sum bfloat16(staging@{r}[02:08], staging@{r}[12:18], staging@{r}[22:28])"
OTHER_ORDER = "  reduce output@{r}[0:6] <- sum bfloat16(staging@{r}[12:18], staging@{r}[22:28], staging@{r}[02:08])"
IN_TWO = (
    "  reduce staging@{r}[32:38] <- sum bfloat16(staging@{r}[02:08], staging@{r}[12:18])",
    "  reduce output@{r}[0:6] <- sum bfloat16(staging@{r}[32:38], staging@{r}[22:28])",
)
OF_ONE = ("  reduce staging@{r}[32:38] <- sum bfloat16(staging@{r}[02:08])", IN_ORDER.replace("[02:08]", "[32:38]"))

KNOWN: dict[str, Known] = {
    "twice against once": Known(
        1,
        "call 3 goes on with the signal of call 2",
        _values("set 2*epoch", ">= epoch+1"),
        ("wrong bytes",),
    ),
    "three against two": Known(
        1,
        "the call of epoch 4 goes on with the signal of epoch 3",
        _values("set 3*epoch", ">= 2*epoch+1"),
        ("wrong bytes",),
    ),
    "ten against eleven": Known(
        1,
        "from epoch 5 on the signal is less than is waited for",
        _values("set 10*epoch", ">= 11*epoch+-4"),
        ("hang",),
    ),
    "a sum of epochs": Known(
        1,
        "the sum outgrows what is waited for, or falls behind where epochs are left out",
        _values("add epoch", ">= 2*epoch+-1"),
        ("wrong bytes", "hang"),
    ),
    "a counter that nobody resets": Known(
        1,
        "the sum outgrows what is waited for, or falls behind where epochs are left out",
        _values("add 10", ">= 7*epoch+-2"),
        ("wrong bytes", "hang"),
    ),
    "a large slope": Known(
        1,
        "three calls later, the old value is less than half a turn ahead",
        _values(f"set {2**30}*epoch", f">= {2**30}*epoch"),
        ("wrong bytes",),
    ),
    "half a turn a call": Known(
        1,
        "in epoch 2 the old value is less than half a turn ahead",
        _values(f"set {2**31 + 1}*epoch+{-(2**31)}", f">= {2**31 + 1}*epoch+{-(2**31)}"),
        ("wrong bytes",),
    ),
    "a base of half a turn": Known(
        1,
        "a flag that nobody has written is less than half a turn ahead",
        _values(f"set epoch+{2**31 - 5}", f">= epoch+{2**31 - 5}"),
        ("wrong bytes",),
    ),
    "orders that differ": Known(
        6,
        "rank 1 adds up in another order than the others, and has other bits",
        _sums((IN_ORDER,), (OTHER_ORDER,), (IN_ORDER,)),
        ("wrong bytes",),
    ),
    "an order that is not the ranks'": Known(
        6,
        "all ranks add up in another order than theirs",
        _sums((OTHER_ORDER,)),
        ("wrong bytes",),
    ),
    "two roundings": Known(6, "a partial sum is rounded to bfloat16", _sums(IN_TWO), ("wrong bytes",)),
    "a sum of one": Known(6, "a Reduce with one source is a copy", _sums(OF_ONE), ("malformed",)),
    "one destination": Known(9, "a Broadcast has two", lambda: _destinations(1), ("malformed",)),
    "three destinations": Known(9, "a Broadcast has two", lambda: _destinations(3), ("malformed",)),
    "pieces that cut an element": Known(9, "was refused, and is right", _pieces_that_cut_an_element),
    "a counter that is also set": Known(
        9,
        "was refused for a deadlock, which no schedule shows",
        lambda: tuple(parse(all_gather((0, 0)), MESSAGE.format(op=op)) for op in ("add", "set")),
    ),
}
"""Every hole by name."""
