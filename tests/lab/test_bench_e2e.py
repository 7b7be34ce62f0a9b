"""The study of whole workloads: decoding on CPU ranks from end to end, and workloads that go wrong."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import crew

from sidelane import Communicator
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.e2e import WORKLOADS, EndToEndOptions
from sidelane_lab.harness import running
from sidelane_lab.harness.launch import Rank, RankFailedError
from sidelane_lab.harness.study import collect, read, write
from sidelane_lab.machines.load import named
from sidelane_lab.studies import steps
from sidelane_lab.studies.e2e import decode, prediction, study
from sidelane_lab.studies.e2e.rows import WorkloadRow
from sidelane_lab.studies.e2e.workload import Prepared

QUICK: dict[str, Any] = {"device": "cpu", "ranks": 2, "quiet": True, "timeout_s": 100.0, "rounds": 2, "steps": 1}
ROWS = ("rows there", "rows back", "rows there, float8")


def test_what_the_file_has_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    done = row(step_ms=1.0)
    monkeypatch.setattr(steps, "rows_there", lambda *_: (done, row(size="x", note="too large")))
    monkeypatch.setattr(steps, "run_study", lambda _, options, **more: seen.append((options, more)))
    path = tmp_path / "e2e.json"
    assert not any(study.main(EndToEndOptions(**QUICK, json=path, resume=resume)) for resume in (True, False))
    (options, more), (_, anew) = seen
    assert options.done == {("decode", "tiny", "")} and more["known"][0] is done
    assert more["grows"] == anew["grows"] == path and not anew["known"], "a study that is ended leaves what it has"
    with pytest.raises(ValueError, match="a file that json names"):
        EndToEndOptions(resume=True)


def test_what_a_way_exposes_is_predicted_where_the_model_knows_it() -> None:
    pytest.importorskip("triton")
    machine = named("h200x2")
    for workload in prediction.workloads(WORKLOADS):
        for size in prediction.sizes_of(workload, (), on_cpu=False):
            found = prediction.predicted_ms(workload.name, size, machine)
            assert "nccl" in found and not {"none", "ring", "operators, routed"} & set(found), (workload.name, size)
            assert all(time > 0 for way, time in found.items() if way != "operators" and "halves" not in way), found
            assert {"operators", "copies, halves"} & set(found) or "training" in size
    one_token, many = (
        prediction.predicted_ms("decode", f"llama-3.1-8b-{size}", machine) for size in ("x1", "prefill-2048")
    )
    assert one_token["operators"] < min(one_token["nccl"], one_token["group"]) and many["group"] < many["nccl"]
    # As many bytes leave a GPU in a dispatch and a combine, and a dispatch in float8 has about half of them.
    parts = [prediction.predicted_ms("experts", f"4096 tokens, {part}", machine)["operators"] for part in ROWS]
    assert parts[0] < parts[1] and parts[2] < 0.8 * parts[0]
    assert not prediction.predicted_ms("decode", "llama-3.1-8b-x1", named("mi210x1x2"))
    assert not prediction.predicted_ms("decode", "a size of another day", machine)


def test_predictions_stand_beside_what_a_file_has_measured(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    there = {"size": "llama-3.1-8b-x1", "launch": "graph", "way": "nccl"}
    rows = [row(**there, step_ms=4.0, exposed_ms=0.6), row(**there | {"way": "gemv"}, step_ms=3.9, exposed_ms=0.1)]
    rows.append(row(**there | {"workload": "experts", "size": "4096 tokens, combine"}, step_ms=0.4))
    results = collect("e2e", rows, device_type="cpu", ranks=2, command="sidelane e2e")
    write(tmp_path / "e2e.json", dataclasses.replace(results, machine="h200x2", gpus=2))
    options = {"results": tmp_path / "e2e.json", "json": tmp_path / "predicted.json"}
    prediction.main("h200x2", EndToEndOptions(**options))
    found = read(tmp_path / "predicted.json").rows
    times = [one.predicted_ms for one in found if isinstance(one, WorkloadRow)]
    assert times[0] == pytest.approx(0.44, abs=0.01) and times[1] is None and times[2] == pytest.approx(0.377, abs=0.01)
    filled = prediction.with_predictions(rows, named("h200x2"))
    assert [one.off_percent for one in filled] == [pytest.approx(-4, abs=0.5), None, pytest.approx(-6, abs=2)]
    (table,) = prediction.error_tables(filled)
    assert [line.cells[:3] for line in table.lines] == [("decode", "nccl", "1"), ("experts", "nccl", "1")]
    with pytest.raises(ValueError, match="a file of sidelane e2e with such rows"):
        prediction.main("h200x2", EndToEndOptions(**options, workloads=("attention",)))
    with pytest.raises(ValueError, match="e2e: "):
        prediction.main("h100x8x2", EndToEndOptions())


def test_tiny_sizes_are_those_of_cpu_ranks() -> None:
    pytest.importorskip("triton")
    for workload in prediction.workloads(WORKLOADS):
        on_gpus, on_cpus = (prediction.sizes_of(workload, (), on_cpu=on_cpu) for on_cpu in (False, True))
        assert sorted(on_gpus + on_cpus) == sorted(workload.sizes)
        assert "tiny" in on_cpus and on_gpus and not any("tiny" in size for size in on_gpus)
        assert prediction.sizes_of(workload, ("tiny", on_gpus[0]), on_cpu=False) == ["tiny", on_gpus[0]]


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(RankFailedError, match=r"e2e: sizes \(value=huge, allowed=.*llama-3.1-8b-x64"):
        running.run(EndToEndOptions(**QUICK, workloads=("decode",), cases=("huge",)))


def row(**columns: Any) -> WorkloadRow:
    empty: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(WorkloadRow))
    empty |= {"workload": "decode", "size": "tiny", "way": "gloo", "launch": "eager", "nccl": "", "rounds": 0}
    return WorkloadRow(**empty | {"unit": "tokens", "made_by": "", "facts": {}, "note": ""} | columns)


def trial(group: dist.ProcessGroup, prepare: Callable[..., Prepared]) -> list[WorkloadRow]:
    """The rows of a made-up workload, on one rank."""
    rank = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), lambda line: None)
    columns = {"workload": "decode", "size": "tiny", "nccl": "", "unit": "tokens"}
    row = functools.partial(WorkloadRow, **columns)
    return study.rows_of(rank.device, make_meter(rank, 30.0), EndToEndOptions(**QUICK), prepare, row)


def made_up(comm: Communicator, device: torch.device, *, library_fails: bool = False) -> Prepared:
    def result(by: float, fails: bool = False, numel: int = 4) -> torch.Tensor:
        if fails:
            raise RuntimeError("not here")
        return torch.full((numel,), by)

    wrong = 1.5 if comm.rank == 1 else 1.0
    values = {"gloo": (1.0, library_fails), "near": (1.001,), "far": (wrong,), "nan": (float("nan"),)}
    values |= {"failing": (1.0, comm.rank == 1), "longer": (1.0, False, 4 + comm.rank), "none": (7.0,)}
    steps = {way: functools.partial(result, *value) for way, value in values.items()}
    return Prepared(steps, tolerance=0.01, units=4)


def decoded(group: dist.ProcessGroup) -> tuple[list[WorkloadRow], float]:
    """Rows of a prefill of more tokens than a fused norm takes; and how far a step of decoding is from a prefill."""
    size = decode.DecodeSize(decode.MODELS["tiny"], 1, 520, prefill=True)
    rows = trial(group, functools.partial(decode.WORKLOAD.prepare, size, group))
    whole, step = (
        decode.ShardedLlama(dataclasses.replace(size, prefill=prefill), torch.device("cpu"), torch.float32)
        for prefill in (True, False)
    )

    def half(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ weight.T
        dist.all_reduce(y, group=group)
        return decode.add_norm(y, *others)

    gather = functools.partial(dist.all_gather_into_tensor, group=group)
    wanted = whole.step(half, gather)
    step.tokens = whole.tokens[:, -1:]
    for mine, theirs in zip(step.layers, whole.layers, strict=True):
        mine.keys[:, :, :-1], mine.values[:, :, :-1] = theirs.keys[:, :, :-1], theirs.values[:, :, :-1]
    every = torch.empty(2, *wanted.shape)
    dist.all_gather_into_tensor(every.flatten(0, 1), wanted, group=group)
    assert int(whole.likeliest(wanted, gather)) == int(torch.cat(list(every), dim=1).argmax())
    return rows, steps.difference(step.step(half, gather), wanted)


def test_a_prefill_and_a_step_of_decoding_agree() -> None:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with crew(2) as ranks:
            for rows, apart in ranks.run(decoded):
                assert [row.way for row in rows] == ["gloo", "group", "operators", "none"]
                assert all(row.step_ms and not row.note for row in rows), rows
                assert apart < 1e-5


def refused(comm: Communicator, device: torch.device) -> Prepared:
    raise ValueError("too many ranks")


def test_a_way_that_is_wrong_on_one_rank_or_fails_has_no_time_and_leaves_the_others_theirs() -> None:
    with crew(2) as ranks:
        for rows in ranks.run(trial, None, made_up):
            found = {row.way: row for row in rows}
            assert {way for way, row in found.items() if row.step_ms} == {"gloo", "near", "none"}
            assert found["near"].correct and found["near"].difference == pytest.approx(1e-3, rel=1e-3)
            assert found["far"].correct is False and "0.5 from the library's" in found["far"].note
            assert found["nan"].correct is False and found["nan"].difference is None
            assert found["failing"].correct is None and found["failing"].note == "rank 1: RuntimeError: not here"
            assert found["longer"].step_ms is None and found["longer"].note.startswith("rank 1: RuntimeError: The size")
            assert found["none"].exposed_ms == 0 and found["none"].correct is None
        for rows in ranks.run(trial, None, functools.partial(made_up, library_fails=True)):
            assert not any(row.step_ms for row in rows)
            assert {row.note.partition(": ")[2] for row in rows[1:4]} == {
                "ValueError: the library has no result to compare with"
            }
        for (only,) in ranks.run(trial, None, refused):
            assert (only.way, only.note) == ("gloo", "rank 0: ValueError: too many ranks") and not only.step_ms
