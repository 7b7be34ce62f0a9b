"""Pages of docs/: found from the index, complete, short cells, and what is made from code and results is current.

Links, anchors and widths are for `rumdl`, which `make style` runs (`[tool.rumdl]` of pyproject.toml).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from interpreter import Interpreter

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("contrib/*/*.md")),
    *(ROOT / "results" / name for name in ("README.md", "keys.md")),
    *sorted(ROOT.glob("results/notes/*.md")),
]
SHOWN_ON_THE_SITE = {DOCS / name for name in ("index.md", "changes.md", "lab/files.md", "reference/results.md")}
"""Pages that say only which file outside docs/ the site shows there."""
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
SOURCES = [
    path
    for folder in ("src", "contrib", "tests", "tools", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c", ".toml") and path != Path(__file__).resolve()
]
LINK = re.compile(r"\]\(([^)\s#]*)(#[\w-]+)?\)")
PAPER = r"(ConCCL|DMA collectives|[Oo]verlap|[Ff]used operators) paper"


def identifier(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_cells_of_tables_are_short(page: Path) -> None:
    cells = (cell for line in text_of(page).splitlines() if line.startswith("|") for cell in line.split(" | "))
    most = 300 if DOCS / "reference" in page.parents else 200  # signatures are as long as they are
    assert [cell for cell in cells if len(cell) > most] == []


def test_pages_are_found_from_the_index_and_on_the_site() -> None:
    index, site = DOCS / "README.md", DOCS / "index.md"
    linked = {(DOCS / target).resolve() for target, _ in LINK.findall(text_of(index)) if target}
    in_menu = {DOCS / f"{name}.md" for name in re.findall(r"^[\w/.-]+$", text_of(site), re.MULTILINE)}
    pages = {page for page in DOCS.rglob("*.md") if page not in DECISIONS and page.parent.name != "api"}
    assert pages - linked - {index, *SHOWN_ON_THE_SITE} == set()
    assert pages - in_menu - {site} == set()


def test_the_interface_has_every_name_that_is_exported() -> None:
    page = text_of(DOCS / "reference" / "api.md")
    linked = {target for target, _ in LINK.findall(page)}
    assert linked == {f"api/{path.name}" for path in (DOCS / "reference" / "api").glob("*.md")}
    lines = re.findall(r"^- `([\w.]+)`: ((?:.|\n  )*)", page, re.MULTILINE)
    for package in ("sidelane", "sidelane.ops", "sidelane.ops.scale_out"):
        text = text_of(ROOT / "src" / Path(*package.split(".")) / "__init__.py")
        exported = set(re.findall(r'"(\w+)"', re.search(r"^__all__ = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)[1]))
        listed = {name for module, names in lines if module == package for name in re.findall(r"`(\w+)`", names)}
        assert exported - listed == set(), package


def test_every_decision_has_a_page_and_a_line_in_the_index() -> None:
    index = text_of(DOCS / "decisions" / "README.md")
    for number, page in enumerate(DECISIONS, 1):
        heading = re.match(r"# (\d+)\. (.*)\n", text_of(page))
        assert heading and int(heading[1]) == number == int(page.name[:2]), page
        assert f"| {number} | [{heading[2]}]({page.name}) |" in index, page
    assert len(re.findall(r"^\| \d+ \|", index, re.MULTILINE)) == len(DECISIONS)


@pytest.mark.parametrize("folder", ["src", "contrib", "tests", "tools", "examples", "docs"])
def test_references_in_comments_lead_somewhere(folder: str) -> None:
    wrong = []
    for path in [*SOURCES, *PAGES]:
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        text = text_of(path)
        wrong += [f"{path}: {name}" for name in re.findall(r"\bdocs/[\w/-]+\.md", text) if not (ROOT / name).exists()]
        numbers = re.findall(r"\bdecisions? (\d+)\b", text)
        wrong += [f"{path}: decision {one}" for one in numbers if not 0 < int(one) <= len(DECISIONS)]
        wrong += [
            f"{path}: {one}"
            for one in re.findall(r"[Pp]apers?[ _]00\d|(?<![\w-])peers(?:-2026)?\.md|\.\./shared", text)
        ]
    assert wrong == []


def test_papers_has_every_section_that_is_cited() -> None:
    sections = re.split(r"^## ", text_of(DOCS / "papers.md"), flags=re.MULTILINE)
    listed = {part.split(" paper\n")[0].lower(): part for part in sections if " paper\n" in part}
    cited = {
        (paper.lower(), section)
        for path in SOURCES
        for paper, section in re.findall(
            PAPER + r",\s+(?:sections? )?([IVX]+(?:-[A-H]\d*)?|\d+(?:\.\d+)*)\b", text_of(path)
        )
    }
    assert len(cited) > 20
    assert {(paper, one) for paper, one in cited if not re.search(rf"\b{re.escape(one)}\b", listed[paper])} == set()


@pytest.mark.parametrize("module", ["measured", "source"])
def test_examples_in_docstrings_of_the_tools_are_right(module: str) -> None:
    command = [sys.executable, "-m", "doctest", str(ROOT / "tools" / "docs" / f"{module}.py")]
    assert ">>> " in text_of(Path(command[-1]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_made_is_up_to_date(interpreter: Interpreter, tmp_path: Path) -> None:
    tools = ROOT / "tools"
    code = f"import runpy, sys; sys.path.insert(0, {str(tools)!r}); runpy.run_module('make_docs', None, '__main__')"
    interpreter.start(code, tmp_path, ("--check",))
    codes, said, errors = interpreter.wait()
    assert codes == [0], (said, errors)
