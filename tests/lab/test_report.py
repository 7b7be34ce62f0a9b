"""Tables, pictures and pages from made-up rows."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import rich.console
from matplotlib.axes import Axes

from sidelane.c3.strategies import strategies
from sidelane_lab.harness import drawing as pictures
from sidelane_lab.harness import report
from sidelane_lab.harness.drawing import label_ends
from sidelane_lab.harness.report import draw, tables_of
from sidelane_lab.harness.study import Results
from sidelane_lab.studies.c3.rows import C3Row, name_of
from sidelane_lab.studies.chain import ChainRow
from sidelane_lab.studies.collectives import CollectiveRow, bus_gbps

FROM = {
    "machine": "h200x4",
    "gpus": 4,
    "device": "Example <GPU>",
    "ranks": 4,
    "date": "2026-11-20T12:00:00+00:00",
    "commit": "0123abc",
    "command": "sidelane collective --dtype <any>",
    "software": {"torch": "2.11"},
}


def collective_row(nbytes: int, implementation: str, variant: str, time_us: float | None, **others) -> CollectiveRow:
    rate = None if time_us is None else bus_gbps("all_gather", nbytes, 4, time_us)
    row = CollectiveRow(
        *("all_gather", nbytes, "bfloat16", False, "eager", implementation, variant, False),
        *(time_us, time_us, time_us, rate, None, time_us is not None),
        "" if time_us is not None else "could not run: [no] | luck",
    )
    return dataclasses.replace(row, **others)


def c3_row(strategy: str, percent: float | None, chosen: str = "", nbytes: int = 896 << 20) -> C3Row:
    speedup = None if percent is None else 1 + percent / 100 * 0.75
    return C3Row(
        *("cb1", 8192, 8192, 8192, "bfloat16", "all_gather", nbytes, "C-long", strategy, chosen),
        *(1500.0, 2100.0, 2000.0, None if speedup is None else 3500 / speedup, speedup, 1.75, percent, percent),
        percent is not None or None,
        "" if percent is not None else "not available",
    )


def collectives() -> Results:
    rows = [
        collective_row(nbytes, implementation, variant, 10 + nbytes / speed)
        for nbytes in (1 << 10, 1 << 20, 1 << 30)
        for implementation, variant, speed in (("dma", "b2b", 4e5), ("dma", "pcpy", 2e5), ("nccl", "", 3e5))
    ]
    rows.append(collective_row(1 << 30, "symm_mem", "", None))
    return Results(study="collectives", rows=tuple(rows), **FROM)


def c3(pairs: int = 1) -> Results:
    rows = [
        c3_row(strategy, percent, chosen, nbytes=(index + 1) << 20)
        for index in range(pairs)
        for strategy, percent, chosen in (
            ("serial", -8.0, ""),
            ("c3_base", 1.0, ""),
            ("conccl", 95.0, ""),
            ("nccl_ce", None, ""),
            ("auto", 95.0, "conccl"),
        )
    ]
    return Results(study="c3", rows=tuple(rows), **FROM)


def chain_row(
    nbytes: int, launch: str, implementation: str, variant: str, time_us: float | None, in_place: bool = True
) -> ChainRow:
    note = "" if time_us else "could not run: [no] | luck"
    figures = (100.0, time_us, time_us, time_us, time_us is not None or None, note)
    return ChainRow(nbytes, "bfloat16", in_place, launch, implementation, variant, *figures)


def chain() -> Results:
    rows = [
        chain_row(1 << 20, "eager", "nccl", "window", 4040.0, in_place=False),
        chain_row(1 << 20, "eager", "nccl_ce", "", 4100.0),
        chain_row(1 << 20, "eager", "symm_mem", "", None),
        chain_row(1 << 20, "eager", "auto", "one_shot", 5050.0),
        chain_row(1 << 20, "eager", "dma", "striped+graph", 5000.0, in_place=False),
        chain_row(1 << 20, "prelaunched", "dma", "b2b", 4000.0),
        chain_row(1 << 20, "prelaunched", "dma", "pcpy", None),
        chain_row(4 << 20, "graph", "dma", "b2b", 200.0),
        chain_row(4 << 20, "graph", "auto", "one_shot", 190.0),
    ]
    return Results(study="chain", rows=tuple(rows), **FROM)


def printed(results: Results, width: int = 120) -> str:
    console = rich.console.Console(file=io.StringIO(), width=width)
    report.show(results, console)
    return console.file.getvalue()


def test_the_fastest_of_each_size_is_set_off():
    (table,) = tables_of(collectives())
    best = [line.cells for line in table.lines if line.best]
    assert [cells[:3] for cells in best] == [
        ("1K", "dma", "b2b"),
        ("1M", "dma", "b2b"),
        ("1G", "dma", "b2b"),
    ]
    assert [line.cells[0] for line in table.lines if line.rule] == ["1K", "1M", "1G"]


def test_the_chain_begins_with_the_fastest_of_both_sides():
    first, *others = tables_of(chain())
    assert [(line.cells, line.best) for line in first.lines] == [
        (("1M", "eager", "striped+graph out", "5000", "5050", "nccl window out", "4040", "0.808"), False),
        # Libraries have no prelaunched calls: what they do eagerly is what there is.
        (("1M", "prelaunched", "b2b in", "4000", "-", "nccl window out", "4040", "1.010"), True),
        (("4M", "graph", "one_shot in", "190", "190", "", "-", "-"), False),
    ]
    assert [table.title.rsplit(", ")[-1] for table in others] == ["eager", "graph", "prelaunched"]


def test_different_ways_to_call_do_not_share_a_table():
    results = collectives()
    rows = [dataclasses.replace(results.rows[0], in_place=place, launch=launch) for place in (False, True)
            for launch in ("eager", "graph")]  # fmt: skip
    titles = [table.title for table in tables_of(dataclasses.replace(results, rows=tuple(rows)))]
    assert len(set(titles)) == 4


def lists() -> Results:
    times = {
        ("auto", "b2b"): 20.0, ("auto", "one_shot+separate"): 80.0, ("dma", "pcpy"): 19.0, ("nccl", ""): 42.0,
        ("nccl", "window+separate"): 30.0, ("nccl_ce", "separate"): 31.0, ("nccl_ce", ""): None,
    }  # fmt: skip
    rows = [
        collective_row(nbytes, implementation, variant, time_us, tensors=8)
        for nbytes in (1 << 20, 64 << 20)
        for (implementation, variant), time_us in times.items()
    ]
    rows.append(collective_row(256 << 20, "auto", "b2b", 900.0, tensors=8))
    longest = {"collective": "reduce_scatter", "launch": "graph", "tensors": 1000}
    rows.append(collective_row(1 << 20, "auto", "b2b", 12345.0, **longest))
    rows.append(collective_row(1 << 20, "auto", "striped+separate", 123456.0, **longest))
    rows.append(collective_row(1 << 20, "nccl", "window+separate", 12345.0, **longest))
    return Results(study="collectives", rows=tuple(rows), **FROM)


def test_lists_begin_with_what_they_save():
    first, *_ = tables_of(lists())
    assert first.title == "all_gather, bfloat16, out of place, lists of 8 tensors against separate calls"
    assert [(line.cells, line.best) for line in first.lines] == [
        (("1M", "eager", "20", "80", "75", "nccl window+separate", "30", "1.500"), True),
        (("64M", "eager", "20", "80", "75", "nccl window+separate", "30", "1.500"), True),
        (("256M", "eager", "900", "-", "-", "", "-", "-"), True),
    ]
    slow = dataclasses.replace(lists().rows[0], time_us=81.0)
    first, *_ = tables_of(dataclasses.replace(lists(), rows=(slow, *lists().rows[1:7])))
    assert [(line.cells[4], line.best) for line in first.lines] == [("-1", False)]


def test_lists_share_no_table_and_no_picture_with_single_tensors(tmp_path: Path):
    mixed = dataclasses.replace(collectives(), rows=(*collectives().rows, *lists().rows[:7]))
    titles = [table.title for table in tables_of(mixed)]
    way = "all_gather, bfloat16, out of place, eager"
    assert titles[1:] == [way, f"{way}, lists of 8 tensors"]
    assert [len(table.lines) for table in tables_of(mixed)[1:]] == [len(collectives().rows), 7]
    pictures = [picture.name for picture in draw(mixed, tmp_path)]
    assert pictures == [
        "all_gather-bfloat16-out-of-place-eager",
        "all_gather-bfloat16-out-of-place-eager-lists-of-8-tensors",
    ]


def test_what_auto_chose_is_one_line_for_lists_and_one_for_separate_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    ends: list[list[str]] = []

    def noted(axes: Axes, points: Sequence[tuple[float, float, str, str]], side: str) -> None:
        ends.append([name for _, _, name, _ in points])
        label_ends(axes, points, side)

    monkeypatch.setattr(pictures, "label_ends", noted)
    rows = (*lists().rows[:14], dataclasses.replace(lists().rows[0], bytes=4 << 20, variant="pcpy"))
    draw(dataclasses.replace(lists(), rows=rows), tmp_path)
    assert [name for name in ends[0] if "its choice" in name] == [
        "Sidelane (its choice)",
        "Sidelane (its choice), separate",
    ]


@pytest.mark.parametrize(
    "results", [collectives(), c3(), chain(), lists()], ids=["collectives", "c3", "chain", "lists"]
)
def test_tables_fit_a_terminal_of_80_columns(results: Results):
    text = printed(results, width=80)
    assert "…" not in text
    for row in results.rows:
        assert (name_of(row) if isinstance(row, C3Row) else row.implementation) in text


def test_what_could_not_run_is_a_line_with_its_reason():
    assert "could not run: [no] | luck" in printed(collectives(), width=200)
    assert "not available" in printed(c3(), width=200)


def test_rows_that_say_the_same_share_a_note():
    rows = [dataclasses.replace(c3_row(name, 1.0), note="like this") for name in ("serial", "c3_base")]
    (table,) = tables_of(dataclasses.replace(c3(), rows=tuple(rows)))
    assert table.notes == ("serial, compute_first: like this",)


def test_wrong_results_are_said_to_be_wrong():
    wrong = collective_row(1 << 20, "dma", "b2b", None, correct=False, note="byte 7 differs")
    assert "WRONG" in printed(dataclasses.replace(collectives(), rows=(wrong,)))


def test_cpu_results_carry_a_warning():
    assert report.CPU_WARNING[:40] in printed(dataclasses.replace(c3(), machine="cpu", gpus=0), width=400)
    assert report.CPU_WARNING[:40] not in printed(c3(), width=400)


@pytest.mark.parametrize(("device", "told"), [("Some Processor, 2 cores", True), ("Some Processor, 8 cores", False)])
def test_a_machine_with_too_few_cores_is_told(device: str, told: bool, tmp_path: Path):
    """Four ranks that compute and move bytes keep eight cores busy."""
    results = dataclasses.replace(c3(), machine="cpu", gpus=0, ranks=4, device=device)
    sentence = "This machine has 2 cores and would need 8"
    assert (sentence in printed(results, width=400)) == told
    report.write(tmp_path, results)
    assert (sentence in (tmp_path / "index.html").read_text(encoding="utf-8")) == told
    assert sentence not in printed(dataclasses.replace(results, gpus=4), width=400)


def test_what_auto_picked_is_marked_and_not_shown_twice():
    (table,) = tables_of(c3())
    assert [line.cells[0] for line in table.lines] == [
        "serial",
        "compute_first",
        "copy_engines (auto)",
        "nccl_copy_engines",
    ]


def test_the_page_holds_everything(tmp_path: Path):
    page = report.write(tmp_path / "report", [c3(), collectives()])
    text = page.read_text()
    assert page.name == "index.html"
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text), "the page needs other files"
    assert text.count("data:image/svg+xml;base64,") == 2 and "Example &lt;GPU&gt;" in text and "<any>" not in text
    for name in ("h200x4", "0123abc", "torch 2.11", "copy_engines", "b2b", "could not run"):
        assert name in text
    markdown = (page.parent / "report.md").read_text()
    images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", markdown)
    assert len(images) == 2
    assert all((page.parent / image).stat().st_size > 1000 for image in images)
    assert "- 1G symm_mem: could not run: [no] | luck" in markdown
    assert {"c3.json", "collectives.json"} <= {file.name for file in page.parent.iterdir()}


def test_studies_without_a_single_time_still_make_a_page(tmp_path: Path):
    empty = dataclasses.replace(c3(), rows=(c3_row("conccl", None),))
    assert "not available" in report.write(tmp_path, empty).read_text()


@pytest.mark.parametrize("studies", [[], [c3(), c3()]], ids=["none", "twice"])
def test_studies_must_differ(tmp_path: Path, studies: list[Results]):
    with pytest.raises(ValueError, match="different names"):
        report.write(tmp_path, studies)


@pytest.mark.long  # pictures; one is drawn in test_pictures_depend_on_the_rows_alone
def test_many_pairs_take_several_pictures(tmp_path: Path):
    assert [picture.name for picture in draw(c3(pairs=6), tmp_path)] == [
        *("c3-kernels", "c3-engines", "c3-all_gather-1", "c3-all_gather-2")
    ]


def test_pictures_depend_on_the_rows_alone(tmp_path: Path):
    names = [picture.name for picture in draw(collectives(), tmp_path / "a")]
    assert names == [picture.name for picture in draw(collectives(), tmp_path / "b")]
    for name in names:
        assert (tmp_path / "a" / f"{name}.svg").read_text() == (tmp_path / "b" / f"{name}.svg").read_text()


def test_every_strategy_and_implementation_has_a_plain_name_in_pictures():
    names = [*pictures.COLOURS, *(strategy.code for strategy in strategies())]
    assert [name for name in names if pictures.plain_name(name) == name] == []
    assert len({pictures.plain_name(strategy.code) for strategy in strategies()}) == len(strategies())
    assert pictures.plain_name("gloo", on_cpu=True) == pictures.plain_name("nccl", on_cpu=True) == "Gloo"
