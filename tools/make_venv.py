"""Make the project's environment in ``.venv``. Called by the Makefile; runs on the standard library alone.

Where the Python that runs this has a torch that drives GPUs, that torch stays as it is: the environment sees all
packages of that Python and adds nothing but what is missing. Such machines often have no network and no way to build
packages, so Sidelane itself gets there by a path file, which is what an editable installation is anyway.

Elsewhere torch is installed first and on its own, so that its exact pin decides which build is taken, and Sidelane with
its tools after it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BORROWED = "borrowed"  # a file in an environment that uses the packages of another
NEEDED = ("click", "matplotlib", "numpy", "rich")
NEEDED_ON_GPUS = {"cuda": ("cuda.bindings", "pynvml", "triton"), "hip": ("triton",)}
TOOLS = ("pytest", "pytest_timeout", "xdist", "hypothesis", "ruff", "mypy", "rumdl", "codespell_lib")
LOCK = ("--constraint", str(ROOT / "tools" / "lock.txt"))
COMPILED = ("torch", "sympy")
"""Packages that are compiled while pip installs others: hundreds of processes of the tests import them."""
PACKAGES = {
    "pynvml": "nvidia-ml-py",
    "cuda.bindings": "cuda-bindings>=13",
    "codespell_lib": "codespell",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="torch", help="what pip installs as torch, options included")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (any Python may run this file, and the user must hear of an old one)
        fail(f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]} (choose with PYTHON=...)")
    started = time.monotonic()
    if driver := gpu_driver(sys.executable):
        borrow(VENV, NEEDED_ON_GPUS[driver])
    else:
        install(VENV, arguments.torch)
    say(f"environment ready in {time.monotonic() - started:.0f} s: {VENV.name}")


def borrow(target: Path, needed_on_gpus: tuple[str, ...]) -> None:
    """An environment on top of the packages of this Python, which may itself be an environment."""
    say(f"{sys.executable} has a torch with GPUs: it is used as it is")
    # An environment with packages of its own would hide the borrowed ones.
    venv.create(target, with_pip=False, clear=not works(target) or not (target / BORROWED).exists())
    (target / BORROWED).touch()
    python = target / "bin" / "python"
    site_packages = site_packages_of(python)
    packages = sysconfig.get_paths()["purelib"]
    # addsitedir rather than a plain path: the path files in there count too.
    (site_packages / "borrowed.pth").write_text(f"import site; site.addsitedir({packages!r})\n", encoding="utf-8")
    (site_packages / "sidelane.pth").write_text(f"{ROOT / 'src'}\n", encoding="utf-8")
    describe(site_packages)
    command = target / "bin" / "sidelane"
    command.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m sidelane "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    missing = [name for name in (*NEEDED, *needed_on_gpus, *TOOLS) if not has(python, name)]
    if missing:
        say(f"installing what is missing there: {', '.join(missing)}")
        # One try: without a network, pip would wait a long time before it gives up.
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--retries=0", "--timeout=15"]
        run([*pip, *LOCK, *(PACKAGES.get(name, name) for name in missing)], may_fail=True)
    still = [name for name in missing if not has(python, name)]
    if set(still) & set(NEEDED):
        fail(f"these packages are needed and could not be installed: {', '.join(still)}")
    for name in still:
        say(f"without {name}: {'make lint cannot run' if name in ('ruff', 'mypy') else 'some of it will not work'}")


def describe(site_packages: Path, root: Path = ROOT) -> None:
    """Write what installations say of themselves: the version, and the entry points by which commands are found."""
    for path in filter(Path.exists, (root / "pyproject.toml", root / "lab" / "pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        name = project["name"]
        folder = site_packages / f"{name.replace('-', '_')}-0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", encoding="utf-8")
        groups = {"console_scripts": project.get("scripts", {}), **project["entry-points"]}
        text = [
            f"[{group}]\n" + "".join(f"{key} = {at}\n" for key, at in named.items()) for group, named in groups.items()
        ]
        (folder / "entry_points.txt").write_text("\n".join(text), encoding="utf-8")


def install(target: Path, torch: str) -> None:
    """An environment of its own, from the package index that pip is configured for."""
    say(f"making an environment with {sys.executable}")
    if not works(target) or (target / BORROWED).exists():
        venv.create(target, with_pip=True, clear=True)
    python = str(target / "bin" / "python")
    # pip compiles all 11,000 files of these packages, one by one. A quarter of them is ever imported.
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    say(f"installing {torch} (the largest part; minutes on a slow line)")
    run([*pip, *torch.split()])
    compiled = [str(site_packages_of(Path(python)) / name) for name in COMPILED]
    compiler = subprocess.Popen([python, "-m", "compileall", "-q", "-j", "0", *compiled], stdout=subprocess.DEVNULL)
    extras = "dev,cuda" if gpu_driver(python) == "cuda" else "dev"
    say(f"installing sidelane[{extras}] and its laboratory from this checkout")
    run([*pip, *LOCK, "-e", f"{ROOT}[{extras}]", "-e", str(ROOT / "lab")])
    compiler.wait()


def gpu_driver(python: str) -> str:
    """Return what the torch of ``python`` drives its GPUs with, ``cuda`` or ``hip``; "" without torch or GPUs."""
    if python == sys.executable and importlib.util.find_spec("torch") is None:
        return ""
    question = "import torch; print(('hip' if torch.version.hip else 'cuda') if torch.cuda.is_available() else '')"
    done = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout.strip().rpartition("\n")[2]


def has(python: Path, module: str) -> bool:
    question = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", question], capture_output=True, check=False).returncode == 0


def works(target: Path) -> bool:
    """There is an environment, of this version of Python, that was not moved here from elsewhere."""
    question = "import sys; print(sys.prefix, sys.version_info[:2], sep='|')"
    try:
        python = target / "bin" / "python"
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return False
    return answer == f"{target}|{sys.version_info[:2]}"


def site_packages_of(python: Path) -> Path:
    question = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip())


def run(command: list[str], *, may_fail: bool = False) -> None:
    """Run pip. Its remarks are dropped when it succeeds: some are about the index, and none needs an answer."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode and may_fail:
        say(f"pip: {done.stderr.strip().rpartition(chr(10))[2] or 'failed'}")
    elif done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        fail(f"this failed with exit code {done.returncode}: {' '.join(command)}")


def say(text: str) -> None:
    print(f"[sidelane] {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"[sidelane] {text}")


if __name__ == "__main__":
    main()
