"""Who may import whom, what importing does, and who may name a vendor. Nothing here runs a rank."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from interpreter import Interpreter

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGES = ("sidelane", "sidelane_lab")

# Rooms by layer, highest first. A module imports from its own room and from lower layers. The laboratory stands on the
# library, which imports nothing of it.
LAYERS = (
    ("sidelane_lab.papers",),
    ("sidelane_lab.traces",),
    ("sidelane_lab.studies",),
    ("sidelane_lab.explain", "sidelane_lab.baselines"),
    ("sidelane_lab.model",),
    ("sidelane_lab.cli",),
    ("sidelane_lab.pairs",),
    ("sidelane_lab.sim", "sidelane_lab.sdma"),
    ("sidelane_lab.machines", "sidelane_lab.shaping"),
    ("sidelane_lab.harness",),
    ("sidelane.__main__",),
    ("sidelane.cli",),
    ("sidelane.torchtitan", "sidelane.servers"),
    ("sidelane.deep_ep",),
    ("sidelane.fsdp",),
    ("sidelane.integrations",),
    ("sidelane.c3", "sidelane.ops"),
    ("sidelane.session",),
    ("sidelane.collectives",),
    ("sidelane.choice",),
    ("sidelane.execute",),
    ("sidelane.kernels",),
    ("sidelane.device",),
    ("sidelane.memory", "sidelane.machine", "sidelane.program"),
    ("sidelane.native",),
    ("sidelane.config",),
    ("sidelane.flight_recorder", "sidelane.metrics"),
    ("sidelane.forks", "sidelane.modes"),
    ("sidelane.ranges",),
    ("sidelane.errors", "sidelane.fields", "sidelane.log", "sidelane.sizes"),
    ("sidelane.user_files", "sidelane.version"),
)
HEIGHT = {room: -number for number, layer in enumerate(LAYERS) for room in layer}

# Files that may import a vendor's library, or name the vendor in their own name.
VENDOR_LIBRARIES = ("cuda", "pynvml", "triton", "hip", "amdsmi")
VENDOR_FILES = (
    *(f"sidelane/{place}" for place in ("execute/cuda/", "machine/nvidia.py", "device/", "kernels/", "ops/")),
    "sidelane/torchtitan.py",
    "sidelane_lab/shaping/",
    *("sidelane/execute/hip/", "sidelane/machine/amd.py", "sidelane/collectives/backend_hip.py"),
    *("sidelane_lab/studies/fused/single_rank.py", "sidelane_lab/studies/firing.py"),
    "sidelane_lab/studies/power/sensors.py",
)


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Full names of what a file imports, wherever it does: in functions and for types, too."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
        waiting.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def room_of(module: str) -> str:
    """``sidelane.program.ir`` -> ``sidelane.program``; a package itself -> ````."""
    package, _, rest = module.partition(".")
    room = rest.split(".")[0]
    return f"{package}.{room}" if room else ""


def ours(names: Set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in PACKAGES}


def test_every_module_has_a_layer():
    unknown = {room_of(name) for name in MODULES} - set(HEIGHT) - {""}
    assert not unknown, f"LAYERS here (and docs/internals/architecture.md) must say where these belong: {unknown}"


def test_imports_point_downwards():
    wrong = []
    for name, path in MODULES.items():
        if name == "sidelane":  # the public names come from everywhere
            continue
        for target in ours(imports(path)):
            if target == "sidelane":  # for __version__ only
                assert "from sidelane import __version__" in path.read_text(encoding="utf-8"), name
                continue
            below = HEIGHT[room_of(target)] < HEIGHT[room_of(name)]
            if room_of(target) != room_of(name) and not below:
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_the_library_does_not_name_its_laboratory():
    """Not in an import, early or late, and not in a text that something could import by."""
    for path in (SOURCE / "sidelane").rglob("*.py"):
        assert "sidelane_lab" not in path.read_text(encoding="utf-8"), path


def test_no_cycles_between_modules():
    graph = {name: ours(imports(path)) - {name} for name, path in MODULES.items() if name != "sidelane"}
    # Importing a module imports its packages first: a package that imports its own modules is no cycle, as those do not
    # import the package.
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", [path for path in MODULES.values() if path.name == "__init__.py"], ids=str)
def test_packages_only_reexport(path: Path):
    nodes: list[ast.stmt] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        hidden = isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING" and not node.orelse
        nodes += node.body if hidden else [node]
    for node in nodes:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        imported = isinstance(node, ast.Import | ast.ImportFrom) or is_type_checking(node)
        # Names for `import *` and the version: constants that are written out.
        constant = isinstance(node, ast.Assign) and is_literal(node.value)
        # What makes public names load when they are first used (PEP 562).
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        assert docstring or imported or constant or lazy, f"{path}:{node.lineno}: {ast.unparse(node)[:80]}"


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def test_vendor_libraries_stay_in_vendor_files():
    wrong = [
        f"{name} imports {target}"
        for name, path in MODULES.items()
        if not path.relative_to(SOURCE).as_posix().startswith(VENDOR_FILES)
        for target in imports(path)
        if target.split(".")[0] in VENDOR_LIBRARIES
    ]
    assert not wrong


def test_importing_has_no_side_effects():
    """Every module but those that need a vendor's library, in a fresh process that watches the environment."""
    names = [name for name, path in MODULES.items() if name != "sidelane.__main__" and not needs_vendor(path)]
    assert {"sidelane.cli", "sidelane.session.communicator", "sidelane.execute.cpu.executor"} <= set(names)
    script = f"""
import collections.abc, importlib, os, sys, threading

class Watched(collections.abc.MutableMapping):
    def __init__(self, real): self.real, self.read = real, set()
    def __getitem__(self, key): self.read.add(key); return self.real[key]
    def __setitem__(self, key, value): self.read.add(key); self.real[key] = value
    def __delitem__(self, key): self.read.add(key); del self.real[key]
    def __iter__(self): return iter(self.real)
    def __len__(self): return len(self.real)

import torch, torch.distributed
threads = set(threading.enumerate())
watched = os.environ = Watched(os.environ)
os.getenv = watched.get
for name in {names!r}:
    importlib.import_module(name)
read = sorted(key for key in watched.read if key.startswith("SIDELANE"))
assert not read, f"importing reads {{read}}"
assert not torch.cuda.is_initialized(), "importing initialises the GPUs"
assert not torch.distributed.is_initialized()
assert set(threading.enumerate()) == threads, "importing starts threads"
from sidelane import config
assert not config._stack, "importing settles the configuration"
config.current()
assert "SIDELANE_TIMEOUT_S" in watched.read, "the watch does not work"
"""
    run_python(script)


def needs_vendor(path: Path) -> bool:
    relative = path.relative_to(SOURCE).as_posix()
    return relative.startswith(VENDOR_FILES) and relative != "sidelane/machine/nvidia.py"


def test_command_line_and_package_do_without_torch():
    """All commands and their options, as ``sidelane --help`` loads them."""
    run_python("""
import sys
from sidelane.cli.tool import main
assert "collective" in main.list_commands()
assert 'torch' not in sys.modules, 'help would take seconds'
""")


def test_operators_are_loaded_by_their_names(interpreter: Interpreter, tmp_path: Path):
    """A user who has imported the package writes what the guide does."""
    pytest.importorskip("triton")
    program = """
import sys, sidelane
assert "ops" in dir(sidelane)
assert sidelane.ops.explain
"""
    interpreter.run(program, tmp_path)


def test_a_study_is_loaded_by_its_name_and_alone(interpreter: Interpreter, tmp_path: Path):
    """The harness knows none before somebody names one; each is declared in the module that ``STUDIES`` names."""
    program = """
import sys
from sidelane_lab.harness import report, running
from sidelane_lab.harness.study import studies, study_of
def loaded(): return {name for name in sys.modules if name.startswith("sidelane_lab.studies.")}
assert not loaded(), loaded()
study_of("gemms")
assert loaded() == {"sidelane_lab.studies.gemms"}, loaded()
study_of("c3")  # what measures, predicts and draws is loaded by those who do
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("sidelane_lab.")}
assert not rooms & {"machines", "model", "sim", "papers"}, rooms
assert [study_of(name).name for name in studies()] == list(studies())
"""
    interpreter.run(program, tmp_path)


@pytest.mark.parametrize("has_triton", [True, False])
def test_every_module_that_the_reference_lists_can_be_imported(has_triton, interpreter: Interpreter, tmp_path: Path):
    """By each way to write it. Without Triton each is either there, or says how to get it as an import does."""
    page = (SOURCE.parent / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `([\w.]+)`: ((?:.|\n  )*)", page, re.MULTILINE)
    names = {(module, name) for module, found in listed for name in re.findall(r"`(\w+)`", found) or ["*"]}
    assert {("sidelane.fsdp", "enable"), ("sidelane.ops", "explain"), ("sidelane", "scale_out")} <= names
    program = f"""
import importlib, sys
if not {has_triton}:
    sys.modules["triton"] = None
for module, name in {sorted(names)!r}:
    if not module.startswith("sidelane_lab"):
        try:
            exec(f"import {{module}}")
            exec(f"from {{module}} import {{name}}")
        except ImportError as error:
            assert not {has_triton} and "pip install 'triton" in str(error), f"{{module}}: {{error}}"
            assert module.startswith(("sidelane.ops", "sidelane.deep_ep")) or name == "scale_out", module
"""
    if has_triton:
        pytest.importorskip("triton")
    interpreter.run(program, tmp_path)


def run_python(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_that_others_wrote_is_executed() -> None:
    """Ranks read what others keep in a store: as JSON. The pipes of ``sidelane``'s own studies are their own.

    The flight recorder writes torch's format, and reads it without any code of the file.
    """
    executing = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    found = {name for name, path in MODULES.items() if imports(path) & executing}
    assert found == {"sidelane_lab.harness.launch", "sidelane.cli.recorder", "sidelane.flight_recorder"}
