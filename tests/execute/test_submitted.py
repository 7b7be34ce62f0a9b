"""The proof of what ran: counts of plans, and what the CUDA executor put down for what it submitted."""

from __future__ import annotations

import pytest
from cuda_world import world_of
from small_programs import SUM

from sidelane.execute.cuda.calls import Route, counts_of
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.submitted import Counts, SubmissionLedger, Submitted
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import freeze, lower

N = 4
GATHER = define.all_gather([64] * N)
IN_PLACE = define.all_gather([64] * N, in_place=True)
EXCHANGE = define.all_to_all([[64] * N] * N)


def b2b(collective: define.Collective, variant: str = "b2b") -> Program:
    return lower(build(collective, variant), {Copy})


@pytest.mark.parametrize("variant", ["b2b", "pcpy"])
@pytest.mark.parametrize("captured", [False, True])
def test_moving_collectives_launch_no_kernel(variant: str, captured: bool) -> None:
    for collective, local in ((GATHER, 1), (IN_PLACE, 0), (EXCHANGE, 1)):
        program = b2b(collective, variant)
        counts = counts_of(plan_calls(freeze(program) if captured else program, 0, captured=captured))
        assert (counts.peer_copies, counts.local_copies, counts.kernels) == (N - 1, local, 0)
        assert counts.waits == 2 * (N - 1)
        assert counts.graph_launches == 0


def test_a_batch_counts_every_copy_and_one_call() -> None:
    batched, single = (counts_of(plan_calls(b2b(IN_PLACE), 0, copy_batches=batches)) for batches in (True, False))
    assert batched.peer_copies == single.peer_copies == N - 1
    assert single.calls - batched.calls == N - 2


def test_signals_by_copies_are_copies() -> None:
    counts = counts_of(plan_calls(b2b(IN_PLACE), 0, peer_writes=False))
    assert counts.peer_copies == 3 * (N - 1), "bytes, entries and exits"


def test_reductions_are_kernels() -> None:
    program = b2b(define.all_reduce([64] * N, SUM))
    assert counts_of(plan_calls(program, 0)).kernels >= 1


def test_what_routes_add() -> None:
    plan = plan_calls(freeze(b2b(IN_PLACE)), 0, captured=True)
    plain = counts_of(plan)
    assert counts_of(plan, Route.CAPTURE) == plain
    assert counts_of(plan, Route.INTERNAL) == plain + Counts(events=4, calls=4)


def test_the_executor_counts_what_it_submitted() -> None:
    with world_of(3) as world:
        executor, driver = world.executors[0], world.drivers[0]
        assert executor.ledger.last is None
        assert executor.ledger.total() == Counts()
        gather = world.load(b2b(define.all_gather([64] * 3)))
        reduce = world.load(b2b(define.reduce_scatter([64] * 3, SUM)))
        for _ in range(3):
            gather.start()
        world.synchronize()
        last = executor.ledger.last
        assert last is not None
        assert (last.implementation, last.variant, last.captured, last.counts.kernels) == ("dma", "b2b", False, 0)
        assert "all_gather" in last.collective
        total = executor.ledger.total()
        assert total == last.counts * 3
        assert (total.peer_copies, total.local_copies, total.kernels) == (6, 3, 0)
        assert len(driver.submitted) == total.calls, "as the driver saw it"
        reduce.start()
        world.synchronize()
        assert executor.ledger.total().kernels == executor.ledger.last.counts.kernels > 0


def test_captured_invocations() -> None:
    with world_of(3) as world:
        ledger = world.executors[0].ledger
        loaded = world.load(freeze(b2b(define.all_gather([64] * 3))), frozen=True)
        for driver in world.drivers:
            driver.begin_capture()
        loaded.start()
        for driver in world.drivers:
            driver.end_capture()
        assert ledger.last is not None
        assert ledger.last.captured
        assert (ledger.last.counts.peer_copies, ledger.last.counts.graph_launches) == (2, 0)
        assert ledger.total() == Counts(), "nothing went to the device"


def test_pull_and_staging_count_where_the_bytes_go() -> None:
    pulled = counts_of(plan_calls(lower(build(GATHER, "b2b", Transport.PULL), {Copy}), 0))
    staged = counts_of(plan_calls(lower(build(GATHER, "b2b", Transport.STAGED), {Copy}), 0))
    assert pulled.peer_copies == staged.peer_copies == N - 1
    assert staged.local_copies == pulled.local_copies + 1


def test_a_ledger_holds_few_tallies_for_many_calls() -> None:
    ledger = SubmissionLedger()
    tallies = set()
    for size in range(100):
        entry = ledger.entry(Submitted(f"all_to_all of {size}", "dma", "b2b", False, Counts(peer_copies=3, calls=2)))
        ledger.count(entry)
        tallies.add(id(entry.tally))
    assert ledger.total() == Counts(peer_copies=300, calls=200)
    assert len(tallies) == 1
    assert str(ledger.total()) == "300 peer copies, 200 calls"
