"""Write the pages and tables of docs/ and results/ that are made, from the code and from the files in results/.

    python tools/make_docs.py            # write them
    python tools/make_docs.py --check    # write nothing; exit status 1, and their names, if any is out of date

Reference pages are whole files; tables stand between two comments of a page that is written by hand (``docs.tables``).
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import versions
from docs import interface, reference, tables

ROOT = Path(__file__).resolve().parent.parent
PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/api.md": interface.index,
    **{f"docs/reference/api/{name}.md": functools.partial(interface.task_page, name) for name in interface.TASKS},
    "docs/reference/commands.md": reference.commands,
    "docs/reference/settings.md": reference.settings,
    "docs/reference/versions.md": versions.page,
    "results/README.md": reference.files,
    "results/keys.md": reference.result_files,
}
MARK, END = "<!-- table: ", "<!-- end of table -->"
TABLE = re.compile(r"^<!-- table: ([\w-]+) -->\n(?:\|.*\n)*<!-- end of table -->$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and say what is out of date")
    check = parser.parse_args().check
    made = {ROOT / name: page() for name, page in PAGES.items()}
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "results" / "notes").glob("*.md")]
    for path in (ROOT / "README.md", *sorted(pages)):
        text = path.read_text(encoding="utf-8")
        if path not in made and MARK in text:
            made[path], found = TABLE.subn(
                lambda found: "\n".join([f"{MARK}{found[1]} -->", *tables.lines_of(found[1]), END]), text
            )
            if found != text.count(MARK):
                parser.error(f"{path.relative_to(ROOT)}: a table is not between two comments, or not alone there")
    if unused := set(tables.TABLES) - {name for text in made.values() for name in TABLE.findall(text)}:
        parser.error(f"no page has these tables: {', '.join(sorted(unused))}")
    changed = 0
    for path, text in made.items():
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if there == text:
            continue
        changed += 1
        name = str(path.relative_to(ROOT))
        if check:
            print(
                "".join(
                    difflib.unified_diff(there.splitlines(True), text.splitlines(True), name, "as it would be", n=0)
                )
            )
        else:
            path.write_text(text, encoding="utf-8")
            print(f"[sidelane] {name}")
    if check and changed:
        print(f"{changed} pages are out of date: make docs-pages", file=sys.stderr)
    return int(check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
