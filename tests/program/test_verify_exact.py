"""``verify``, reductions: which bits come out, on every rank the same, and not just which terms went in."""

from __future__ import annotations

import dataclasses

import pytest
from listings import parse, replace
from refusals import refused

from sidelane.program.builders import Transport, build
from sidelane.program.collective import ReduceOp, Reduction, all_reduce, broadcast, reduce_scatter
from sidelane.program.ir import Broadcast
from sidelane.program.verify import verify

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int32", "int64")


def three(line: str, dtype: str, op: ReduceOp = ReduceOp.SUM):
    """A reduce_scatter of three shards of 8 bytes, with other commands in place of rank 0's ``Reduce``.

    Rank 0 has its own part at ``a``, those of ranks 1 and 2 at ``b`` and ``c``; ``out`` is where the result goes.
    """
    program = build(reduce_scatter((8, 8, 8), Reduction(op, dtype)), "b2b")
    listing = "\n".join(str(program).splitlines()[1:])
    names = {"a": "input@0[0:8]", "b": "staging@0[0:8]", "c": "staging@0[256:264]", "out": "output@0[0:8]"}
    right = f"3: reduce output@0[0:8] <- {op} {dtype}({names['a']}, {names['b']}, {names['c']})"
    listing = replace(listing.replace("2: reduce output@0", "3: reduce output@0"), right, "LINE")
    for name, span in names.items():
        line = line.replace(f"<{name}>", span)
    return parse(program.collective, listing.replace("LINE", line.replace("OP", f"{op} {dtype}")), staging=1024)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ReduceOp)
def test_floats_are_combined_in_the_order_of_the_ranks(op: ReduceOp, dtype: str) -> None:
    verify(three("reduce <out> <- OP(<a>, <b>, <c>)", dtype, op))
    for order in ("<b>, <a>, <c>", "<a>, <c>, <b>", "<c>, <b>, <a>"):
        refused(three(f"reduce <out> <- OP({order})", dtype, op), words=("wrong bytes: rank 0", f"the {op} {dtype} of"))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ReduceOp)
def test_the_order_of_integers_makes_no_difference(op: ReduceOp, dtype: str) -> None:
    for order in ("<a>, <b>, <c>", "<b>, <a>, <c>", "<c>, <b>, <a>"):
        verify(three(f"reduce <out> <- OP({order})", dtype, op))


IN_TWO = "reduce <out> <- OP(<a>, <b>)\n reduce <out> <- OP(<out>, <c>)"
LAST_FIRST = "reduce <out> <- OP(<b>, <c>)\n reduce <out> <- OP(<a>, <out>)"


@pytest.mark.parametrize(
    ("dtype", "op", "in_two", "last_first"),
    [
        # Half precision rounds in between. A float32 sum does so anyway, as long as it begins at the left.
        ("bfloat16", ReduceOp.SUM, False, False),
        ("float16", ReduceOp.SUM, False, False),
        ("float32", ReduceOp.SUM, True, False),
        ("float32", ReduceOp.AVG, False, False),
        ("bfloat16", ReduceOp.MAX, True, True),
        ("float32", ReduceOp.MIN, True, True),
        ("int32", ReduceOp.SUM, True, True),
        ("int64", ReduceOp.MIN, True, True),
        ("int32", ReduceOp.AVG, False, False),
    ],
)
def test_roundings(dtype: str, op: ReduceOp, in_two: bool, last_first: bool) -> None:
    for lines, accepted in ((IN_TWO, in_two), (LAST_FIRST, last_first)):
        program = three(lines, dtype, op)
        if accepted:
            verify(program)
        else:
            refused(program, words=("wrong bytes: rank 0", "not the"))


def test_every_rank_of_an_all_reduce_has_the_same_bits() -> None:
    """Rank 1 adds in another order than rank 0, each for itself."""
    reduction = Reduction(ReduceOp.SUM, "float32")
    listing = """
    rank 0 dma:0
      signal rank 1 flag 0 set epoch
      wait flag 1 >= epoch
      copy staging@1[0:8] <- input@0[0:8]
      signal rank 1 flag 2 set epoch
      wait flag 3 >= epoch
      signal rank 0 flag 4 set epoch
    rank 0 compute:0
      wait flag 4 >= epoch
      reduce output@0[0:8] <- sum float32(input@0[0:8], staging@0[0:8])
    rank 1 dma:0
      signal rank 0 flag 1 set epoch
      wait flag 0 >= epoch
      copy staging@0[0:8] <- input@1[0:8]
      signal rank 0 flag 3 set epoch
      wait flag 2 >= epoch
      signal rank 1 flag 4 set epoch
    rank 1 compute:0
      wait flag 4 >= epoch
      reduce output@1[0:8] <- sum float32(ORDER)
    """
    collective = all_reduce((4, 4), reduction)
    right, wrong = "staging@1[0:8], input@1[0:8]", "input@1[0:8], staging@1[0:8]"
    verify(parse(collective, listing.replace("ORDER", right), staging=8))
    refused(
        parse(collective, listing.replace("ORDER", wrong), staging=8),
        words="rank 1 ends invocation 1 with output@1[0:4] holding the sum float32 of (input@1[0:4], input@0[0:4])",
    )


def test_a_sum_of_one_source_is_no_copy() -> None:
    line = "reduce <out> <- sum bfloat16(<a>)\n reduce <out> <- OP(<out>, <b>, <c>)"
    refused(three(line, "int32"), words="a reduce has two sources or more (value=1); a copy moves one")


def test_staging_may_be_filled_by_pieces_that_cut_an_element() -> None:
    program = build(reduce_scatter((8, 8), Reduction(ReduceOp.SUM, "float32")), "b2b")
    listing = "\n".join(str(program).splitlines()[1:])
    whole = "copy staging@0[0:8] <- input@1[0:8]"
    assert whole in listing
    cut = "\n".join(f"copy staging@0[{at}] <- input@1[{at}]" for at in ("0:3", "3:5", "5:8"))
    verify(parse(program.collective, listing.replace(whole, cut), staging=256))
    torn = cut.replace("staging@0[3:5] <- input@1[3:5]", "staging@0[3:5] <- input@1[4:6]")
    refused(
        parse(program.collective, listing.replace(whole, torn), staging=256),
        words="combines elements that begin inside others",
    )


@pytest.mark.parametrize("count", [1, 3])
def test_a_broadcast_has_two_destinations(count: int) -> None:
    program = build(broadcast(8, 3, root=0), "bcst", Transport.PUSH)
    queue = next(queue for queue in program.queues if any(isinstance(c, Broadcast) for c in queue.commands))
    place = next(k for k, c in enumerate(queue.commands) if isinstance(c, Broadcast))
    command = queue.commands[place]
    broken = dataclasses.replace(command, dsts=(*command.dsts, *command.dsts)[:count])
    commands = (*queue.commands[:place], broken, *queue.commands[place + 1 :])
    queues = tuple(dataclasses.replace(q, commands=commands) if q is queue else q for q in program.queues)
    refused(
        dataclasses.replace(program, queues=queues), words=f"a broadcast has two destinations (value={count})", rounds=1
    )
