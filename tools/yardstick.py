"""Judge whether a change loses what the tests can see: mutants, historical defects, branch coverage, device cases.

``make yardstick`` applies each of 400 fixed mutants of the source in a copy of the tree, and runs the cheapest test
that killed it at the baseline; it undoes the source half of 60 historical repairs, whose tests must fail; it compares
the list of device cases. A mutant is found again by its function, the text of its line and a number among equal lines,
so that it survives the move of code to another file. ``coverage`` measures branch coverage by room, ranks included.

Every command runs ``--jobs`` tests side by side, each in its own copy of the tree, writes what it has found into
``--out`` after each test, ends after ``--seconds``, and goes on from that file in the next call.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import difflib
import functools
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = Path("tests") / "yardstick"
BASELINE = "e6de60214"
EACH = 10
"""Mutants of each module."""
MODULES = {
    "src/sidelane/program": (
        "collective",
        "builders/moving",
        "builders/reducing",
        "builders/batch",
        "transform/triggers",
    ),
    "src/sidelane/program/verify": ("structure", "races", "flags", "provenance", "counters", "layout", "order"),
    "src/sidelane/execute": ("cpu/commands", "cpu/executor", "cuda/plan", "cuda/bind", "cuda/watch", "cuda/loaded"),
    "src/sidelane/collectives": ("arguments", "call_cache", "heap", "plan", "prepare", "uneven"),
    "src/sidelane/session": ("communicator", "session", "bound_program"),
    "src/sidelane/memory": ("control", "exchange", "liveness"),
    "src/sidelane/ops": ("gemm", "embedding", "rms_norm", "experts"),
    "src/sidelane/integrations": ("process_group", "order"),
    "src/sidelane": ("choice/choose", "ranges"),
    "src/sidelane_lab": ("model/device", "sim/simulate"),
}
COMPARISONS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Div: ("/", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BATCHES = ((6, 6.0), (20, 25.0))
"""Tests of each file that are tried on a mutant, and their seconds together: a quick batch, then a longer one."""
OTHERS = 6
"""Further tests that ran the line of a mutant, for the time after its killer has gone."""
START_S = 45.0
"""Seconds that Python, torch and the server of ranks may take to start on a busy machine."""
LOSS = 0.3
"""Points of a room's coverage that a change may take."""
MENDED = re.compile(
    r"\b(mend|fix|fault|wrong|fail|hung|hang|crash|leak|lost|refuse|no longer|wait|overw\w+|in vain|missing)", re.I
)

Edit = tuple[int, int, int, str, str]
"""Line, first and last byte in it, new text, kind of mutation."""


@dataclasses.dataclass
class Mutant:
    """A change of one line of the source.

    Attributes:
        file, function, line, nth: where it was at the baseline: the line's text, and its number among equal ones.
        mutated, kind: the text that takes its place, and how it came about.
        killer: test that failed on it; empty if none did, ``None`` before a hunt.
        seconds: duration of that test in a process of its own.
        others: further tests that run the line.
    """

    file: str
    function: str
    line: str
    nth: int
    mutated: str
    kind: str
    killer: str | None = None
    seconds: float = 0.0
    others: list[str] = dataclasses.field(default_factory=list)


# Seeds: mutants of a source.


def spans(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the qualified name and the node of every function."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (*FUNCTIONS, ast.ClassDef))
            name = f"{prefix}.{child.name}".lstrip(".") if named else prefix  # type: ignore[attr-defined]
            if isinstance(child, FUNCTIONS):
                yield name, child
            waiting.append((name, child))


def own(function: Any) -> Iterator[ast.AST]:
    """Yield the nodes of a function that compute: neither functions inside, nor annotations, nor texts of errors."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)):
            continue
        hidden = {id(getattr(node, name, None)) for name in ("annotation", "msg")}
        waiting += [child for child in ast.iter_child_nodes(node) if id(child) not in hidden]


def edits(node: Any, source: Sequence[bytes]) -> Iterator[Edit]:
    """Yield the mutations of one node that stay within a line."""

    def between(left: Any, right: Any, old: str, new: str, kind: str) -> Iterator[Edit]:
        text = source[left.end_lineno - 1][left.end_col_offset : right.col_offset].decode()
        if left.end_lineno == right.lineno and old in text:
            yield left.end_lineno, left.end_col_offset, right.col_offset, text.replace(old, new, 1), kind

    def whole(part: Any, new: str, kind: str) -> Iterator[Edit]:
        if part.lineno == part.end_lineno:
            yield part.lineno, part.col_offset, part.end_col_offset, new, kind

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from between(left, right, *COMPARISONS[type(op)], "comparison")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            if not any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (left, right)):
                yield from between(left, right, *ARITHMETIC[type(op)], "arithmetic")
        case ast.BoolOp(op=op, values=values):
            words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            for left, right in itertools.pairwise(values):
                yield from between(left, right, *words, "and-or")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node.lineno, node.col_offset, operand.col_offset, "", "dropped not"
        case ast.Constant(value=bool(value)):
            yield from whole(node, str(not value), "constant")
        case ast.Constant(value=int(value)):
            yield from whole(node, str(value + 1), "constant")
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield from whole(node.func, "max" if name == "min" else "min", "min-max")
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if isinstance(test, ast.Name | ast.Call):
            text = source[test.lineno - 1][test.col_offset : test.end_col_offset].decode()
            yield from whole(test, f"not {text}", "negation")
        case ast.Return(value=value) if not isinstance(value, ast.Constant):
            yield from whole(node, "return None" if value else "pass", "removal")
        case ast.Raise():
            yield from whole(node, "pass", "removal")


def mutants(file: str, text: str, number: int) -> list[Mutant]:
    """Choose mutants of one module, spread over its functions and over the kinds of mutation."""
    source = text.encode().split(b"\n")
    found: list[tuple[int, Mutant]] = []
    for name, function in spans(ast.parse(text)):
        places = range(function.lineno, function.end_lineno + 1)
        lines = {at: source[at - 1].decode().strip() for at in places}
        for at, first, last, new, kind in sorted(edit for node in own(function) for edit in edits(node, source)):
            line = source[at - 1]
            changed = line[:first] + new.encode() + line[last:]
            with contextlib.suppress(SyntaxError, RecursionError):
                ast.parse(b"\n".join([*source[: at - 1], changed, *source[at:]]))
                nth = sum(lines[other] == lines[at] for other in places if other < at)
                found.append((at, Mutant(file, name, lines[at], nth, changed.decode().strip(), kind)))
    random.Random(file).shuffle(found)
    kept: list[Mutant] = []
    taken: set[int] = set()
    for most in (1, 2, 3, number):
        for at, mutant in found:
            alike = sum(other.kind == mutant.kind for other in kept), sum(m.function == mutant.function for m in kept)
            if len(kept) < number and at not in taken and alike[0] < most + 1 and alike[1] < most:
                kept.append(mutant)
                taken.add(at)
    return kept


class Sources:
    """All modules of a tree, to find mutants in, and tests by their names."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.lines: dict[str, list[str]] = {}
        self.functions: dict[str, list[tuple[str, int, int]]] = collections.defaultdict(list)
        self.tests: dict[str, list[str]] = collections.defaultdict(list)
        for path in sorted((tree / "src").rglob("*.py")):
            file, text = path.relative_to(tree).as_posix(), path.read_text(encoding="utf-8")
            self.lines[file] = text.split("\n")
            for name, node in spans(ast.parse(text)):
                self.functions[name].append((file, node.lineno, node.end_lineno))
        for path in sorted(path for folder in ("tests", "contrib") for path in (tree / folder).rglob("test_*.py")):
            for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                self.tests[name].append(path.relative_to(tree).as_posix())

    def place(self, mutant: Mutant) -> tuple[str, int] | None:
        """Return file and line number of a mutant's line: in a function of its name, or alone in the source."""
        for file, first, last in sorted(self.functions[mutant.function], key=lambda span: span[0] != mutant.file):
            equal = [at for at in range(first, last + 1) if self.lines[file][at - 1].strip() == mutant.line]
            if len(equal) > mutant.nth:
                return file, equal[mutant.nth]
        alone = [
            (f, at) for f, lines in self.lines.items() for at, x in enumerate(lines, 1) if x.strip() == mutant.line
        ]
        return alone[0] if len(alone) == 1 and len(mutant.line) > 24 else None

    def successors(self, test: str) -> list[str]:
        """Return the test itself where it still is, otherwise tests of its name in other files."""
        file, _, name = test.partition("::")
        if not name:  # a file that cannot be imported with the mutant
            return [test] if (self.tree / file).is_file() else []
        files = self.tests.get(name.partition("[")[0].rpartition("::")[2], [])  # a test may be in a class
        return [f"{each}::{name}" for each in ([file] if file in files else files)]


# Runs of tests: this module is the plugin of pytest in them.


def pytest_configure(config: Any) -> None:
    """Take the order of :meth:`Tree.run`."""
    if job := os.environ.get("YARDSTICK_JOB"):
        config.pluginmanager.register(Plugin(Path(job)))


class Plugin:
    """Selects tests, reports each one's end at once, and tells coverage which test runs, on ranks, too."""

    def __init__(self, job: Path) -> None:
        self.tests, self.contexts = json.loads(job.read_text())
        self.report = job.with_suffix(".report").open("a", buffering=1)

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        wanted = {name: number for number, name in enumerate(self.tests) if "::" in name}
        number = {item: wanted.get(item.nodeid, wanted.get(item.nodeid.partition("[")[0], -1)) for item in items}
        if wanted:
            config.hook.pytest_deselected(items=[item for item in items if number[item] < 0])
            items[:] = sorted((item for item in items if number[item] >= 0), key=number.__getitem__)

    def pytest_collection_finish(self) -> None:
        if self.contexts:
            crew = sys.modules["ranks"].Crew
            run = crew.run
            crew.run = lambda crew, function, *args, **options: run(
                crew, functools.partial(in_context, os.environ["PYTEST_CURRENT_TEST"], function), *args, **options
            )

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            print(json.dumps(["failed", report.nodeid, 0.0]), file=self.report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(json.dumps(["began", nodeid, 0.0]), file=self.report)
        if self.contexts:
            switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        print(json.dumps([report.outcome, report.nodeid, report.duration]), file=self.report)


def in_context(test: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a rank, and note which test has asked for it."""
    switch_context(test.rpartition(" ")[0])
    return function(*args)


def switch_context(test: str) -> None:
    current = importlib.import_module("coverage").Coverage.current()
    if current is not None:
        current.switch_context(test)


class TimeOverError(Exception):
    """The time of this call is over; nothing is known of the test that ran."""


@dataclasses.dataclass
class Run:
    """Outcome of a process of pytest.

    Attributes:
        seconds: seconds by test that ended without a failure and was not skipped.
        failed: tests that failed, hung, or in which the process ended.
        hung: True if it had to be killed.
        wall: its seconds.
    """

    seconds: dict[str, float]
    failed: list[str]
    hung: bool
    wall: float


class Tree:
    """A copy of the source and its tests for one process of pytest at a time."""

    def __init__(self, master: Path, folder: Path, until: float) -> None:
        self.tree, self.folder, self.until = folder / "tree", folder, until
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(master), str(self.tree)], check=True)
        (folder / "plugin").mkdir()
        shutil.copy(__file__, folder / "plugin")

    def run(self, tests: Sequence[str], timeout_s: float, *options: str, measure: Path | None = None) -> Run:
        """Run tests, in their order; names of files stand for all of their tests."""
        job, temporary = self.folder / "job", self.folder / "t"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        job.write_text(json.dumps([tests, measure is not None]))
        report = job.with_suffix(".report")
        report.write_text("")
        tag = uuid.uuid4().hex
        kept = {name: value for name, value in os.environ.items() if not re.match("SIDELANE|TRITON|COV|PYTEST", name)}
        folders = [self.tree / "src", self.tree / "tests", self.tree / "tests" / "common", self.folder / "plugin"]
        environment = kept | {
            "PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [kept.get("PYTHONPATH")])]),
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"), "1"),
            "CUDA_VISIBLE_DEVICES": "",
            "HOME": str(self.folder),
            "TMPDIR": str(temporary),
            "YARDSTICK_JOB": str(job),
            "YARDSTICK_TAG": tag,
        }
        under = ["-m", "coverage", "run", "--rcfile", str(measure), "-m"] if measure else ["-m"]
        plugins = ["-p", "yardstick", "-p", "no:xdist", "-p", "no:cacheprovider"]
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        command = [sys.executable, *under, "pytest", "-q", *plugins, "-m", "not long", *options, *files]
        began, hung = time.monotonic(), False
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=self.tree, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                process.wait(max(1.0, min(timeout_s, self.until - began)))
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                end(tag.encode())
                process.wait()
        if time.monotonic() >= self.until and hung:
            raise TimeOverError
        return self._read(report, tests, process.returncode, hung, time.monotonic() - began)

    def _read(self, report: Path, tests: Sequence[str], code: int, hung: bool, wall: float) -> Run:
        seconds: dict[str, float] = collections.defaultdict(float)
        not_passed: dict[str, str] = {}
        last = tests[0]
        for line in report.read_text().splitlines():
            outcome, name, duration = json.loads(line)
            if outcome == "began":
                last = name
            elif outcome == "passed":
                seconds[name] += duration
            else:
                not_passed.setdefault(name, outcome)
        failed = [name for name, outcome in not_passed.items() if outcome == "failed"]
        if not failed and (hung or code not in (0, 1, 5)):
            failed = [last]
        return Run({name: s for name, s in seconds.items() if name not in {*not_passed, *failed}}, failed, hung, wall)

    def mutated(self, mutant: Mutant, place: tuple[str, int]) -> contextlib.AbstractContextManager[None]:
        """Apply a mutant."""
        lines = (self.tree / place[0]).read_text(encoding="utf-8").split("\n")
        line = lines[place[1] - 1]
        lines[place[1] - 1] = line[: len(line) - len(line.lstrip())] + mutant.mutated
        return self.changed({place[0]: "\n".join(lines)})

    @contextlib.contextmanager
    def changed(self, files: Mapping[str, str]) -> Iterator[None]:
        """Replace files; they come back with their times, so that compiled code stays valid."""
        paths = {self.tree / name: text for name, text in files.items()}
        before = [(path, path.read_text(encoding="utf-8"), path.stat()) for path in paths]
        for path, text in paths.items():
            path.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            for path, text, times in before:
                path.write_text(text, encoding="utf-8")
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def end(tag: bytes) -> None:
    """Kill all processes with this text in their environment: ranks and servers of a run, wherever they hang."""
    for _ in range(2):
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if tag in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)


@contextlib.contextmanager
def trees(commit: str, jobs: int, until: float) -> Iterator[list[Tree]]:
    """Make copies of a commit, with compiled code and the entry points of an installed package."""
    from make_venv import describe  # this module is a plugin in the copies, alone

    with tempfile.TemporaryDirectory(prefix="y-") as folder:
        master = Path(folder) / "m"
        master.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", str(master)], input=archive, check=True)
        describe(master / "src", master)
        compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run([sys.executable, "-m", "compileall", "-q", "src", "tests/common"], cwd=master, env=compiled)
        with ThreadPoolExecutor(jobs) as pool:
            copies = list(pool.map(lambda n: Tree(master, Path(folder) / str(n), until), range(jobs)))
        yield copies


def side_by_side(copies: Sequence[Tree], tasks: Iterable[Any], work: Callable[[Tree, Any], None]) -> bool:
    """Do all tasks, one at a time in each copy; returns False if the time was over before."""
    waiting = collections.deque(tasks)

    def serve(tree: Tree) -> None:
        with contextlib.suppress(IndexError):
            while time.monotonic() < tree.until:
                task = waiting.popleft()
                try:
                    work(tree, task)
                except TimeOverError:
                    waiting.append(task)

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(serve, copies))
    return not waiting


class Notes:
    """A JSON file that is written whole after each finding."""

    def __init__(self, path: Path, content: Any) -> None:
        self.path, self.lock = path, threading.Lock()
        self.content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else content

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(self.content, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
        whole.replace(self.path)


def load() -> list[Mutant]:
    """Read the fixed mutants."""
    return [Mutant(**each) for each in json.loads((ROOT / DATA / "mutants.json").read_text(encoding="utf-8"))]


def write(name: str, content: Any) -> None:
    """Write a file of the yardsticks, to be committed."""
    text = content if isinstance(content, str) else json.dumps(content, indent=0, ensure_ascii=False) + "\n"
    (ROOT / DATA / name).write_text(text, encoding="utf-8")


# Commands.


def seed(options: argparse.Namespace) -> int:
    """Choose the mutants, from the source of the baseline."""
    found = []
    for file in (f"{folder}/{name}.py" for folder, names in MODULES.items() for name in names):
        found += mutants(file, git("show", f"{options.commit}:{file}"), EACH)
    write("mutants.json", [dataclasses.asdict(mutant) for mutant in found])
    print(f"{len(found)} mutants: {dict(collections.Counter(mutant.kind for mutant in found))}")
    return 0


def coverage(options: argparse.Namespace) -> int:
    """Measure lines and branches by room, how long each test takes, and which tests run the lines of mutants."""
    if importlib.import_module("coverage").version_info < (7, 10):
        raise SystemExit("coverage.py is too old to follow ranks (allowed=7.10 or newer)")
    notes = Notes(options.out, {"files": {}, "arcs": {}})
    with trees(options.commit, options.jobs, options.until) as copies:
        sources = Sources(copies[0].tree)
        lines: dict[str, dict[str, list[int]]] = collections.defaultdict(dict)
        for number, mutant in enumerate(load()):
            if place := sources.place(mutant):
                lines[place[0]].setdefault(str(place[1]), []).append(number)
        for copy in copies:
            (copy.folder / "lines.json").write_text(json.dumps(lines))
            (copy.folder / "plugin" / "sitecustomize.py").write_text(STARTUP)
            roots = [str(copy.tree / "src" / name) for name in ("sidelane", "sidelane_lab")]
            (copy.folder / "rc").write_text(RC.format(data=copy.folder / "data" / "c", roots=",".join(roots)))
        tests = sorted((copies[0].tree / "tests").rglob("test_*.py"), key=lambda path: -path.stat().st_size)
        names = [path.relative_to(copies[0].tree).as_posix() for path in tests]
        left = [name for name in names if name not in notes.content["files"] and not re.match(OTHER_TESTS, name)]
        left = [name for name in left if re.search(options.tests, name)]

        def work(tree: Tree, name: str) -> None:
            shutil.rmtree(tree.folder / "data", ignore_errors=True)
            (tree.folder / "data").mkdir()
            run = tree.run([name], 500.0, "--timeout=200", measure=tree.folder / "rc")
            code = f"import yardstick; yardstick.digest({str(tree.folder)!r})"
            if subprocess.run([sys.executable, "-c", code], cwd=tree.folder / "plugin").returncode:
                print(f"{name}: NOT MEASURED", flush=True)
                return
            found = json.loads((tree.folder / "digest.json").read_text())
            with notes.lock:
                for file, arcs in found["arcs"].items():
                    known = notes.content["arcs"].get(file, [])
                    notes.content["arcs"][file] = sorted({*map(tuple, known), *map(tuple, arcs)})
                seconds = {test: round(s, 2) for test, s in run.seconds.items()}
                numbers = {test: number for number, test in enumerate(seconds)}
                ran = {
                    m: sorted({numbers.get(test, -1) for test in tests}) for m, tests in found["lines"].items() if tests
                }
                notes.content["files"][name] = {"seconds": seconds, "failed": run.failed, "mutants": ran}
                notes.write()
            print(f"{name}: {len(seconds)} tests, {run.wall:.0f} s; not passed: {run.failed}", flush=True)

        if not side_by_side(copies, left, work):
            print("not finished: call again")
            return 2
        rooms = notes.content["rooms"] = by_room(copies[0].tree, notes.content["arcs"])
        notes.write()
    return judge_rooms(rooms, options.freeze)


RC = """[run]
branch = True
parallel = True
data_file = {data}
source = {roots}
patch = subprocess, fork, _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured, already-imported, couldnt-parse
"""
STARTUP = """import os
if "COVERAGE_PROCESS_CONFIG" in os.environ:
    import coverage
    coverage.process_startup()
"""
"""Start of every process of Python in a run: coverage has a file for it, which an environment may lack."""
OTHER_TESTS = "tests/(device|restart|leaks|clients)/"


def digest(folder: str) -> None:
    """Sum up the data of one run of pytest: jumps between lines, and tests that ran the lines of mutants."""
    place = Path(folder)
    measured = importlib.import_module("coverage").Coverage(config_file=str(place / "rc"), messages=False)
    measured.combine([str(place / "data")], strict=False)
    data, lines = measured.get_data(), json.loads((place / "lines.json").read_text())
    found: dict[str, Any] = {"arcs": {}, "lines": collections.defaultdict(list)}
    for path in data.measured_files():
        file = Path(path).relative_to(place / "tree").as_posix()
        found["arcs"][file] = data.arcs(path)
        contexts = data.contexts_by_lineno(path) if file in lines else {}
        for line, numbers in lines.get(file, {}).items():
            for number in numbers:
                found["lines"][number] += contexts.get(int(line), [])
    (place / "digest.json").write_text(json.dumps(found))


def by_room(tree: Path, arcs: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, list[float]]:
    """Return percent of lines and branches that ran, and their number, for each folder of the library."""
    module = importlib.import_module("coverage")
    file, report = str(tree.parent / "all"), tree.parent / "all.json"
    data = module.CoverageData(file)
    data.add_arcs(
        {
            str(tree / name): [tuple(a) for a in found]
            for name, found in arcs.items()
            if name.startswith("src/sidelane/")
        }
    )
    data.touch_files([str(path) for path in (tree / "src" / "sidelane").rglob("*.py")])
    data.write()
    measured = module.Coverage(
        data_file=file, config_file=False, branch=True, source=[str(tree / "src" / "sidelane")], messages=False
    )
    measured.load()
    measured.json_report(outfile=str(report))
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0, 0])
    for name, found in json.loads(report.read_text())["files"].items():
        inside = Path(name).parts[Path(name).parts.index("sidelane") + 1 :]
        keys = ("covered_lines", "num_statements", "covered_branches", "num_branches")
        for room in (inside[0] if len(inside) > 1 else "sidelane", "all"):
            counts[room] = [old + found["summary"][key] for old, key in zip(counts[room], keys, strict=True)]
    return {
        room: [round(100 * a / max(b, 1), 2), round(100 * c / max(d, 1), 2), b, d]
        for room, (a, b, c, d) in sorted(counts.items())
    }


def judge_rooms(rooms: Mapping[str, Sequence[float]], freeze: bool) -> int:
    """Print coverage by room beside that of the baseline; 1 if a room has lost more than ``LOSS`` points."""
    path = ROOT / DATA / "coverage.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    lost = 0
    for room, (lines, branches, *counts) in rooms.items():
        old = before.get(room, [0.0, 0.0])
        fell = lines < old[0] - LOSS or branches < old[1] - LOSS
        lost += fell
        shown = f"{lines:6.2f} ({old[0]:6.2f})  branches {branches:6.2f} ({old[1]:6.2f})"
        print(f"{room:14} lines {shown}  of {counts[0]}, {counts[1]}{'  LESS' if fell else ''}")
    if freeze:
        write("coverage.json", rooms)
    return int(bool(lost) and not freeze)


def candidates(number: int, mutant: Mutant, files: Mapping[str, Any]) -> list[list[tuple[float, str]]]:
    """Return, for each test file that runs a mutant's line, its tests that do, the quickest first.

    Files of the mutant's own folder or name come first. A line that ranks run which nobody gave a name is said to be
    run by all tests of the file.
    """
    words = set(re.split(r"[/_.]", mutant.file)) - {"src", "sidelane", "lab", "py"}
    found = []
    for name, file in files.items():
        ran, tests = file["mutants"].get(str(number), []), list(file["seconds"])
        kept = tests if -1 in ran and len(ran) == 1 else [tests[each] for each in ran if each >= 0]
        if kept:
            alike = len(words & set(re.split(r"[/_.]", name)))
            found.append((-alike, sorted((file["seconds"][test], test) for test in kept)))
    return [tests for _, tests in sorted(found, key=lambda each: (each[0], each[1][0]))]


def batches(files: Sequence[Sequence[tuple[float, str]]]) -> Iterator[list[tuple[float, str]]]:
    """Yield tests to be tried together, the quickest first: some of each file, then more of each.

    >>> list(batches([[(0.1, "a::1"), (9.0, "a::2")], [(0.2, "b::1")]]))
    [[(0.1, 'a::1'), (0.2, 'b::1')], [(9.0, 'a::2')]]
    """
    tried: set[str] = set()
    for number, most_s in BATCHES:
        kept: list[tuple[float, str]] = []
        for tests in files:
            for seconds, test in [each for each in tests if each[1] not in tried][:number]:
                if sum(s for s, _ in kept) + seconds <= most_s:
                    kept.append((seconds, test))
        tried |= {test for _, test in kept}
        if kept:
            yield sorted(kept)


def hunt(options: argparse.Namespace) -> int:
    """Find the cheapest killer of each mutant, with what ``coverage`` has written."""
    files = json.loads(options.survey.read_text(encoding="utf-8"))["files"]
    notes = Notes(options.out, [dataclasses.asdict(mutant) for mutant in load()])
    found = [Mutant(**each) for each in notes.content]
    with trees(options.commit, options.jobs, options.until) as copies:
        sources = Sources(copies[0].tree)

        def work(tree: Tree, number: int) -> None:
            mutant = found[number]
            choice, place = candidates(number, mutant, files), sources.place(mutant)
            assert place is not None, mutant
            with tree.mutated(mutant, place):
                killer, seconds = killer_of(tree, batches(choice))
            mutant.killer, mutant.seconds = killer, round(seconds, 1)
            quickest = sorted(test for tests in choice for test in tests[:3])
            mutant.others = [test for _, test in quickest if test != killer][:OTHERS]
            with notes.lock:
                notes.content[number] = dataclasses.asdict(mutant)
                notes.write()
            print(f"{number} {place[0]}:{place[1]} {mutant.kind}: {killer or 'SURVIVED'} {seconds:.1f}", flush=True)

        wanted = options.only or range(len(found))
        done = side_by_side(copies, [n for n in wanted if found[n].killer is None], work)
    killed = sum(bool(mutant.killer) for mutant in found)
    print(f"{killed} killed, {sum(mutant.killer == '' for mutant in found)} survived, of {len(found)}")
    return 0 if done else 2


def killer_of(tree: Tree, tried: Iterable[Sequence[tuple[float, str]]]) -> tuple[str, float]:
    """Return the first test that fails on its own, too, and the seconds that it takes then."""
    for batch in tried:
        left = list(batch)
        while left:
            limits = START_S + 3 * sum(s for s, _ in left), f"--timeout={20 + 4 * max(s for s, _ in left):.0f}"
            run = tree.run([test for _, test in left], limits[0], "-x", limits[1])
            if not run.failed:
                break
            alone = tree.run(run.failed[:1], limits[0], "-x", limits[1])
            if alone.failed:
                return run.failed[0], alone.wall
            left = left[[*(test for _, test in left), *run.failed].index(run.failed[0]) + 1 :]
    return "", 0.0


def check(options: argparse.Namespace) -> int:
    """Apply each mutant and run its killer, or where it has none yet, its ``others``; 1 if a mutant survives."""
    notes = Notes(options.out, {"passing": {}, "verdicts": {}})
    passing, verdicts = notes.content["passing"], notes.content["verdicts"]
    found = load()
    wanted = sorted(
        (number for number in options.only or range(len(found)) if found[number].killer != ""),
        key=lambda number: found[number].killer is None,
    )
    with trees(options.commit, options.jobs, options.until) as copies:
        sources = Sources(copies[0].tree)
        killers = {number: sources.successors(found[number].killer or "") for number in wanted}
        for number, mutant in ((number, found[number]) for number in wanted):
            if not killers[number]:
                others = [test for other in mutant.others for test in sources.successors(other)]
                killers[number] = others or about(mutant, sources)

        def control(tree: Tree, tests: Sequence[str]) -> None:
            run = tree.run(tests, START_S + 300.0, "--timeout=120")
            with notes.lock:
                passing.update({test: any(name.startswith(test) for name in run.seconds) for test in tests})
                passing.update(dict.fromkeys(run.failed, False))
                notes.write()

        def work(tree: Tree, number: int) -> None:
            mutant, place = found[number], sources.place(found[number])
            tests = [test for test in killers[number] if passing.get(test)]
            if place is None:
                verdict = "gone"
            elif not tests:
                verdict = "killer gone, and no other"
            else:
                with tree.mutated(mutant, place):
                    killer, _ = killer_of(tree, [[(mutant.seconds + 5.0, test)] for test in tests])
                moved = "" if killer == mutant.killer else f"killer gone: {killer or tests}"
                verdict = " ".join(filter(None, ["killed" if killer else "SURVIVED", moved]))
            with notes.lock:
                verdicts[str(number)] = verdict
                notes.write()
            if verdict not in ("killed", "gone"):
                print(f"{number} {place or mutant.file} {mutant.line} -> {mutant.mutated}: {verdict}", flush=True)

        by_file: dict[str, list[str]] = collections.defaultdict(list)
        for test in {test: None for number in wanted for test in killers[number] if test not in passing}:
            by_file[test.partition("::")[0]].append(test)
        done = side_by_side(copies, sorted(by_file.values(), key=len, reverse=True), control)
        done = done and side_by_side(copies, [n for n in wanted if str(n) not in verdicts], work)
    counts = collections.Counter(verdict.partition(":")[0] for verdict in verdicts.values())
    print(f"mutants: {dict(counts)}, of {len(wanted)}")
    return 2 if not done else int(any(not verdict.startswith(("killed", "gone")) for verdict in verdicts.values()))


def about(mutant: Mutant, sources: Sources) -> list[str]:
    """Return at most three test files that share words with a mutant's file."""
    words = set(re.split(r"[/_.]", mutant.file)) - {"src", "sidelane", "lab", "py"}
    files = {file for files in sources.tests.values() for file in files if not re.match(OTHER_TESTS, file)}
    return sorted(files, key=lambda file: (-len(words & set(re.split(r"[/_.]", file))), file))[:3]


def defects(options: argparse.Namespace) -> int:
    """Undo the source half of repairs of the past: tests of the other half must fail; 1 if none does.

    With ``--freeze`` look for 60 such commits first.
    """
    path = ROOT / DATA / "defects.json"
    known = repairs(options.commit) if options.freeze else json.loads(path.read_text(encoding="utf-8"))
    notes = Notes(options.out, {})
    with trees(options.commit, options.jobs, options.until) as copies:
        sources = Sources(copies[0].tree)

        def work(tree: Tree, defect: dict[str, Any]) -> None:
            tests = [test for name in defect["tests"] for test in sources.successors(name)]
            files = undoing(defect["commit"], options.commit)
            failed: list[str] = []
            if not tests or not files:
                verdict = "gone"
            elif tree.run(tests, 200.0, "-x", "--timeout=60").failed:
                verdict = "test fails without it"
            else:
                with tree.changed(files):
                    failed = [name for name in tree.run(tests, 200.0, "--timeout=60").failed if "::" in name]
                verdict = "seen" if failed else "MISSED"
            failed = list(dict.fromkeys(name.partition("[")[0] for name in failed))
            with notes.lock:
                notes.content[defect["commit"]] = {**defect, "tests": failed or defect["tests"], "verdict": verdict}
                notes.write()
            print(f"{defect['commit']} {defect['subject']}: {verdict} {failed}", flush=True)

        enough = [defect for defect in known if defect["commit"] not in notes.content]
        done = side_by_side(copies, enough, work)
    found = list(notes.content.values())
    print(f"defects: {dict(collections.Counter(defect['verdict'] for defect in found))}, of {len(known)}")
    if options.freeze:
        seen = [defect for defect in found if defect["verdict"] == "seen"][:60]
        write("defects.json", [{key: defect[key] for key in ("commit", "subject", "tests")} for defect in seen])
        return 0 if done else 2
    return 2 if not done else int(any(defect["verdict"] == "MISSED" for defect in found))


def undoing(commit: str, base: str) -> dict[str, str]:
    """Return files of a later commit without what this commit changed in them, wherever they have moved.

    Where others have changed the same lines since, they stay as they are; none if that is more than half of the change.
    """
    found, undone, changed = {}, 0, 0
    moved = git("diff", "-M", "--diff-filter=R", "--name-status", commit, base, "--", "src").split("\n")
    names = dict(line.split("\t")[1:] for line in moved if line)
    with tempfile.TemporaryDirectory() as folder:
        for file in git("diff", "--diff-filter=M", "--name-only", f"{commit}^", commit, "--", "src").split():
            places = {"now": (base, names.get(file, file)), "with": (commit, file), "without": (f"{commit}^", file)}
            texts = {name: git("show", f"{at}:{path}", check=False) for name, (at, path) in places.items()}
            for name, text in texts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            merge = ("merge-file", "-p", "--ours", *(f"{folder}/{name}" for name in ("now", "with", "without")))
            merged = git(*merge) if texts["now"] else ""
            changed += differing(texts["with"], texts["without"])
            if merged != texts["now"]:
                found[names.get(file, file)] = merged
                undone += differing(texts["now"], merged)
    return found if 2 * undone >= changed else {}


def differing(one: str, other: str) -> int:
    """Return the number of lines that only one of two texts has."""
    lines = difflib.unified_diff(one.splitlines(), other.splitlines(), n=0)
    return sum(line[0] in "+-" for line in lines)


def git(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=check, capture_output=True, text=True).stdout


def repairs(commit: str) -> list[dict[str, Any]]:
    """Return commits that mend a fault, whose source half can be undone, with the tests that they added or changed."""
    found = []
    log = git("log", "--no-merges", "--since=2026-11-24", "--format=%x01%h%x02%s%x02%b", commit)
    for name, subject, body in (entry.split("\x02") for entry in filter(None, log.split("\x01"))):
        if not MENDED.search(subject + body) or not git("diff", "--name-only", f"{name}^", name, "--", "src"):
            continue
        tests, file = [], ""
        for line in git("diff", "-U0", f"{name}^", name, "--", "tests/*test_*.py", ":!tests/device").splitlines():
            if line.startswith("+++ b/"):
                file = line[6:]
            elif match := re.match(r"(?:\+|@@.*@@ )def (test_\w+)\(", line):
                tests.append(f"{file}::{match[1]}")
        if tests and undoing(name, commit):
            found.append({"commit": name, "subject": subject, "tests": list(dict.fromkeys(tests))})
    return found


def cases(options: argparse.Namespace) -> int:
    """Compare the tests that need GPUs, with their parameters, with those of the baseline; 1 if one has gone."""
    path = ROOT / DATA / "device-cases.txt"
    with trees(options.commit, 1, options.until) as (copy,):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "device"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(copy.tree / "src")}
        done = subprocess.run(command, cwd=copy.tree, check=True, capture_output=True, text=True, env=environment)
    now = [line for line in done.stdout.splitlines() if "::" in line]
    if options.freeze:
        write("device-cases.txt", "\n".join(now) + "\n")
    gone = [case for case in path.read_text(encoding="utf-8").splitlines() if case not in now]
    print("\n".join([*gone, f"device cases: {len(now)}, {len(gone)} of the baseline are gone"]))
    return int(bool(gone))


COMMANDS = {each.__name__: each for each in (seed, coverage, hunt, check, defects, cases)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--commit", default="HEAD", help="commit whose source and tests are tried")
    parser.add_argument("--jobs", type=int, default=1, help="tests side by side")
    parser.add_argument("--seconds", type=float, default=1e6, help="end after so many, and go on in the next call")
    parser.add_argument("--out", type=Path, help="file of findings, which a further call goes on from")
    parser.add_argument("--survey", type=Path, help="hunt: the findings of `coverage`")
    parser.add_argument("--tests", default="", help="coverage: a pattern of the test files that run")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    parser.add_argument("--freeze", action="store_true", help="write the yardstick instead of comparing with it")
    options = parser.parse_args()
    options.until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        options.out = options.out or Path(folder) / "found.json"
        return COMMANDS[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
