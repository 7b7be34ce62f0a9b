"""Run the tests of native code and of the made-up drivers under AddressSanitizer and UBSan; `make asan`.

    python tools/asan.py --out results/cpu/asan.txt   # all of it
    python tools/asan.py tests/native -k refused      # these tests; options of pytest

``replay.c``, ``arena.c``, the stand-in for the HIP runtime and the driver that checks are compiled with both sanitizers
(``CC``). AddressSanitizer is loaded into Python, torch and all ranks, so that it also knows the memory of tensors and
arrays, and looks at copies between them. Leaks are not looked for: Python and torch keep much until a process ends.
A write into freed memory that is made on purpose must be found first. Needs gcc.

Exit status 1 if a test failed, or a sanitizer found something; 2 if there are no sanitizers.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from outputs import file_to_write
from sidelane.cli.output import write_text
from sidelane.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/native", "tests/collectives", "tests/execute", "tests/session")
# UBSan ends the process, and AddressSanitizer reports where: UBSan's own reports go to the standard error alone.
SANITIZERS = "-fsanitize=address,undefined -fsanitize-undefined-trap-on-error -fno-omit-frame-pointer -g"
PLANTED = "import ctypes, numpy as np; a = np.zeros(5000, np.uint8); at = a.ctypes.data; del a; ctypes.memset(at, 1, 4)"
REPORT_LINES = 45


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=file_to_write, help="file for a summary")
    given, options = parser.parse_known_args()
    names_tests = any((ROOT / each.partition("::")[0]).exists() for each in options)
    tests = [*(() if names_tests else TESTS), *options]
    with tempfile.TemporaryDirectory(prefix="sidelane-asan-") as folder:
        environment = sanitized(Path(folder))
        if environment is None:
            print("[sidelane] gcc with libasan is needed", file=sys.stderr)
            return 2
        subprocess.run([sys.executable, "-c", PLANTED], env=environment, capture_output=True, check=False)
        if not reports(Path(folder)):
            print("[sidelane] AddressSanitizer does not see a write into freed memory here", file=sys.stderr)
            return 2
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", "not long", *tests]
        began = time.monotonic()
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        last = ""
        for line in run.stdout:
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
        failed, found = run.wait() != 0, reports(Path(folder))
    text = summary(" ".join(options), last, time.monotonic() - began, found)
    print("\n" + text)
    if given.out is not None:
        write_text(given.out, text)
    return int(failed or bool(found))


def sanitized(folder: Path) -> dict[str, str] | None:
    """Return the environment in which processes load the sanitizers and write reports to a folder; None without gcc."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return None

    def library(name: str) -> Path:
        path = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        return Path(path.strip()).resolve()

    loaded = [library("libasan.so"), library("libstdc++.so.6")]  # the second for exceptions that the first intercepts
    if not all(path.is_absolute() and path.exists() for path in loaded):
        return None
    return os.environ | {
        "CC": f"{gcc} {SANITIZERS}",
        "LD_PRELOAD": " ".join(map(str, loaded)),
        "ASAN_OPTIONS": f"log_path={folder}/report:handle_sigill=1:detect_leaks=0:alloc_dealloc_mismatch=0",
        "PYTHONMALLOC": "malloc",  # or else freed objects are not freed
        "XDG_CACHE_HOME": f"{folder}/cache",
        "CUDA_VISIBLE_DEVICES": "",
    }


def reports(folder: Path) -> list[str]:
    """Return the reports so far, and forget them."""
    found = []
    for path in sorted(folder.glob("report*")):
        found.append("\n".join(path.read_text(errors="replace").splitlines()[:REPORT_LINES]))
        path.unlink()
    return found


def summary(tests: str, outcome: str, seconds: float, found: list[str]) -> str:
    """Return the text of a run."""
    commit, gcc = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
        for command in (["git", "rev-parse", "--short=8", "HEAD"], ["gcc", "--version"])
    )
    lines = [
        f"date:     {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        f"commit:   {commit}",
        f"software: sidelane {VERSION}, python {platform.python_version()}, torch {version('torch')}, {gcc}",
        f"command:  python tools/asan.py {tests}",
        f"tests:    {outcome}",
        f"took:     {seconds / 60:.0f} minutes on {os.cpu_count()} cores",
        f"reports:  {len(found)}",
    ]
    return "\n".join(lines + [re.sub(r"==\d+==", "", report) for report in found]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
