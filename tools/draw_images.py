"""Draw the pictures of docs/images/ that show result files, predictions of the demo, or a trace of a program.

python tools/draw_images.py                                     # all of the first two kinds
python tools/draw_images.py c3-h200x4                           # one
python tools/draw_images.py profiler --trace trace-0.json       # what examples/profiler.py has written, of each rank
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
from pathlib import Path

import matplotlib as mpl

from sidelane.execute.timeline import Interval
from sidelane_lab.harness import study as result_files
from sidelane_lab.harness.drawing import RC
from sidelane_lab.harness.report import draw
from sidelane_lab.model.panels import draw_timeline
from sidelane_lab.studies.demo import figures

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {
    "all-gather-h200x4": ("h200x4/collectives.json", "all_gather-bfloat16-out-of-place-graph"),
    "all-reduce-h200x2": ("h200x2/collectives.json", "all_reduce-bfloat16-in-place-graph"),
    "c3-h200x4": ("h200x4/c3.json", "c3-all_to_all"),
    "c3-engines-h200x2": ("h200x2/c3.json", "c3-engines"),
    "c3-units-h200x2": ("h200x2/isolated.json", "isolated-units"),
    "e2e-decode-h200x2": ("h200x2/e2e.json", "e2e-decode-graph"),
    "e2e-experts-h200x2": ("h200x2/e2e.json", "e2e-experts-graph"),
    "e2e-recommendation-h200x2": ("h200x2/e2e.json", "e2e-recommendation-graph"),
    "fsdp-h200x2": ("h200x2/fsdp.json", "fsdp-exposed"),
    "power-h200x4": ("h200x4/power.json", "power-all_gather-in-place-graph"),
}
"""Result file and name of the picture in its report, by the name of the image."""

FRONT = "c3-h200x4"
"""Picture of the README."""

FRONT_PAIRS = (("cb1", 896 << 20), ("mb1", 896 << 20))
"""GEMMs and bytes in the picture of the README, which has room for two: the shortest GEMM and the longest."""


DEMO = ("timeline-c3_base", "timeline-conccl")
"""Pictures of `sidelane demo`."""

TRACED = ("sidelane:all_gather", "aten::mm", "Memcpy PtoP")
"""Begins of the names of the events of a trace that are drawn, besides kernels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*IMAGES, *DEMO))}")
    parser.add_argument("--trace", nargs="+", type=Path, help="traces of torch's profiler, of each rank")
    parser.add_argument("--title", default="", help="of the picture of a trace")
    asked = parser.parse_args()
    for name in asked.names or (*IMAGES, *DEMO):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if asked.trace:
                draw_trace(asked.trace, asked.title, folder, name)
                picture = name
            elif name in DEMO:
                figures.draw(figures.measured(), folder)
                picture = name
            elif name in IMAGES:
                picture = draw_results(name, folder)
            else:
                parser.error(f"no picture is called {name}")
            shutil.copy(folder / f"{picture}.png", ROOT / "docs" / "images" / f"{name}.png")
        print(f"docs/images/{name}.png")


def draw_results(name: str, folder: Path) -> str:
    """Draw the pictures of a result file, and return the name of the one that is wanted."""
    file, picture = IMAGES[name]
    results = result_files.read(ROOT / "results" / file)
    if name == FRONT:
        rows = tuple(row for row in results.rows if (row.gemm, row.bytes) in FRONT_PAIRS)  # type: ignore[attr-defined]
        results = dataclasses.replace(results, rows=rows)
    with mpl.rc_context(RC):
        drawn = [one.name for one in draw(results, folder)]
    if picture not in drawn:
        raise ValueError(f"draw_images: picture (value={picture}, allowed={', '.join(drawn)})")
    return picture


def draw_trace(files: list[Path], title: str, folder: Path, name: str) -> None:
    """Draw ranges of Sidelane, products, copies between GPUs and kernels, a lane for each thread or stream, from the
    first range of Sidelane on.
    """
    intervals = []
    for rank, file in enumerate(files):
        for event in json.loads(file.read_text(encoding="utf-8"))["traceEvents"]:
            if event.get("ph") != "X" or not (event["name"].startswith(TRACED) or event.get("cat") == "kernel"):
                continue
            lane = "host" if event.get("cat") == "cpu_op" else f"stream {event['tid']}"
            kind = "kernel" if event.get("cat") == "kernel" else event["name"].split(" ")[0]
            intervals.append(Interval(f"rank {rank}", lane, kind, event["ts"], event["ts"] + event["dur"]))
    first = min(one.start_us for one in intervals if one.label.startswith("sidelane"))
    moved = [
        dataclasses.replace(one, start_us=one.start_us - first, end_us=one.end_us - first)
        for one in intervals
        if one.start_us >= first
    ]
    draw_timeline(sorted(moved, key=lambda one: (one.group, one.lane, one.start_us)), title, folder, name)


if __name__ == "__main__":
    main()
