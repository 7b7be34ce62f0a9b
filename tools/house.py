"""Count lines, files, complexity, names and docstrings of the code. ``make size`` writes docs/internals/size.md.

``tests/test_house.py`` holds the counts that may only fall.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY, LABORATORY, TESTS = ROOT / "src" / "sidelane", ROOT / "src" / "sidelane_lab", ROOT / "tests"
PAGE = ROOT / "docs" / "internals" / "size.md"
REASONS = "## What stands against the goals"
BANNED = ("Of", "As", "What", "Whose", "Who", "Whether", "Likewise")
"""First words of a docstring that is no sentence."""

BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case, ast.comprehension)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def files(folder: Path) -> list[Path]:
    """Python and C files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c"))


def lines(folder: Path) -> int:
    """Lines of Python and C below a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files(folder))


@functools.cache
def trees(folder: Path) -> tuple[tuple[Path, ast.Module], ...]:
    """Every Python file below a folder, parsed once."""
    return tuple((path, ast.parse(path.read_text(encoding="utf-8"))) for path in files(folder) if path.suffix == ".py")


def complexity(function: ast.AST) -> int:
    """Return the cyclomatic complexity of a function: its decisions and one; functions inside count apart."""
    found, waiting = 1, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        found += isinstance(node, BRANCHES) + (len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0)
        if isinstance(node, ast.comprehension):
            found += len(node.ifs)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def functions(folder: Path) -> list[tuple[int, str]]:
    """Complexity and place of every function below a folder, the most complex first."""
    found = [
        (complexity(node), f"{path.relative_to(ROOT).as_posix()}: {node.name}")
        for path, tree in trees(folder)
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]
    return sorted(found, reverse=True)


def ambiguous_classes(*folders: Path) -> dict[str, list[str]]:
    """Names that several classes at the top of modules have, with these modules."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for path, tree in itertools.chain.from_iterable(map(trees, folders)):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(ROOT / "src").as_posix())
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, and texts that stand behind an assignment."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in itertools.pairwise([None, *body]):
            text = statement.value if isinstance(statement, ast.Expr) else None
            first = before is None and isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            documents = first or isinstance(before, ast.Assign | ast.AnnAssign)
            if documents and isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.value


def banned_docstrings(folder: Path) -> list[tuple[str, str]]:
    """Place and first line of every docstring that begins with a word of ``BANNED``."""
    found = []
    for path, tree in trees(folder):
        for text in docstrings(tree):
            line = text.strip().partition("\n")[0]
            if line.split(" ")[0].rstrip(",:") in BANNED:
                found.append((path.relative_to(ROOT).as_posix(), line))
    return found


def head() -> str:
    """Return the begin of the page, which no count changes."""
    return "\n".join(
        (
            "# Size of the code",
            "",
            "`make size` writes the table below with `tools/house.py`. *Then* is 26 November 2026, before the",
            "laboratory became a package of its own",
            "([decision 30](../decisions/30-the-laboratory-is-a-package-beside-the-library.md)).",
            "`tests/test_house.py` fails if complexity, names or docstrings get worse.",
            "",
            "| | then | now | goal |",
        )
    )


def page() -> str:
    """Return the page."""
    worst, place = functions(LIBRARY)[0]
    rows = (
        ("lines of Python and C in `src/sidelane`", lines(LIBRARY), "90,003 with the laboratory", "42,000 at most"),
        ("files there", len(files(LIBRARY)), "641 with the laboratory", "240 at most"),
        ("lines in `src/sidelane_lab`", lines(LABORATORY), "-", "16,000 at most"),
        ("lines of tests", lines(TESTS), "61,900", "46,000 at most"),
        (f"worst cyclomatic complexity in `src/sidelane` (`{place.rpartition(' ')[2]}`)", worst, "73", "25 at most"),
        ("class names with several meanings", len(ambiguous_classes(LIBRARY, LABORATORY)), "85", "0"),
        (
            "docstrings that begin with a banned word",
            len(banned_docstrings(LIBRARY)) + len(banned_docstrings(LABORATORY)),
            "1,065",
            "0",
        ),
    )
    return "\n".join(
        (
            head(),
            "|---|---|---|---|",
            *(f"| {what} | {then} | {now:,} | {goal} |" for what, now, then, goal in rows),
            "",
        )
    )


def main() -> None:
    """Write the counts of the page; what is said about them below is written by hand, and stays."""
    _, heading, said = PAGE.read_text(encoding="utf-8").partition(REASONS)
    PAGE.write_text(page() + "\n" + heading + said, encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
