"""Count statements, lines, complexity, names and docstrings of the code: ``make size``.

``house.toml`` holds the statements that each part may have, and ``tests/test_house.py`` fails when one has more. A
change that needs room adds a line there: how many statements, for which capability of which issue, what it replaces.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY, LABORATORY, TESTS = ROOT / "src" / "sidelane", ROOT / "src" / "sidelane_lab", ROOT / "tests"
LEDGER = ROOT / "tools" / "house.toml"
FIELDS = {"room", "statements", "issue", "capability", "replaced"}
BANNED = ("Of", "As", "What", "Whose", "Who", "Whether", "Likewise")
"""First words of a docstring that is no sentence."""

ONE_MEANING = frozenset(
    (
        *("all_gather", "all_to_all", "broadcast", "gather", "scatter", "reduce_scatter", "all_reduce", "reshard"),
        *("gemm_all_to_all", "all_to_all_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"),
        *("gemv_all_reduce", "all_to_all_rows", "embedding_all_to_all", "embedding_all_to_all_backward"),
        *("all_reduce_rms_norm", "inspect", "software_versions", "reported_versions", "device_count"),
        *("arrange", "arrange_broadcast", "arrange_push"),
    )
)
"""Names that several modules may define: collectives, operators, vendors' inventories, arrangements of kernels."""

BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case, ast.comprehension)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


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


def ambiguous_names(*folders: Path, kinds: tuple[type[ast.stmt], ...]) -> dict[str, list[str]]:
    """Names that several modules define at their top, with these modules.

    Names of collectives and operators, and those of modules that stand for each other, have one meaning.

    Args:
        kinds: statements that count: classes, functions, or assignments of names that look like types.
    """
    found: dict[str, set[str]] = collections.defaultdict(set)
    for path, tree in itertools.chain.from_iterable(map(trees, folders)):
        for node in filter(lambda node: isinstance(node, kinds), tree.body):
            name = getattr(node, "name", "")
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                alias = node.targets[0].id
                name = alias if alias[0].isupper() and not alias.isupper() else ""  # others are no types
            if name and not name.startswith("_") and name not in ONE_MEANING:
                found[name].add(path.relative_to(ROOT).as_posix())
    return {name: sorted(places) for name, places in sorted(found.items()) if len(places) > 1}


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


def statements(folder: Path) -> int:
    """Count the statements of Python below a folder, without docstrings, and those of C, which end in a semicolon.

    Neither comments nor the width of lines change the count, so that nobody saves room by writing less clearly.
    """
    python = sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for _, tree in trees(folder)
        for node in ast.walk(tree)
    )
    return python + sum(
        _COMMENTS.sub("", path.read_text(encoding="utf-8")).count(";") for path in files(folder) if path.suffix == ".c"
    )


@dataclasses.dataclass(frozen=True)
class Room:
    """A part of the house.

    Attributes:
        name: its name in ``house.toml``.
        folder: folder of its files.
        base: statements that it had when its count was written, which only falls.
        grown: statements that the lines of ``house.toml`` allow beyond these.
        goal: lines that it shall have.
    """

    name: str
    folder: Path
    base: int
    grown: int
    goal: int

    @property
    def most(self) -> int:
        """Statements that the room may have."""
        return self.base + self.grown


def rooms() -> list[Room]:
    """Read ``house.toml``.

    Raises:
        ValueError: a line about growth does not say what has grown, for whom, and what was taken out for it.
    """
    table = tomllib.loads(LEDGER.read_text(encoding="utf-8"))
    grown: collections.Counter[str] = collections.Counter()
    for line in table.get("grown", []):
        if set(line) != FIELDS or not all(line.values()) or line["room"] not in table["rooms"]:
            raise ValueError(f"house.toml: a line about growth (value={line}, allowed=values for {sorted(FIELDS)})")
        grown[line["room"]] += line["statements"]
    return [
        Room(name, ROOT / room["folder"], room["statements"], grown[name], room["goal_lines"])
        for name, room in table["rooms"].items()
    ]


def main() -> None:
    """Print the counts, and lower those in ``house.toml`` that have fallen."""
    text = LEDGER.read_text(encoding="utf-8")
    print(f"{'room':<12}{'statements':>12}{'allowed':>10}{'lines':>9}{'goal':>9}{'files':>7}")
    for room in rooms():
        now = statements(room.folder)
        if now < room.most:
            base = f"statements = {now - room.grown}  # {room.name}"
            text = text.replace(f"statements = {room.base}  # {room.name}", base)
        counts = (
            f"{now:>12,}{min(now, room.most):>10,}{lines(room.folder):>9,}{room.goal:>9,}{len(files(room.folder)):>7}"
        )
        print(f"{room.name:<12}{counts}")
    LEDGER.write_text(text, encoding="utf-8")
    most, place = functions(LIBRARY)[0]
    print(f"most complex function of the library: {most}, {place}")


if __name__ == "__main__":
    main()
