"""Run every kernel under compute-sanitizer's four tools, and mistakes made on purpose, which they must find.

    python tools/sanitize_kernels.py --out results/h100/sanitizer.json

needs one GPU, which all ranks share. Each process runs many cases; where a tool finds something it is taken apart until
each finding is one case's. Exit status 1 if a kernel has an error, a planted mistake was not found, or a case did not
come to its end. What the tools cannot judge stands in the file (``sanitizer.rows.LIMITS``).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from outputs import file_to_write, folder_to_write
from sanitizer import jobs, ranks
from sanitizer.cases import cases
from sanitizer.jobs import Job, Outcome
from sanitizer.planted import PLANTED, TOOLS
from sanitizer.report import Report
from sanitizer.rows import Row, concerns, identify, is_bad, row_of_planted, table, write

PROBES = ("ll", "direct_push", "direct_reduce")
GROUPS = 4


def main() -> int:
    if sys.argv[1:2] == ["child"]:
        return _child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=file_to_write, help="result file")
    parser.add_argument("--tools", default=",".join(TOOLS), help="some of them")
    parser.add_argument("--only", default="", help="kernels whose name holds this; no planted mistakes")
    parser.add_argument("--way", choices=("auto", *ranks.WAYS), default="auto", help="a launch a rank, or one for all")
    parser.add_argument("--seconds", type=float, default=600.0, help="what has not ended by then is not run")
    parser.add_argument("--workers", type=int, default=12, help="processes at a time")
    parser.add_argument("--logs", type=folder_to_write, help="folder for what the tools wrote; none: a temporary one")
    parser.add_argument("--list", action="store_true", help="print the cases, and run nothing")
    given = parser.parse_args()
    if given.list:
        for number, case in enumerate(cases()):
            print(number, *identify(case).values())
        return 0
    if not jobs.find_sanitizer() or not torch.cuda.is_available():
        print(f"[sidelane] a GPU and {jobs.SANITIZER} are needed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        study = Study(folder, given.tools.split(","), given.only, given.workers, time.monotonic() + given.seconds)
        if given.out:
            study.keep = lambda: write(given.out, study.rows)
        study.run(given.way)
    print(table(study.rows))
    return 1 if any(is_bad(row) for row in study.rows) else 0


class Study:
    """All jobs, and the rows that come of them.

    Args:
        folder: for logs and compiled kernels.
        tools: to use.
        only: part of the names of kernels.
        workers: processes at a time.
        deadline: of ``time.monotonic``.

    Attributes:
        rows: so far.
        keep: called when there are more of them.
    """

    def __init__(self, folder: Path, tools: Sequence[str], only: str, workers: int, deadline: float) -> None:
        self.folder, self.tools, self.deadline = folder, tools, deadline
        self.every = cases()
        self.names = [identify(case) for case in self.every]
        self.numbers = [number for number, name in enumerate(self.names) if only in name["kernel"]]
        self.planted = [] if only else [(tool, name) for tool in tools for name in PLANTED if concerns(name, tool)]
        self.rows: list[Row] = []
        self.keep: Callable[[], object] = lambda: None
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)
        self._workers = workers

    def run(self, way: str) -> None:
        """Run everything; ``way`` as in the command line."""
        began = time.monotonic()
        ways = dict.fromkeys(self.tools, way if way in ranks.WAYS else ranks.APART)
        self._compile(set(ways.values()))
        probes = [self._pool.submit(self._probe, tool) for tool in self.tools if way == "auto"]
        mistakes = [Job(tool, ranks.TOGETHER, planted=name) for tool, name in self.planted]
        waiting = {self._pool.submit(self._run, job) for job in mistakes}
        ways |= dict(probe.result() for probe in probes)
        self._compile(set(ways.values()) - {ranks.APART})
        print(f"[{time.monotonic() - began:.0f} s] launches: {ways}", flush=True)
        for tool in self.tools:
            parts = [tuple(part) for part in _dealt(self.numbers, GROUPS) if part]
            waiting |= {self._pool.submit(self._run, Job(tool, ways[tool], part)) for part in parts}
        while waiting:
            done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                job, outcome = future.result()
                waiting |= {self._pool.submit(self._run, more) for more in self._judge(job, outcome)}
                self.keep()
                what = job.planted or f"{len(job.numbers)} cases"
                said = outcome.report.first or outcome.report.trouble
                trouble = f"; {outcome.trouble[:300]}" if outcome.trouble else ""
                clock = f"[{time.monotonic() - began:.0f} s] {job.tool} {job.way} {what}: {outcome.seconds:.0f} s"
                print(f"{clock}, errors: {outcome.report.errors} {said}{trouble}", flush=True)

    def _run(self, job: Job) -> tuple[Job, Outcome]:
        if time.monotonic() > self.deadline:
            return job, Outcome(Report(None), {}, job.numbers[0] if job.numbers else None, "not run", 0.0)
        return job, jobs.run(job, self.folder, self.deadline)

    def _judge(self, job: Job, outcome: Outcome) -> Iterable[Job]:
        """Rows of what is known now; jobs for what is not."""
        late = time.monotonic() > self.deadline
        if job.planted:
            self.rows.append(row_of_planted(job, outcome))
        elif jobs.is_clean(outcome) or len(job.numbers) == 1 or late:
            number = job.numbers[0]
            again = None if late or len(job.numbers) > 1 else jobs.second_way(job, outcome, self.every[number].ranks)
            if again is not None:
                return [again]
            self.rows += [self._row(job, outcome, number) for number in job.numbers]
        else:
            return jobs.split(job, outcome)
        return []

    def _row(self, job: Job, outcome: Outcome, number: int) -> Row:
        seconds, problem = outcome.ended.get(number, (None, ""))
        report, one = outcome.report, len(job.numbers) == 1
        single = self.every[number].ranks == 1 or self.names[number]["kernel"] == "reduce_kernel"
        way = "a launch a rank" if job.way == ranks.APART or single else "one launch for all ranks"
        races = f"{report.warnings} warnings" if report.warnings else ""
        told = (outcome.trouble or report.trouble) if one or seconds is None else ""
        note = "; ".join(word for word in (self.every[number].words(), way, races, problem, told) if word)
        known = one or jobs.is_clean(outcome)
        return {
            **self.names[number],
            "tool": job.tool,
            "errors": report.errors if known else None,
            "first_error": report.first if known else "",
            "seconds": None if seconds is None else round(seconds, 3),
            "note": note,
        }

    def _probe(self, tool: str) -> tuple[str, str]:
        """Whether kernels of several ranks run next to each other under a tool."""
        found = [n for n in range(len(self.every)) if self.names[n]["kernel"] in PROBES and self.every[n].ranks == 4]
        first = {self.names[number]["kernel"]: number for number in reversed(found)}
        job = Job(tool, ranks.APART, tuple(sorted(first.values())))
        outcome = jobs.run(job, self.folder, self.deadline)
        good = outcome.stopped is None and not outcome.trouble
        print(f"{tool}: ranks apart {'run' if good else 'do not run'}: {outcome}", flush=True)
        return tool, ranks.APART if good else ranks.TOGETHER

    def _compile(self, ways: Iterable[str]) -> None:
        major, minor = torch.cuda.get_device_capability()
        shares = [(way, part) for way in ways for part in _dealt(self.numbers, self._workers) if part]
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            compilers = [pool.submit(self._compile_share, way, part, 10 * major + minor) for way, part in shares]
        for compiler in compilers:
            compiler.result()

    def _compile_share(self, way: str, numbers: Sequence[int], capability: int) -> None:
        arguments = ["--way", way, "--compile", str(capability), "--numbers", ",".join(map(str, numbers))]
        command = [sys.executable, __file__, "child", *arguments, "--folder", str(self.folder)]
        left = max(1.0, self.deadline - time.monotonic())
        subprocess.run(command, env=jobs.environment(self.folder), timeout=left, check=True)


def _dealt(numbers: Sequence[int], hands: int) -> list[list[int]]:
    return [list(numbers[hand::hands]) for hand in range(hands)]


def _child(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=ranks.WAYS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--progress", type=Path)
    parser.add_argument("--compile", type=int)
    parser.add_argument("--plant", choices=tuple(PLANTED))
    parser.add_argument("--numbers", default="", type=lambda text: [int(word) for word in text.split(",") if word])
    given = parser.parse_args(arguments)
    if given.compile:
        ranks.compile_cases(given.numbers, given.way, given.compile, given.folder)
    elif given.plant:
        ranks.run_planted(given.plant, given.folder)
    else:
        ranks.run_cases(given.numbers, given.way, given.progress, given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
