"""Draw the pictures of docs/images/ that show result files.

python tools/draw_images.py               # all of them
python tools/draw_images.py c3-h200x4     # one
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import tempfile
from pathlib import Path

import matplotlib as mpl

from sidelane_lab.harness import study as result_files
from sidelane_lab.harness.drawing import RC
from sidelane_lab.harness.report import draw

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {
    "all-gather-h200x4": ("h200x4/collectives.json", "all_gather-bfloat16-out-of-place-graph"),
    "all-reduce-h200x2": ("h200x2/collectives.json", "all_reduce-bfloat16-in-place-graph"),
    "c3-h200x4": ("h200x4/c3.json", "c3-all_to_all"),
    "c3-engines-h200x2": ("h200x2/c3.json", "c3-engines"),
    "e2e-decode-h200x2": ("h200x2/e2e.json", "e2e-decode-graph"),
    "e2e-experts-h200x2": ("h200x2/e2e.json", "e2e-experts-graph"),
    "e2e-recommendation-h200x2": ("h200x2/e2e.json", "e2e-recommendation-graph"),
    "fsdp-h200x2": ("h200x2/fsdp.json", "fsdp-exposed"),
    "power-h200x4": ("h200x4/power.json", "power-all_gather-in-place-graph"),
}
"""Result file and name of the picture in its report, by the name of the image."""

FRONT_PAIRS = (("cb1", 896 << 20), ("mb1", 896 << 20))
"""GEMMs and bytes in the picture of the README, which has room for two: the shortest GEMM and the longest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(IMAGES)}")
    asked = parser.parse_args()
    for name in asked.names or IMAGES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if name not in IMAGES:
                parser.error(f"no picture is called {name}")
            picture = draw_results(name, folder)
            shutil.copy(folder / f"{picture}.png", ROOT / "docs" / "images" / f"{name}.png")
        print(f"docs/images/{name}.png")


def draw_results(name: str, folder: Path) -> str:
    """Draw the pictures of a result file, and return the name of the one that is wanted."""
    file, picture = IMAGES[name]
    results = result_files.read(ROOT / "results" / file)
    if name == "c3-h200x4":  # the README's
        rows = tuple(row for row in results.rows if (row.gemm, row.bytes) in FRONT_PAIRS)  # type: ignore[attr-defined]
        results = dataclasses.replace(results, rows=rows)
    with mpl.rc_context(RC):
        draw(results, folder)
    return picture


if __name__ == "__main__":
    main()
