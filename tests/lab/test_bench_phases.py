"""The study of phases from end to end on CPU ranks, and what it makes of bytes that are wrong."""

from __future__ import annotations

import pytest
import torch

from sidelane.program import collective as define
from sidelane.program.collective import Buffer, Collective
from sidelane_lab.harness import running
from sidelane_lab.studies.phases.rig import Views, error, fill
from sidelane_lab.studies.phases.study import PhasesOptions

QUICK = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 1, "calls": 1, "timeout_s": 100.0}


def test_a_machine_with_too_few_gpus_predicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    options = PhasesOptions(
        **{**QUICK, "ranks": 5, "quiet": False}, sizes=(1024,), operations=("copy",), predict="h200x4"
    )
    results = running.run(options)
    assert results is not None
    assert [row.source for row in results.rows] == ["measured"]
    assert "nothing is predicted: 4 x NVIDIA H200" in capsys.readouterr().err


def views_of(collective: Collective, rank: int) -> tuple[dict[Buffer, torch.Tensor], Views]:
    memory = {b: torch.zeros(max(1, collective.buffer_bytes(rank, b)), dtype=torch.uint8) for b in Buffer}
    return memory, lambda buffer, nbytes: memory[buffer][:nbytes]


def test_wrong_bytes_are_found_and_named() -> None:
    collective = define.all_gather([64, 64, 64], in_place=True)
    memory, views = {}, {}
    for rank in range(3):
        memory[rank], views[rank] = views_of(collective, rank)
        fill(collective, rank, views[rank], seed=5)
    output = memory[0][Buffer.OUTPUT]
    assert error(collective, 0, views[0], 5, own_chunk=True) is not None, "poison is no result"
    for rank in (1, 2):
        output[64 * rank : 64 * rank + 64] = memory[rank][Buffer.OUTPUT][64 * rank : 64 * rank + 64]
    assert error(collective, 0, views[0], 5, own_chunk=True) is None
    assert error(collective, 0, views[0], 6, own_chunk=True) is not None, "another input"
    output[130] ^= 1
    assert error(collective, 0, views[0], 5, own_chunk=True) == "1 of 64 bytes from rank 2 are wrong"


def test_a_transfer_owes_nothing_to_its_own_rank() -> None:
    transfer, whole = define.scatter([0, 32], root=0), define.all_to_all([[32, 32], [32, 32]])
    for collective, own_chunk, found in (
        (transfer, False, None),
        (whole, True, "32 of 32 bytes from rank 0 are wrong"),
    ):
        _, views = views_of(collective, 0)
        fill(collective, 0, views, seed=1)
        assert error(collective, 0, views, 1, own_chunk=own_chunk) == found
