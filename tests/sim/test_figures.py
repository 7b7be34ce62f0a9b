"""``sidelane figure``: every figure and table of the papers, published, predicted and measured, or why not."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sidelane_lab.cli.model import figure
from sidelane_lab.harness import terminal
from sidelane_lab.machines.load import named
from sidelane_lab.model.panels import Panel, TimelinePanel
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.figure_command import FIGURES, FigureOptions, figure_of, main
from sidelane_lab.papers.figures import MEASURED, PREDICTED, PUBLISHED, SOURCES, ClaimPredictions, FigureValues

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
CLAIMS = ROOT / "src/sidelane_lab/papers/data/claims.json"

# Read out of the five texts (docs/papers.md): what has values. The rest are diagrams and tables of equipment.
NUMBERS = {
    "000": ("5", "6", "7", "8", "9", "10"),
    "001": ("8", "9", "10", "11", "12", "13", "14", "15"),
    "003": ("1", "6", "13", "14", "15", "16"),
    "004": ("1c", "2", "3", "4", "5", "6"),
}
TABLES = {"000": ("T1", "T2"), "003": ("T1", "T2")}
EQUIPMENT = ("001/T1", "001/T2", "004/T1")
MOST_CURVES = 6


@pytest.fixture(scope="module")
def evaluated() -> dict[str, FigureValues]:
    return {number: one.evaluate([RESULTS]) for number, one in FIGURES.items()}


def values_of(claim_id: str) -> list[float]:
    """The numbers of a claim, straight from the file."""
    claims = {claim["id"]: claim["value"] for claim in json.loads(CLAIMS.read_text())}
    found = claims[claim_id]
    return list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else [found]


def test_every_figure_and_table_of_the_papers_is_here() -> None:
    expected = {f"{paper}/{one}" for numbers in (NUMBERS, TABLES) for paper, some in numbers.items() for one in some}
    assert set(FIGURES) == expected and sum(map(len, NUMBERS.values())) == 26 and sum(map(len, TABLES.values())) == 4


def test_every_figure_that_a_claim_names_is_here() -> None:
    roman = {"I": "1", "II": "2"}
    for claim in published().values():
        paper = claim["seed"][:3]
        if not paper.isdigit():
            continue
        for kind, number in re.findall(r"(Fig\.|Table) ?(\d+|II?\b)", claim["where"]):
            name = f"{paper}/{'T' if kind == 'Table' else ''}{roman.get(number, number)}"
            assert name in (*FIGURES, *EQUIPMENT), claim["id"]


@pytest.mark.parametrize("number", FIGURES)
def test_every_source_is_there_or_a_line_says_why_not(number: str, evaluated: dict[str, FigureValues]) -> None:
    values, one = evaluated[number], FIGURES[number]
    known = {PUBLISHED: bool(one.claims), PREDICTED: bool(values.predicted), MEASURED: bool(values.measured)}
    assert all(known[source] or values.missing.get(source) for source in SOURCES)
    assert set(one.claims) <= set(published()) and (one.measure is None) == (one.study == "")
    assert bool(values.measured) == (one.measure is not None), "results/ has a file for each that can be measured"
    assert values.predicted, "there is a prediction of each"
    assert all("\n" not in line and len(line) < 150 for line in values.missing_lines())


def panels_of(values: FigureValues) -> list[Panel | TimelinePanel]:
    if values.figure.is_table:
        return []
    return [*values.predicted, *(panel for _, panels in values.measured for panel in panels)]


def test_panels_can_be_read(evaluated: dict[str, FigureValues]) -> None:
    for number, values in evaluated.items():
        for panel in panels_of(values):
            if isinstance(panel, TimelinePanel):
                assert panel.intervals, number
                continue
            assert 1 <= len(panel.curves) <= MOST_CURVES, number
            assert panel.xlabel, number
            shown = [value for band in panel.curves.values() for value in band.values if not math.isnan(value)]
            assert shown, number
            assert all(map(math.isfinite, shown)), number
            assert all(len(band.values) == len(panel.x) for band in panel.curves.values()), number


def lower(claim_id: str) -> list[float]:
    return [1 - value / 100 for value in values_of(claim_id)]


MARKS: dict[str, list[float]] = {
    "000/5": [1 + value / 100 for value in values_of("C3-CU-07")],
    "000/7": values_of("C3-ID-01") + values_of("C3-ID-02"),
    "000/9": values_of("CC-02"),
    "001/8": lower("FU-EMB-01") + lower("FU-EMB-02"),
    "001/9": lower("FU-GEMV-01") + lower("FU-GEMV-02"),
    "001/10": lower("FU-GEMM-01") + lower("FU-GEMM-02"),
    "001/12": lower("FU-EMB-03") + lower("FU-EMB-04"),
    "001/13": [1 / (1 + values_of("FU-OCC-02")[0] / 100), 1.0, 1 + values_of("FU-OCC-03")[0] / 100],
    "001/14": values_of("FU-SKEW-01") + values_of("FU-SKEW-02"),
    "001/15": lower("FU-SIM-01"),
    "003/1": [1 / values_of("DM-PC-02")[0], 1 / (1 + float(str(values_of("DM-FIN-01")[0]).partition("%")[0]) / 100)],
    "003/6": values_of("DM-PH-01") + values_of("DM-PH-02"),
    "003/13": [1 / values_of("DM-BB-05")[0], 1 / values_of("DM-PC-02")[0], 1 + values_of("DM-PC-01")[0] / 100],
    "003/14": [1 / values_of("DM-BB-05")[1], 1 / values_of("DM-PC-02")[1], 1 + values_of("DM-PC-01")[1] / 100],
    "003/16": [1.0],
    "004/2": values_of("RA-03") + values_of("RA-04"),
    "004/3": values_of("RA-01"),
    "004/4": values_of("RA-02"),
}
# Marks of these stand at a share of what is predicted there: percents of the ideal, of the library's watts, of bytes.
RELATIVE = ("000/6", "000/8", "000/10", "003/15")


def test_published_marks_are_those_of_the_claims(evaluated: dict[str, FigureValues]) -> None:
    for number, values in evaluated.items():
        heights = {
            round(height, 6)
            for panel in panels_of(values)
            if isinstance(panel, Panel)
            for mark in panel.marks
            if mark.label.startswith("published")
            for height in mark.y
        }
        if number not in RELATIVE:
            assert heights == {round(value, 6) for value in MARKS.get(number, [])}, number
    last = evaluated["000/8"].predicted[0]
    shares = [values_of(claim_id)[0] / 100 for claim_id in ("C3-BASE-02", "C3-SP-01", "C3-RP-01")]
    ideal = last.marks[0].y[-1]
    assert last.marks[1].y == pytest.approx([1 + share * (ideal - 1) for share in shares])


def test_tables_have_the_words_of_the_claims() -> None:
    lines = figure_of("003/T1").lines
    assert lines is not None and lines()["128K"] == published()["DM-T1-1"]["value"]
    assert lines()["256K"] == published()["DM-T1-2"]["value"] and lines()["4G"] == published()["DM-T1-4"]["value"]
    classes = figure_of("000/T2").lines
    assert classes is not None
    assert dict(classes()) == {
        claim_id.removeprefix("C3-T2-").replace("-", "_"): claim["value"]
        for claim_id, claim in published().items()
        if claim_id.startswith("C3-T2-")
    }


def test_measured_values_are_those_of_the_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"collective": "all_gather", "implementation": by, "variant": variant, "bytes": n, "time_us": us * n}
        for by, variant, us in (("nccl", "", 2.0), ("nccl", "window", 1.0), ("dma", "pcpy", 4.0), ("dma", "bcst", 2.0))
        for n in (1024, 2048)
    ]
    rows += [{**rows[0], "variant": "", "time_us": 0.1, "launch": "eager"}]
    usual = {"launch": "graph", "in_place": False, "correct": True, "tensors": 1}
    content = {"study": "collectives", "machine": "here", "device": "A GPU", "ranks": 3}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**content, "rows": [{**usual, **row} for row in rows]}))
    values = figure_of("3/13").evaluate([file])
    (_, (panel,)), *_ = values.measured
    assert list(panel.x) == [1024, 2048] and panel.curves["pcpy"].values == (0.25, 0.25)
    assert panel.curves["bcst"].values == (0.5, 0.5) and "b2b" not in panel.curves
    assert "measured: nothing prelaunched" in "\n".join(values.missing_lines())
    fired = {**usual, **rows[4], "launch": "eager", "trigger": "stream", "time_us": 512}
    fuller = {**content, "study": "prelaunch", "rows": [{**usual, **row, "trigger": "call"} for row in rows] + [fired]}
    (tmp_path / "fired.json").write_text(json.dumps(fuller))
    values = figure_of("3/13").evaluate([file, tmp_path / "fired.json"])
    assert MEASURED not in values.missing and values.measured[0][1][0].curves["pcpy+prelaunch"].values[0] == 2
    assert "no c3.json that has it" in figure_of("000/8").evaluate([file]).missing[MEASURED]
    file.write_text(json.dumps({**content, "rows": [{"bytes": 1}]}))
    with pytest.raises(ValueError, match=r"mine\.json is no file of collectives"):
        figure_of("3/13").evaluate([file])


def test_pairs_of_every_class_are_bars_by_the_limit_of_the_gemm(tmp_path: Path) -> None:
    usual = {"bytes": 1 << 20, "collective": "all_gather", "gemm_us": 100.0, "comm_us": 300.0, "correct": True}
    rows = [
        {**usual, "gemm": name, "bound": bound, "class": "C-long", "strategy": strategy, "time_us": us}
        for name, bound in (("cb1", "compute"), ("add", "memory"), ("attend", "memory"))
        for strategy, us in (("serial", 400.0), ("conccl", 320.0), ("conccl_rp", 320.0 if name == "cb1" else 400.0))
    ]
    content = {"study": "c3", "machine": "here", "device": "A GPU", "ranks": 2}
    for name, some in (("c3-classes.json", rows), ("c3.json", rows[:3])):
        (tmp_path / name).write_text(json.dumps({**content, "rows": some}))
    values = figure_of("000/10").evaluate([tmp_path])
    (_, (first,)), (_, (second,)) = values.measured
    assert list(first.x) == ["compute\nC-long\n(1)", "memory\nC-long\n(2)", "all\n(3)"]
    assert first.curves["conccl_rp"].values == pytest.approx((1.25, 1.0, 1.25 / 3 + 2 / 3))
    assert (first.title, list(second.x)) == ("2 x A GPU, all classes", ["all_gather\nC-long\n(1)", "all\n(1)"])
    assert [row["title"] for row in values.to_dict()[MEASURED]["here"]] == [first.title, ""]


def test_the_fastest_variant_has_those_beside_it_that_are_as_good(tmp_path: Path) -> None:
    usual = {"collective": "all_gather", "launch": "graph", "in_place": False, "correct": True, "bytes": 1 << 20}
    times = (("nccl", "", 9.0), ("dma", "pcpy", 10.1), ("dma", "bcst", 10.0), ("dma", "b2b", 10.3))
    rows = [{**usual, "implementation": by, "variant": variant, "time_us": us} for by, variant, us in times]
    content = {"study": "collectives", "machine": "here", "device": "A GPU", "ranks": 2, "rows": rows}
    (tmp_path / "collectives.json").write_text(json.dumps(content))
    assert figure_of("003/T1").evaluate([tmp_path]).measured[0][1] == {"1M": "bcst (1 more within 2%)"}


def test_what_a_machine_cannot_do_is_a_reason() -> None:
    nodes = figure_of("000/8").evaluate([], named("h100x8x2"))
    assert "what crosses nodes is modelled for" in nodes.missing[PREDICTED] and not nodes.measured
    dlrm = figure_of("001/15").evaluate([], named("h200x4"))
    assert "allowed=several of one GPU" in dlrm.missing[PREDICTED]


def test_the_papers_own_values_stand_beside_ours(evaluated: dict[str, FigureValues]) -> None:
    values = evaluated["000/10"]
    table = values.tables(ClaimPredictions().of(values.figure.claims))[0]
    line = next(line for line in table.lines if line.cells[0] == "CC-03")
    assert line.cells[2] == "66" and 60 < float(line.cells[3]) < 75
    assert table.columns[4:] == ("<2 x H200", "<4 x H200", "<2 x H100")


@pytest.mark.parametrize("number", ["000/5", "001/11", "003/16"])
def test_a_figure_is_one_picture(number: str, evaluated: dict[str, FigureValues], tmp_path: Path) -> None:
    picture = evaluated[number].draw(tmp_path)
    assert picture == tmp_path / f"{number.replace('/', '-')}.png" and picture.stat().st_size > 20_000


def test_numbers_are_read_generously() -> None:
    assert figure_of("3/t1").number == "003/T1"
    assert figure_of("002/8").number == figure_of("ConCCL/8").number == figure_of("conccl / Figure 8").number == "000/8"
    assert figure_of("dma/Table 1").number == "003/T1" and figure_of("fused/fig. 15").number == "001/15"
    with pytest.raises(ValueError, match="did you mean 000/8 or 001/8"):
        figure_of("figure 8")
    assert figure_of("004/1(c)").number == "004/1c"
    with pytest.raises(ValueError, match="diagrams and equipment have no values"):
        figure_of("003/7")
    with pytest.raises(ValueError, match="numbers or --all"):
        FigureOptions(("003/13",), everything=True)


def test_command_lists_draws_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PIPED_PROGRESS_S", 0.02)
    listed = CliRunner().invoke(figure, [])
    assert listed.exit_code == 0 and all(number in listed.output for number in FIGURES)
    words = ["003/T1", "001/14", "--results", str(RESULTS), "--report", str(tmp_path), "--no-ranges"]
    drawn = CliRunner().invoke(figure, words)
    assert drawn.exit_code == 0, drawn.output
    assert "001/14, 2 of 2" in drawn.stderr, "progress goes to stderr in a pipe, too"
    assert "FU-SKEW-01" in drawn.stdout
    page = (tmp_path / "index.html").read_text()
    assert "b2b, prelaunch" in page and page.count("<img") == 1


@pytest.mark.long
def test_all_make_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(FigureOptions(everything=True, results=(RESULTS,), report=tmp_path, json=tmp_path / "all.json"))
    page = (tmp_path / "index.html").read_text()
    assert page.count("<img") == 26
    assert page.count("<h2") == 30
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["figure"] for row in rows] == list(FIGURES)
    assert " of 30 (" in capsys.readouterr().err
