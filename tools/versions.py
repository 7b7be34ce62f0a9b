"""Try Sidelane with versions of Python and torch, and write down which of them pass; `make versions`.

Each combination gets an environment of its own in build/versions, with what pip takes there, and runs the tests of
collectives, of the process group and of fused operators on CPU ranks. An environment of a CUDA build of torch takes
five gigabytes: it is deleted afterwards unless ``--keep`` is given, and one that is there already is used as it is.

    python tools/versions.py                        # each Python here with each minor version of torch on the index
    python tools/versions.py 3.11:2.11 3.13:newest  # these alone

Results of combinations that are not tried now stay as they are, in results/cpu/versions.json and on the page, which
``make docs-pages`` writes as well.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from sidelane.cli.output import write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "results" / "cpu" / "versions.json", ROOT / "docs" / "reference" / "versions.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = (2, 11)
PACKAGES = ("numpy", "rich", "click", "matplotlib", "expecttest", "pytest", "pytest-timeout")
TESTS = (
    "tests/collectives/test_collectives.py",
    "tests/integrations/test_process_group.py",
    "tests/integrations/test_process_group_torch.py",
    "tests/integrations/test_process_group_world.py",
    "tests/ops/test_fused.py",
)
TIMEOUT_S = 1800

PAGE_TEXT = """# Tested versions

Sidelane requires Python 3.11 and PyTorch 2.11, or newer versions of both. This page lists the versions that were
tested. `make versions` runs the tests and writes the page.

## On CPU ranks

A cell has the number of tests that passed on CPU ranks, without GPUs; kernels ran in Triton's CPU interpreter
([versions.json](../../results/cpu/versions.json)). The tests are those of
{tests}.

{head}
{cells}

{notes}

The versions in full:

| Python | torch | Triton | NumPy | date |
|---|---|---|---|---|
{versions}

## On GPUs

The published results were measured with these versions, according to the result files.

| machines | Python | torch | Triton | driver | CUDA | NCCL | cuda-bindings |
|---|---|---|---|---|---|---|---|
{measured}
"""

Row = dict[str, Any]
Results = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "pairs", nargs="*", metavar="PYTHON:TORCH", help="such as 3.13:2.15 or 3.13:newest; all if none"
    )
    parser.add_argument("--pip", default="", help="options of pip for torch, such as an index of its CPU builds")
    parser.add_argument("--keep", action="store_true", help="keep the environments in build/versions")
    given = parser.parse_args()
    stored = load()
    torches = minor_versions_on_the_index() or stored["torch_versions"]
    rows = {(row["python"], row["torch"]): row for row in stored["rows"]}
    pairs = [pair_of(word, torches) for word in given.pairs] or [
        (python, torch) for python in PYTHONS for torch in torches
    ]
    failed = False
    for python, torch in pairs:
        row = try_versions(python, torch, given.pip.split(), keep=given.keep)
        keep_row(rows, row)
        failed |= bool(row.get("failed"))
        print(f"[sidelane] Python {python}, torch {torch}: {describe(row)} {row.get('not_tried', '')}", flush=True)
        content = {
            "study": "versions",
            "torch_versions": torches,
            "rows": [rows[key] for key in sorted(rows, key=numbers_in)],
        }
        write_json(RESULTS, content)
        write_text(PAGE, page(content))
    return int(failed)


def keep_row(rows: dict[tuple[str, str], Row], row: Row) -> None:
    """Take a row into the results, unless it says that another machine's tests could not be repeated on this one."""
    place = row["python"], row["torch"]
    if "not_tried" not in row or "passed" not in rows.get(place, {}):
        rows[place] = row


def load() -> Results:
    if RESULTS.exists():
        content: Results = json.loads(RESULTS.read_text(encoding="utf-8"))
        return content
    return {"torch_versions": [], "rows": []}


def minor_versions_on_the_index() -> list[str]:
    """Return the minor versions of torch that pip finds, oldest first; none if pip reaches no index."""
    answer = output_of([sys.executable, "-m", "pip", "index", "versions", "torch"]) or ""
    found = {(int(major), int(minor)) for major, minor in re.findall(r"\b(\d+)\.(\d+)\.\d+", answer)}
    return [f"{major}.{minor}" for major, minor in sorted(found) if (major, minor) >= OLDEST_TORCH]


def pair_of(word: str, torches: list[str]) -> tuple[str, str]:
    python, _, torch = word.partition(":")
    torch = torches[-1] if torch == "newest" else torch
    if python not in PYTHONS or torch not in torches:
        sys.exit(f"[sidelane] {word}: no such versions (allowed={', '.join(PYTHONS)} : {', '.join(torches)}, newest)")
    return python, torch


def try_versions(python: str, torch: str, pip: list[str], *, keep: bool) -> Row:
    """Make the environment, run the tests in it, and return the row: counts of tests, or why there are none."""
    row: Row = {"python": python, "torch": torch}
    folder = ROOT / "build" / "versions" / f"{python}-{torch}"
    try:
        if not (folder / "bin" / "python").exists():
            make_environment(folder, python, torch, pip)
        return row | installed(folder) | run_tests(folder)
    except NotTried as reason:
        keep = False  # what is half installed would be taken for an environment the next time
        return row | {"not_tried": str(reason)}
    finally:
        if not keep and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


class NotTried(Exception):
    """A combination that cannot be tried here; the message is the reason."""


def make_environment(folder: Path, python: str, torch: str, pip: list[str]) -> None:
    program = shutil.which(f"python{python}")
    if program is None or output_of([program, "-c", "print()"]) is None:
        raise NotTried(f"as the machine has no Python {python}")
    print(f"[sidelane] installing torch {torch} for Python {python}", flush=True)
    if output_of([program, "-m", "venv", str(folder)]) is None:
        raise NotTried(f"as Python {python} of the machine cannot make environments")
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for packages in ([f"torch=={torch}.*", *pip], [*PACKAGES, "triton"]):
        done = subprocess.run([*install, *packages], capture_output=True, text=True, check=False)
        if done.returncode:
            last = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "pip failed")
            raise NotTried(f"as pip said: {last.removeprefix('ERROR: ')}")


def installed(folder: Path) -> Row:
    """Return what is in an environment, in full."""
    code = (
        "import json, platform; from importlib import metadata; "
        "found = {each.name: each.version for each in metadata.distributions()}; "
        "found = {name: found[name] for name in ('torch', 'triton', 'numpy') if name in found}; "
        "print(json.dumps({'python': platform.python_version()} | found))"
    )
    answer = output_of([str(folder / "bin" / "python"), "-c", code])
    if answer is None:
        raise NotTried("as the environment does not start")
    from sidelane_lab.harness.provenance import commit, processor_name  # torch is not needed for the page

    return {
        "software": json.loads(answer),
        "machine": processor_name(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def run_tests(folder: Path) -> Row:
    """Run the tests of this checkout in an environment; returns how many passed, failed and were skipped."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "tests.xml"
        command = [
            str(folder / "bin" / "python"),
            "-W",
            "ignore",
            "-m",
            "pytest",
            "-q",
            "-o",
            "addopts=",
            "-m",
            "not long and not device",
        ]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"passed": 0, "failed": [f"the tests took longer than {TIMEOUT_S} s"], "skipped": 0}
        if not report.exists():
            print(done.stdout)
            return {"passed": 0, "failed": ["pytest did not start"], "skipped": 0}
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if has(case, "failure", "error")]
    skipped = sum(has(case, "skipped") for case in cases)
    if failed or done.returncode:
        print(done.stdout)
    return {"passed": len(cases) - len(failed) - skipped, "failed": failed, "skipped": skipped}


def has(case: ElementTree.Element, *tags: str) -> bool:
    return any(case.find(tag) is not None for tag in tags)


def output_of(command: list[str]) -> str | None:
    """Return what a program writes; None if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def numbers_in(pair: tuple[str, str]) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", " ".join(pair))]


def page(results: Results | None = None) -> str:
    """Return the page of tested versions: of results, or of the stored ones, and of the files of machines with GPUs."""
    results = load() if results is None else results
    rows = {(row["python"], row["torch"]): row for row in results["rows"]}
    tried = [row for row in rows.values() if "not_tried" not in row]
    reasons: dict[str, list[str]] = {}
    for row in rows.values():
        if "not_tried" in row:
            reasons.setdefault(row["not_tried"], []).append(f"{row['python']} with torch {row['torch']}")
    return PAGE_TEXT.format(
        tests=textwrap.fill(", ".join(f"`{Path(path).name}`" for path in TESTS), 119),
        head="| torch |" + "".join(f" Python {python} |" for python in PYTHONS) + "\n|---|" + "---|" * len(PYTHONS),
        cells="\n".join(
            f"| {torch} |" + "".join(f" {describe(rows.get((python, torch)))} |" for python in PYTHONS)
            for torch in results["torch_versions"]
        ),
        notes="\n".join(
            [
                *(f"- Not tried, {reason}: Python {', '.join(names)}." for reason, names in reasons.items()),
                *(
                    f"- Python {row['python']} with torch {row['torch']}: `{name}` failed."
                    for row in tried
                    for name in row["failed"]
                ),
            ]
        ),
        versions="\n".join(
            f"| {' | '.join(row['software'].get(name, 'none') for name in ('python', 'torch', 'triton', 'numpy'))} "
            f"| {row['date']} |"
            for row in tried
        ),
        measured="\n".join(measured_lines()),
    )


def describe(row: Row | None) -> str:
    """Return the result of a combination in some words."""
    if row is None or "not_tried" in row:
        return "not tried"
    counts = [f"{row['passed']} passed"]
    counts += [f"**{len(row['failed'])} failed**"] if row["failed"] else []
    counts += [f"{row['skipped']} skipped"] if row["skipped"] else []
    return ", ".join(counts)


def measured_lines() -> list[str]:
    """Return a line for each set of versions in the results of machines with GPUs, with the machines."""
    machines: dict[tuple[str, ...], set[str]] = {}
    names = ("python", "torch", "triton", "driver", "cuda", "nccl", "cuda-bindings")
    for path in sorted((ROOT / "results").glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        software = content.get("software") if isinstance(content, dict) else None
        if software and "driver" in software:
            machines.setdefault(tuple(software.get(name, "none") for name in names), set()).add(path.parent.name)
    return [f"| {', '.join(sorted(where))} | {' | '.join(versions)} |" for versions, where in machines.items()]


if __name__ == "__main__":
    raise SystemExit(main())
