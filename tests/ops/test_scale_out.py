"""Fused operators among virtual nodes, by Triton's interpreter, against float64."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from as_torchrun import run_program
from marks import long
from ranks import Crew

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import scale_out_cases as cases

from sidelane_lab.studies.fused.between_nodes import compare


@pytest.mark.parametrize("layout", [(0, 1), (0, 0, 1, 1), long((0, 0)), long((0, 1, 1, 0)), long((0, 1, 0))], ids=str)
def test_embeddings_back_to_back(four: Crew, layout: tuple[int, ...]) -> None:
    found = four.run(cases.forward_back_to_back, len(layout), layout, 2, timeout_s=110)
    assert found == [6] * len(layout)


@pytest.mark.parametrize("layout", [(0, 1), long((0, 1, 1)), long((0, 0, 1, 1)), long((0, 0))], ids=str)
def test_gradients_of_embeddings(four: Crew, layout: tuple[int, ...]) -> None:
    done = four.run(cases.backward_back_to_back, len(layout), layout, 2, timeout_s=110)
    assert all(found >= 6 for found in done)


@pytest.mark.long
def test_layers_are_trained_and_compiled_whole(four: Crew) -> None:
    assert four.run(cases.layers, 3, (0, 0, 1), timeout_s=110) == [4] * 3


@pytest.mark.parametrize("what", ["mode", "batch", "dim"])
def test_arguments_that_differ_between_nodes_are_refused_on_all_ranks(four: Crew, what: str) -> None:
    for rank, text in enumerate(four.run(cases.unlike, 2, (0, 1), what, timeout_s=110)):
        assert "Error: " in text and f"rank {1 - rank} has other arguments (value=" in text, text


def test_counts_that_differ_between_ranks_are_refused_on_all(four: Crew) -> None:
    """An all-to-all of other sizes would hang, or write beyond its output."""
    for rank, text in enumerate(four.run(cases.unlike, 2, (0, 1), "counts", timeout_s=60)):
        found = f"MismatchError: all-to-all among nodes: size of the part of rank {1 - rank} for rank {rank} (value="
        assert text.startswith(found), text


@pytest.mark.parametrize("part", ["near", "carrier"])
def test_what_a_rank_cannot_make_is_an_error_on_all(four: Crew, part: str) -> None:
    for text in four.run(cases.cannot_be_made, 3, (0, 1, 1), 2, part, timeout_s=60):
        assert text.startswith("PeerError: ") and f"rank 2: UnavailableError: no {part} here" in text, text


def test_a_rank_that_does_not_connect_is_named(four: Crew) -> None:
    """It is rank 0's far peer; the ranks that had no part in it hear of it where they meet next."""
    text, *others = four.run(cases.cannot_be_made, 2, (0, 1), 1, "connections", timeout_s=60)
    assert text.startswith("PeerTimeoutError: scale-out: rank 1 did not answer rank 0 in 3 s"), (text, others)


def test_nothing_is_left_behind(four: Crew) -> None:
    four.run(cases.closes, 3, (0, 1, 1), timeout_s=110)


def test_a_forked_copy_leaves_its_parent_alone(four: Crew) -> None:
    for told in four.run(cases.copied, 2, (0, 1), timeout_s=60):
        assert told.startswith("CommunicatorClosedError: ") and "forked copy" in told, told


def test_a_call_that_is_refused_in_a_capture_leaves_later_calls_alone(four: Crew) -> None:
    text, _ = four.run(cases.refused_in_a_capture, 2, (0, 1), timeout_s=60)
    assert text.startswith("scale-out: calls are eager"), text


@pytest.fixture
def own() -> Iterator[Crew]:
    """Ranks of a test that ends some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        found = Crew(4)
    yield found
    found.kill()


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("how", ["dies", long("late"), long("refused"), long("leaves")])
def test_the_rank_at_fault_is_named_by_all(own: Crew, how: str, is_fused: bool) -> None:
    """By its neighbour on the node, and by those on the other one, within the time-out."""
    culprit, words = (
        2,
        {"dies": "died", "late": "", "refused": "refused it: TypeError", "leaves": "left: KeyError"}[how],
    )
    found = own.run(cases.fails, 4, (0, 0, 1, 1), culprit, how, is_fused, dying=(culprit,) if how == "dies" else ())
    for rank, told in enumerate(found):
        if rank != culprit:
            ranks, text = told
            assert ranks == (culprit,), (rank, told)
            assert words in text and (how != "late" or text.startswith("PeerTimeoutError")), text


@pytest.mark.parametrize("how", ["refused", long("leaves")])
def test_the_rank_at_fault_is_named_on_one_node(four: Crew, how: str) -> None:
    """Where no connection between nodes tells of it."""
    (ranks, text), _ = four.run(cases.fails, 2, (0, 0), 1, how, False)
    assert ranks == (1,) and "rank 1: " in text and "late" not in text, text


@pytest.mark.long
def test_ways_between_nodes_are_measured(tmp_path: Path) -> None:
    """On CPU ranks the results are checked only."""
    program = tmp_path / "measure.py"
    program.write_text(
        "from pathlib import Path\nfrom sidelane_lab.studies.fused.between_nodes import main\nmain(Path('rows.json'))\n"
    )
    run_program(program, tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["way"] for row in rows} >= {"bags alone", "our kernel, process group, copy", "fused, slices of 2"}
    assert all(row["max_rel_err"] < 1e-5 for row in rows if "alone" not in row["way"])


def test_measured_ways_stand_next_to_the_prediction_of_their_shape(tmp_path: Path) -> None:
    fixed = {"transport": "group", "batch": 8, "tables": 2, "pooling": 3}
    ways = ("bags alone", "process group alone", "our kernel, process group, copy", "fused, slices of 4 by default")
    rows = [{**fixed, "way": way, "us": 100.0} for way in ways]
    rows += [{**fixed, "batch": 16, "way": "process group alone", "us": 100.0}]  # nothing was predicted for it
    rows += [{**fixed, "way": "fused, slices of 1", "us": None, "note": "not run"}]
    times = {"compute": 50.0, "collective": 120.0, "unfused_nccl": 170.0, "fused": 130.0}
    schedules = {"compute": "one kernel", "unfused_nccl": "one kernel", "collective": "library"}
    shape = "batch 8, 2 tables a rank, pooling 3, dim 256"
    models = [
        {"shape": shape, "implementation": name, "schedule": schedules.get(name, "remote_first"), "time_us": us}
        for name, us in times.items()
    ]
    others = [{**model, "schedule": "oblivious, a kernel a table", "time_us": 1.0} for model in models]
    predicted = tmp_path / "predicted.json"
    predicted.write_text(json.dumps({"rows": models + others}))
    found = compare(rows, [predicted])
    assert [row["predicted_us"] for row in found] == [50, 120, None, 130, None, None]
    assert [row["error_percent"] for row in found] == pytest.approx([-50, 20, None, 30, None, None])
    assert found[-1]["note"] == "not run" and "not this kernel" in found[0]["note"]
