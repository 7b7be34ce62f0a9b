"""Build the sdist and, from it, the wheels of the library and of its laboratory, with their hashes; check and try them.

All are built from the files that git knows, in a folder of their own, so that nothing left behind by an earlier build
can get into them. The library's wheel is installed into a new environment that sees the other packages of this Python,
such as torch, but neither this checkout nor any program of the machine: ``PATH`` holds the environment's programs
alone, and no C compiler. Then the laboratory's joins it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Collection
from pathlib import Path

from outputs import folder_to_write

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / "build" / "release"
NOT_IN_THE_SDIST = (".ci", ".gitignore", ".pre-commit-config.yaml")
WRITTEN_BY_SETUPTOOLS = ("PKG-INFO", "setup.cfg", "src/sidelane.egg-info")
RANKS = 2
NATIVE = """
from sidelane import config, native

config.show_log()
native.load_replays(), native.load_replays_soon()
"""
PAGE = """
from sidelane import UnavailableError

print(UnavailableError("not here").__notes__[0].removeprefix("See "))
"""
PROGRAM = """
import torch, torch.distributed as dist
from sidelane import Communicator

dist.init_process_group("gloo")
with Communicator() as comm:
    shards, expected = comm.empty(comm.world_size, 1000), torch.arange(comm.world_size, dtype=torch.float32)
    for _ in range(20):
        comm.all_gather(shards, torch.full((1000,), float(comm.rank)))
        assert torch.equal(shards, expected[:, None].expand(-1, 1000))
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=folder_to_write, default=ROOT / "dist", help="folder for them (default: dist)")
    out = parser.parse_args().out.resolve()
    files = tracked_files()
    sdist, wheel, lab = build(files, out)
    check_sdist(sdist, files)
    pages = {path for path in files if re.fullmatch(r"docs/(guide|reference)/[^/]+\.md", path)}
    check_wheel(wheel, "sidelane", files, pages)
    check_wheel(lab, "sidelane_lab", files)
    try_wheels(wheel, lab)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (sdist, wheel, lab)]
    (out / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    print(f"[sidelane] {sdist.name}, {wheel.name}, {lab.name} and SHA256SUMS are in {out}")


def tracked_files() -> set[str]:
    """Paths of the files that git knows, without those that were deleted."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return {path for path in listed if (ROOT / path).is_file()}


def build(files: set[str], out: Path) -> tuple[Path, Path, Path]:
    """Build the sdist from a copy of the files, with the build system that pyproject.toml asks for, and two wheels."""
    print("[sidelane] building")
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    python, source = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "source"
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requires)
    for path in sorted(files):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    out.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(out)!r}))"
    sdist = out / run(python, "-c", code, folder=source).split()[-1]
    shutil.rmtree(source)
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (unpacked,) = source.iterdir()
    for project in (unpacked, unpacked / "lab"):
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, project)
    version = sdist.name.removesuffix(".tar.gz").partition("-")[2]
    wheel, lab = (out / f"{name}-{version}-py3-none-any.whl" for name in ("sidelane", "sidelane_lab"))
    return sdist, wheel, lab


def check_sdist(sdist: Path, files: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    compare(
        sdist,
        {path for path in found if not path.startswith(WRITTEN_BY_SETUPTOOLS)},
        {path for path in files if not path.startswith(NOT_IN_THE_SDIST)},
    )


def check_wheel(wheel: Path, package: str, files: set[str], pages: Collection[str] = ()) -> None:
    """Compare a wheel with the files of its package, the pages that errors name, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        found = {path.partition("/data/share/doc/sidelane/")[2] or path for path in archive.namelist()}
    expected = {path.removeprefix("src/") for path in files if path.startswith(f"src/{package}/")}
    compare(wheel, {path for path in found if ".dist-info/" not in path}, expected.union(pages))


def compare(archive: Path, found: set[str], expected: set[str]) -> None:
    if wrong := sorted(found ^ expected):
        lines = [f"  {'missing' if path in expected else 'not wanted'}: {path}" for path in wrong]
        sys.exit("\n".join([f"[sidelane] {archive.name} does not hold what it should:", *lines]))


def try_wheels(wheel: Path, lab: Path) -> None:
    """Install the library without a compiler in reach, and run the tool and two ranks; then the laboratory's demo."""
    print("[sidelane] trying the wheels")
    venv.create(ENVIRONMENT, with_pip=False, clear=True)
    bin_, python = ENVIRONMENT / "bin", ENVIRONMENT / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    run(*install, wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    # Links to all packages but Sidelane's own, whose editable installations would name commands that are not here.
    borrowed = ENVIRONMENT / "borrowed"
    borrowed.mkdir()
    for path in (path for folder in sys.path if folder.endswith("-packages") for path in Path(folder).iterdir()):
        if "sidelane" not in path.name and not (borrowed / path.name).exists():
            (borrowed / path.name).symlink_to(path)
    Path(site, "borrowed.pth").write_text(str(borrowed), encoding="utf-8")
    variables = {"PATH": str(bin_), "HOME": str(ENVIRONMENT), "SIDELANE_LOG": "WARN", "CUDA_VISIBLE_DEVICES": ""}

    said = run(python, "-c", "import sidelane; print(sidelane.__file__)", variables=variables).strip()
    expect(said.startswith(site), "the wheel is imported", said)
    version = wheel.name.split("-")[1]
    run(bin_ / "sidelane", "info", "--versions", "--json", "versions.json", variables=variables)
    found = json.loads((ENVIRONMENT / "versions.json").read_text(encoding="utf-8"))
    expect(found["sidelane"] == version and found["compiler"] is None, "versions are reported", str(found))
    program = ENVIRONMENT / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(RANKS))
    said = run(python, *torchrun, program, variables={**variables, "OMP_NUM_THREADS": "1"})
    expect("[sidelane]" not in said, "ranks on CPUs warn of nothing", said)
    said = run(python, "-c", NATIVE, variables=variables)
    expect(said.count("\n") == 1 and "WARN" in said and "no C compiler" in said, "one warning of the C helper", said)
    said = run(python, "-c", PAGE, variables=variables).strip()
    expect(said.startswith(str(ENVIRONMENT)) and Path(said).is_file(), "errors name pages that are there", said)
    said = run(bin_ / "sidelane", "demo", variables=variables, fails=True)
    expect("./lab" in said, "the tool names the laboratory", said)
    run(*install, lab)
    said = run(bin_ / "sidelane", "demo", "--report", ENVIRONMENT / "report", variables=variables)
    expect((ENVIRONMENT / "report" / "index.html").exists(), "the demo writes its report", said)


def run(
    program: str | Path,
    *arguments: str | Path,
    folder: Path = ENVIRONMENT,
    variables: dict[str, str] | None = None,
    fails: bool = False,
) -> str:
    """Run a program, which must not fail, or must; returns what it wrote."""
    command = [str(program), *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SIDELANE"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables if variables is not None else environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if bool(done.returncode) != fails:
        sys.exit(f"{done.stdout}\n[sidelane] this failed with exit code {done.returncode}: {' '.join(command)}")
    return done.stdout


def expect(condition: bool, what: str, found: str) -> None:
    if not condition:
        sys.exit(f"{found}\n[sidelane] not so: {what}")


if __name__ == "__main__":
    main()
