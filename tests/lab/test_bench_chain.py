"""The chain study on CPU ranks: what is measured, how prelaunched calls are armed, fired and closed, and failures."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, error_of
from forgetful import Forgetful
from ranks import crew

from sidelane.program.collective import Kind
from sidelane.session.prelaunch import Prelaunched
from sidelane_lab.baselines.baselines_cpu import Gloo
from sidelane_lab.baselines.reference import Case
from sidelane_lab.baselines.roster import OwnAuto, OwnDma, Roster
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies import chain as chain_study
from sidelane_lab.studies.chain import CALLS, ChainOptions, ChainRow

CPU = torch.device("cpu")
ROUNDS = 2
QUICK = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": ROUNDS, "timeout_s": 100.0}
PRELAUNCHED = {(variant, in_place) for variant in ("pcpy", "b2b", "striped", "bcst") for in_place in (False, True)}


class Named(Forgetful):
    name = "symm_mem"


def chains(group: dist.ProcessGroup, options: ChainOptions, broken: str) -> tuple[list[ChainRow], list[str], list[str]]:
    """Run a small case.

    Args:
        group: of all ranks.
        options: of the study.
        broken: ``prepare`` or ``produce``: what rank 1 fails at with the first prelaunched candidate, else empty.

    Returns:
        Rows; the steps of prelaunched chains; what each handle says to being armed once more.
    """
    torch.set_num_threads(1)
    chain_study.WIDTH = chain_study.CONSUMED = 16
    steps: list[str] = []
    handles: list[Prelaunched] = []
    with communicator(group) as comm:
        is_broken, prepare_all_gather = comm.rank == 1, comm.prepare_all_gather
        case = Case(Kind.ALL_GATHER, comm.world_size * 4 * 16 * 4, torch.float32, comm.rank, comm.world_size, CPU)

        def prepare(output: torch.Tensor, input: torch.Tensor, **named: Any) -> Prelaunched:
            wrong = is_broken and broken == "prepare" and not handles and not steps
            steps.append("prepare")
            handles.append(prepare_all_gather(output, input[1:] if wrong else input, **named))
            return handles[-1]

        class Watched(chain_study.Gemms):
            def produce(self, shard: torch.Tensor) -> None:
                if any(handle.armed for handle in handles):
                    steps.append("produce")
                    if is_broken and broken == "produce" and steps == ["prepare", "produce"]:
                        raise RuntimeError("out of something")
                super().produce(shard)

            def consume(self, whole: torch.Tensor) -> None:
                assert not any(handle.armed for handle in handles), "the consumer came before the trigger"
                super().consume(whole)

        comm.prepare_all_gather = prepare
        chain_study.Gemms = Watched
        dma = OwnDma(comm)
        made = (Gloo(group), Named(group), dma, OwnAuto(dma))
        roster = Roster(Meter(CPU, group=group), {implementation.name: implementation for implementation in made})
        roster.reserve(case.output_bytes, case.input_bytes)
        rows = list(chain_study.measure_case(roster, case, options, itertools.count(1)))
        closed = [str(error_of(handle.arm)) for handle in handles]
        comm.barrier()  # nothing is armed, and ranks are in step
    return rows, steps, closed


def test_prelaunched_chains_are_armed_ahead_of_the_producer_and_closed() -> None:
    with crew(2) as ranks:
        results = ranks.run(chains, None, ChainOptions(**QUICK), "")
    for rows, steps, closed in results:
        found = {(row.variant, row.in_place) for row in rows if row.launch == "prelaunched"}
        assert found == PRELAUNCHED
        for row in rows:
            if row.implementation == "symm_mem":
                assert (row.correct, row.time_us) == (False, None)
                assert "output is wrong" in row.note
            else:
                assert row.correct, row
                assert row.time_us
        assert steps.count("prepare") == len(PRELAUNCHED)
        # A first check, the samples, and the last check.
        assert steps.count("produce") == len(PRELAUNCHED) * (1 + (ROUNDS + 1) * CALLS)
        assert len(closed) == len(PRELAUNCHED)
        assert all("the handle was closed" in text for text in closed)


@pytest.mark.parametrize("broken", ["prepare", "produce"])
def test_one_rank_that_fails_at_a_prelaunched_chain_leaves_nobody_hanging(broken: str) -> None:
    options = ChainOptions(**QUICK, variants=("b2b",), launches=("eager", "prelaunched"))
    with crew(3) as ranks:
        results = ranks.run(chains, None, options, broken)
    for rows, _, closed in results:
        ours = {(row.in_place, row.launch): row for row in rows if row.implementation == "dma"}
        assert set(ours) == {(place, launch) for place in (False, True) for launch in ("eager", "prelaunched")}
        failed = ours.pop((False, "prelaunched"))
        assert (failed.correct, failed.time_us) == (None, None)
        if broken == "produce":
            assert failed.note == "rank 1: RuntimeError: out of something"
        else:
            assert failed.note.startswith("rank 0: PeerError")
        assert all(row.correct and row.time_us for row in ours.values()), ours
        assert all("the handle was closed" in text for text in closed)
