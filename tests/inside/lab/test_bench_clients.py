"""The study of other people's programs: on CPU ranks with a tiny model, and what fits a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import crew

from sidelane_lab.cli.clients import ClientOptions
from sidelane_lab.harness import running
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.study import Results, read
from sidelane_lab.harness.ways import Problem
from sidelane_lab.studies.clients import programs, study, trainers
from sidelane_lab.studies.clients.cases import MODELS, ClientCase, fitted
from sidelane_lab.studies.clients.study import ClientRow, ClientTimes

QUICK: dict[str, Any] = {"device": "cpu", "ranks": 2, "models": ("tiny",), "quiet": True, "timeout_s": 150.0}
QUICK |= {"warmup": 2, "rounds": 2, "steps": 1}
NOT_THERE = "the package megatron-core is required (value=not installed)"
ROOM = 0.93 * 85e9 - 2e9
"""Bytes of a GPU with 80 GB, as the study counts them."""


@pytest.mark.long
def test_from_end_to_end_and_on_with_the_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "clients.json"
    first = running.run(ClientOptions(**QUICK, programs=("ddp", "tensor"), json=path, resume=True))
    assert isinstance(first, Results)
    some = ("ddp", "fsdp", "tensor", "megatron")
    results = running.run(ClientOptions(**QUICK, programs=some, json=path, resume=True))
    assert isinstance(results, Results) and read(path).rows == results.rows
    rows = [row for row in results.rows if isinstance(row, ClientRow)]
    assert {row.note for row in rows[-4:]} <= {"megatron-core trains on GPUs only", NOT_THERE}, rows[-4:]
    rows = rows[:-4]
    assert [row.to_dict() for row in rows[: len(first.rows)]] == [row.to_dict() for row in first.rows]
    training = ["gloo", "group", "enable", "none"]
    ways = [("ddp", way) for way in training if way != "enable"] + [("tensor", way) for way in training[:2]]
    assert [(row.program, row.way) for row in rows] == [*ways, *(("fsdp", way) for way in training)]
    for row in rows:
        library = next(one for one in rows if one.program == row.program)
        assert row.step_ms and row.fastest_ms and row.slowest_ms and row.rounds == 2, row
        assert row.fastest_ms <= row.step_ms <= row.slowest_ms and row.host_ms is None and row.nccl == ""
        assert row.correct is (None if row.way == "none" else True) and (row.loss is None) == (
            row.way == "none" or row.program == "tensor"
        )
        assert row.loss == pytest.approx(library.loss, rel=1e-2) if row.loss is not None else True
        assert (row.exposed_ms is None) == (row.program == "tensor")
        assert ("by sidelane" in row.made_by) == (row.way in ("group", "enable")), row
        assert "by gloo" not in row.made_by
    assert len(tables_of(results)) == 4


def in_passes(group: dist.ProcessGroup, options: ClientOptions) -> list[ClientRow]:
    """The study of FSDP2 with room for one model, in which ``enable`` cannot be built."""
    torch.set_num_threads(1)
    this = study._Study(Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), lambda line: None), options)
    this._room = 2e6
    enable = programs.fsdp.enable
    programs.fsdp.enable = wrong  # type: ignore[assignment]
    try:
        return this.rows(this.case("fsdp", "tiny"))
    finally:
        programs.fsdp.enable = enable
        this.close()


def wrong(model: object) -> None:
    raise RuntimeError("not here")


@pytest.mark.long
def test_what_does_not_fit_together_is_built_one_by_one_and_what_fails_leaves_the_others_their_times() -> None:
    pytest.importorskip("transformers")
    with crew(2) as ranks:
        for rows in ranks.run(in_passes, None, ClientOptions(**{**QUICK, "rounds": 4})):
            by_way = {row.way: row for row in rows}
            failed = by_way.pop("enable")
            assert failed.step_ms is None and failed.correct is None and "RuntimeError: not here" in failed.note
            assert list(by_way) == ["gloo", "group", "none"]
            for row in by_way.values():
                assert row.step_ms and row.rounds == 4 and row.note.endswith("built one by one in 2 passes")
                assert row.recovered_percent is not None and row.model == "tiny" and row.optimizer == "AdamW"
            assert by_way["group"].loss == by_way["gloo"].loss


def test_what_cannot_run_is_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"clients: models \(value=mistral-7b, allowed=tiny\)"):
        running.run(ClientOptions(**{**QUICK, "models": ("mistral-7b",)}))
    monkeypatch.setattr(trainers, "installed_version", lambda name: "0.16.1")
    with pytest.raises(ValueError, match="clients: megatron-core trains on GPUs only"):
        running.run(ClientOptions(**QUICK, programs=("megatron",)))
    monkeypatch.setattr(trainers, "installed_version", lambda name: "0.3.0" if name == "torchtitan" else None)
    missing = (
        r"transformers is required \(value=not installed\); torchtitan 0.2 is required \(value=0.3.0\); the package"
    )
    with pytest.raises(ValueError, match=missing):
        running.run(ClientOptions(**QUICK))
    with pytest.raises(ValueError, match="a file that json names"):
        ClientOptions(resume=True)


def test_sizes_are_those_that_are_published() -> None:
    found = {name: round(model.total / 1e9, 2) for name, model in MODELS.items()}
    expected = {"qwen2.5-0.5b": 0.49, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "mistral-7b": 7.25}
    assert found == {**expected, "llama-3.1-8b": 8.03, "tiny": 0.0}


def test_a_tiny_model_has_as_many_parameters_as_is_said() -> None:
    pytest.importorskip("transformers")
    for tied in (True, False):
        model = dataclasses.replace(MODELS["tiny"], tied=tied)
        made = model.make(torch.device("cpu"), torch.bfloat16)
        assert sum(each.numel() for each in made.parameters()) == model.total
        assert {each.dtype for each in made.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("program", "model", "length", "optimizer", "layers"),
    [
        ("ddp", "llama-3.2-3b", 2048, "AdamW", 28),
        ("ddp", "llama-3.1-8b", 2048, "SGD", 32),
        ("fsdp", "llama-3.2-3b", 2048, "AdamW", 28),
        ("fsdp", "llama-3.1-8b", 2048, "SGD", 32),
        ("fsdp", "llama-3.1-8b", 4096, "AdamW", 16),
        ("tensor", "llama-3.1-8b", 1, "", 32),
        ("torchtitan", "llama-3.1-8b", 2048, "SGD", 32),
        ("megatron", "llama-3.1-8b", 2048, "AdamW", 16),
        ("megatron-experts", "llama-3.2-1b", 2048, "AdamW", 16),
    ],
)
def test_what_does_not_fit_takes_another_optimizer_or_fewer_layers(
    program: str, model: str, length: int, optimizer: str, layers: int
) -> None:
    case = fitted(ClientCase(program, MODELS[model], 1, length), 2, ROOM)
    assert (case.optimizer, case.model.layers) == (optimizer, layers)
    assert ("need" in case.note) == (optimizer == "SGD" or layers < MODELS[model].layers)
    assert ("of 32 layers" in str(case)) == (layers < MODELS[model].layers)
    assert fitted(dataclasses.replace(case, model=MODELS[model]), 2, 0.0).model.layers == 1


def times(step_us: float, output: float) -> ClientTimes:
    return ClientTimes((step_us, 1.1 * step_us), 1.0, torch.tensor(output), "3 all_reduce by sidelane (b2b)")


def test_rows_say_what_is_wrong_and_where_nothing_can_be_won(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "installed_version", lambda name: "5.24.0")
    this: Any = SimpleNamespace(_library="nccl", _nccl="2.28.9", on_cpu=False)
    case = dataclasses.replace(ClientCase("ddp", MODELS["llama-3.2-1b"], 1, 2048, "AdamW"), note="two passes")
    found = {"nccl": times(1000.0, 5.0), "group": times(1020.0, 5.01), "enable": times(900.0, 5.2)}
    trial: Any = SimpleNamespace(found={(way, "eager"): one for way, one in found.items()}, problems={})

    def row(way: str) -> ClientRow:
        return study._Study._row(this, case, way, "eager", trial)

    assert row("enable").correct is False and row("enable").step_ms is None
    assert "the output is 4% from that of nccl" in row("enable").note
    assert row("group").over_percent == pytest.approx(2.0) and row("group").note == "two passes"
    trial.found["none", "eager"] = times(995.0, 3.0)
    assert row("group").note == "nccl exposes 0.5% of a step: there is nothing to win; two passes"
    assert row("group").exposed_ms == pytest.approx(0.02625) and row("none").loss is None
    case = dataclasses.replace(case, program="tensor")  # whose logits rounding moves further than a loss
    assert row("enable").correct is True and row("none").correct is None
    trial.found["enable", "eager"] = times(900.0, 5.6)
    assert row("enable").correct is False
    trial.problems["group"] = Problem("OutOfMemoryError: no")
    assert (row("group").step_ms, row("group").note, row("group").correct) == (None, "OutOfMemoryError: no", None)
