"""The interpreter finds what is planted and what ``verify`` has overlooked, and counts and adds up as machines do."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from listings import parse

from attack import definitions, epochs
from attack.arithmetic import operands, reduced
from attack.interpreter import failure, run
from attack.known import KNOWN
from attack.machine import Failure, Machine
from attack.planted import PLANTED
from attack.programs import program
from attack.scheduling import STYLES
from attack.sequences import sequence
from sidelane.program.collective import ELEMENT_BYTES, ReduceOp, Reduction, all_gather, reduce_scatter
from sidelane.program.ir import RENEWAL_CALLS


@pytest.mark.parametrize("mistake", PLANTED)
def test_what_is_planted_is_found(mistake: str) -> None:
    """Every style of schedules that looks for this kind of trouble finds it often, and all together at once."""
    programs = PLANTED[mistake]()
    calls = programs * max(2, 4 // len(programs))
    assert failure(calls, range(60)), "by the styles as they are drawn"
    missed = [style for style in STYLES if not failure(calls, range(100), style)]
    assert missed in ([], ["depth_first"]), "a style that cannot find a race is worth nothing"


@pytest.mark.parametrize("name", KNOWN)
def test_the_holes_that_verify_had(name: str) -> None:
    """A schedule shows each of them; no schedule shows that what was refused wrongly is wrong."""
    known = KNOWN[name]
    programs = known.make()
    found = failure(programs * (8 // len(programs)), range(150 if known.shows else 40))
    assert (found.kind if found else None) in (known.shows or (None,)), f"{known.wrong}: {found}"


def test_any_style_of_schedule_lets_right_programs_pass() -> None:
    rng = random.Random(0)
    for style in STYLES:
        for _ in range(12):
            programs = sequence(rng)
            found = failure(programs * 2, range(3), style)
            assert found is None, f"{style}: {found}\n" + "\n".join(map(str, programs))


FLAG = """
rank 0 dma:0
  signal rank 1 flag 0 {signal}
rank 1 dma:0
  wait flag 0 {wait}
"""


@pytest.mark.parametrize(
    ("signal", "wait", "holds"),
    [
        ("set 4294967301", "== 5", True),
        ("set -1", "== 4294967295", True),
        ("set 3", "== 4", False),
        ("set 5", ">= 4", True),
        ("set 3", ">= 4", False),
        ("set -3", ">= 4", False),
        ("set 2147483651", ">= 4", True),
        ("set 2147483652", ">= 4", False),
        ("set 1", ">= -1", True),
        ("add 3", ">= 3", True),
        ("add 2", "== 3", False),
        ("add 4294967295", "== -1", True),
    ],
)
def test_flags_are_32_bits_on_a_circle(signal: str, wait: str, holds: bool) -> None:
    listed = parse(all_gather((0, 0)), FLAG.format(signal=signal, wait=wait))
    found = failure((listed,), range(3))
    assert (found is None) is holds
    assert found is None or found.kind == "hang"


def test_a_failure_says_where() -> None:
    listed = parse(all_gather((0, 0)), FLAG.format(signal="set 1", wait=">= 2"))
    with pytest.raises(Failure, match=r"hang: invocation 1, rank 1 dma:0 command 0 \(wait flag 0 >= 2\); .* caller"):
        run(Machine([listed]), 0)


def test_queues_that_were_handed_over_do_not_wait_for_their_caller() -> None:
    """Without its trigger such a queue runs before the input is there."""
    copy = "rank 0 local:0\n  copy output@0[0:8] <- input@0[0:8]"
    assert failure([parse(all_gather((8,)), copy)] * 3, range(20)) is None
    assert failure([parse(all_gather((8,)), copy, prelaunched=True)] * 3, range(20))


def test_schedules_can_be_repeated() -> None:
    machine = Machine([program(random.Random(3), 3)] * 3)
    first, second, other = [], [], []
    for steps, seed in ((first, 1), (second, 1), (other, 2)):
        run(machine, seed, trace=steps)
    assert first == second != other


def test_flags_are_never_older_than_a_communicator_lets_them_become() -> None:
    rng = random.Random(0)
    one, other = (program(rng, 2, "plain") for _ in range(2))
    machine = Machine([one, one, other, one] * 3)
    assert machine.period == 4
    firsts, steps = set(), Counter()
    for _ in range(3000):
        drawn, flags = epochs.drawn(machine, rng)
        uses = [[0, *drawn[0::4]], [0, *drawn[2::4]]]
        oldest = max(b - a for use in uses for a, b in zip(use[not any(flags) :], use[1:], strict=False))
        assert oldest <= RENEWAL_CALLS or any(flags)
        firsts.add(min(drawn[0].bit_length(), 33))
        steps.update(min(b - a, 3) for a, b in pairwise(drawn))
    assert {1, 26, 31, 32, 33} <= firsts
    assert set(steps) == {1, 2, 3}


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_reduces_as_torch_does(dtype: str, op: ReduceOp) -> None:
    import torch

    reduction = Reduction(op, dtype)
    for ranks in (2, 3, 7):
        given = operands(reduction, 200, ranks, random.Random(ranks))
        tensors = [torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)) for data in given]
        is_float = tensors[0].is_floating_point()
        total = tensors[0].to(torch.float32) if is_float else tensors[0].clone()
        for tensor in tensors[1:]:
            combine = {ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum}.get(op, torch.add)
            total = combine(total, tensor.to(total.dtype))
        if op is ReduceOp.AVG:
            total = torch.div(total, ranks, rounding_mode=None if is_float else "trunc")
        assert reduced(reduction, given) == total.to(tensors[0].dtype).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_orders_and_roundings_show(dtype: str) -> None:
    reduction = Reduction(ReduceOp.SUM, dtype)
    one, two, three = operands(reduction, 400, 3, random.Random(1))
    right = reduced(reduction, [one, two, three])
    for name, other in {
        "order": reduced(reduction, [two, three, one]),
        "rounding": reduced(reduction, [reduced(reduction, [one, two]), three]),
    }.items():
        size = reduction.element_bytes
        wrong = sum(right[k : k + size] != other[k : k + size] for k in range(0, len(right), size))
        assert wrong > 80 or (name, dtype) == ("rounding", "float32"), f"{wrong} of 400 show the {name}"


def test_outputs_of_a_reduction_are_sums_in_the_order_of_the_ranks() -> None:
    collective = reduce_scatter([4, 8], Reduction(ReduceOp.AVG, "int32"))
    words = [(-7, 1, 2**31 - 1), (2, 2, 1)]
    given = [b"".join(word.to_bytes(4, "little", signed=True) for word in row) for row in words]
    found = b"".join(definitions.outputs(collective, given))
    assert [int.from_bytes(found[k : k + 4], "little", signed=True) for k in (0, 4, 8)] == [-2, 1, -(2**30)]
