"""Code blocks of README, guide and contrib, as programs that a reader would paste: nothing is added to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs" / "guide").glob("*.md")), *sorted(ROOT.glob("contrib/*/*.md"))]


def programs() -> Iterator[tuple[str, list[str]]]:
    """Yield name and blocks of each program.

    A block that both makes and destroys a process group is a program. All others of a page are another one: the first
    of them begins it, and each of the others runs behind the first.
    """
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        whole = [block for block in blocks if "init_process_group" in block and "destroy_process_group" in block]
        yield from ((f"{page.stem} {number}", [block]) for number, block in enumerate(whole))
        if parts := [block for block in blocks if block not in whole]:
            yield f"{page.stem} parts", parts
