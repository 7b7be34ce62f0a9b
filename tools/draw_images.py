"""Draw the pictures of docs/images/ that show result files, from the files in results/.

python tools/draw_images.py            # all of them
python tools/draw_images.py c3-h200x4  # one
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
    "front-h200x4": ("h200x4/c3.json", "c3-all_to_all"),
    "c3-engines-h200x2": ("h200x2/c3.json", "c3-engines"),
    "c3-units-h200x2": ("h200x2/isolated.json", "isolated-units"),
    "e2e-decode-h200x2": ("h200x2/e2e.json", "e2e-decode-graph"),
    "e2e-experts-h200x2": ("h200x2/e2e.json", "e2e-experts-graph"),
    "e2e-recommendation-h200x2": ("h200x2/e2e.json", "e2e-recommendation-graph"),
    "fsdp-h200x2": ("h200x2/fsdp.json", "fsdp-exposed"),
    "power-h200x4": ("h200x4/power.json", "power-all_gather-in-place-graph"),
}
"""Result file and name of the picture in its report, by the name of the image."""

FRONT_PAIRS = (("cb1", 896 << 20), ("mb1", 896 << 20))
"""GEMMs and bytes in the picture of the README, which is narrow: Sidelane's best and its worst percent of ideal."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *IMAGES], metavar="NAME", help=f"of {', '.join(IMAGES)}")
    names = parser.parse_args().names or list(IMAGES)
    for name in names:
        file, picture = IMAGES[name]
        with tempfile.TemporaryDirectory() as folder, mpl.rc_context(RC):
            results = result_files.read(ROOT / "results" / file)
            if name.startswith("front"):
                rows = tuple(row for row in results.rows if (row.gemm, row.bytes) in FRONT_PAIRS)
                results = dataclasses.replace(results, rows=rows)
            drawn = [one.name for one in draw(results, Path(folder))]
            if picture not in drawn:
                parser.error(f"{file} has no picture {picture} (it has {', '.join(drawn)})")
            shutil.copy(Path(folder) / f"{picture}.png", ROOT / "docs" / "images" / f"{name}.png")
            print(f"docs/images/{name}.png")


if __name__ == "__main__":
    main()
