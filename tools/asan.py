"""Run the tests of native code and of the made-up drivers under AddressSanitizer and UBSan; `make asan`.

    python tools/asan.py --out results/cpu/asan.txt   # all of it
    python tools/asan.py tests/native -k refused      # these tests; options of pytest

``replay.c``, ``arena.c``, the stand-in for the HIP runtime and the driver that checks are compiled with both sanitizers
(``CC``). AddressSanitizer is loaded into Python, torch and all ranks, so that it also knows the memory of tensors and
arrays, and looks at copies between them. Leaks are not looked for: Python and torch keep much until a process ends.
A write into freed memory that is made on purpose must be found first. Needs gcc with libasan.

Exit status 1 if a test failed, or a sanitizer found something; 2 if the write that is made on purpose was not found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from outputs import file_to_write
from sidelane.cli.output import write_text

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/native",
    "tests/collectives",
    "tests/execute",
    "tests/session",
    *(f"tests/inside/{room}" for room in ("native", "execute", "session")),
)
# UBSan ends the process, and AddressSanitizer reports where: UBSan's own reports go to the standard error alone.
COMPILER = "gcc -fsanitize=address,undefined -fsanitize-undefined-trap-on-error -fno-omit-frame-pointer -g"
PLANTED = "import ctypes, numpy as np; a = np.zeros(5000, np.uint8); at = a.ctypes.data; del a; ctypes.memset(at, 1, 4)"
REPORT_LINES = 45


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=file_to_write, help="file for a summary")
    given, options = parser.parse_known_args()
    tests = () if any((ROOT / each.partition("::")[0]).exists() for each in options) else TESTS
    with tempfile.TemporaryDirectory(prefix="sidelane-asan-") as name:
        planted, log = Path(name) / "planted", Path(name) / "report"
        subprocess.run([sys.executable, "-c", PLANTED], env=sanitized(planted), capture_output=True, check=False)
        if not reports(planted):
            print("[sidelane] gcc's AddressSanitizer does not see a write into freed memory here", file=sys.stderr)
            return 2
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", "not long and not device", *tests, *options]
        with subprocess.Popen(command, cwd=ROOT, env=sanitized(log), stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout or ():
                print(line, end="", flush=True)
        found = reports(log)
    text = summary(" ".join(options), line.strip(" =\n"), found)
    print("\n" + text)
    if given.out is not None:
        write_text(given.out, text)
    return int(run.returncode != 0 or bool(found))


def sanitized(log: Path) -> dict[str, str]:
    """Return the environment in which processes load the sanitizers, and write reports to files of this name."""
    libraries = (said("gcc", f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so.6"))
    return os.environ | {
        "CC": COMPILER,
        "LD_PRELOAD": " ".join(libraries),  # the second for exceptions, which the first intercepts
        "ASAN_OPTIONS": f"log_path={log}:handle_sigill=1:detect_leaks=0:alloc_dealloc_mismatch=0",
        "PYTHONMALLOC": "malloc",  # or else freed objects are not freed
        "XDG_CACHE_HOME": f"{log}-cache",
        "CUDA_VISIBLE_DEVICES": "",
    }


def reports(log: Path) -> list[str]:
    """Return the reports of a run, cut after some lines."""
    texts = (path.read_text(errors="replace") for path in sorted(log.parent.glob(f"{log.name}.*")))
    return ["\n".join(text.splitlines()[:REPORT_LINES]) for text in texts]


def summary(options: str, outcome: str, found: list[str]) -> str:
    """Return the text of a run."""
    software = ", ".join(f"{name} {version(name)}" for name in ("sidelane", "torch", "numpy"))
    lines = [
        f"machine:  {os.cpu_count()} cores",
        f"date:     {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}",
        f"commit:   {said('git', '-C', str(ROOT), 'rev-parse', '--short=8', 'HEAD')}",
        f"software: python {sys.version.split()[0]}, {software}, {said('gcc', '--version')}",
        f"command:  python tools/asan.py {options}",
        f"tests:    {outcome}",
        f"reports:  {len(found)}",
    ]
    return "\n".join(lines + found) + "\n"


def said(*command: str) -> str:
    """Return the first line that a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
