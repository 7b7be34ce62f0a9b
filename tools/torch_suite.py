"""Run PyTorch's own tests of process groups against Sidelane's and against Gloo on CPU ranks; `make test-torch`.

The tests ship with torch (``torch.testing._internal.distributed.distributed_test``). Each starts its ranks as processes
that are forked from this one. A test takes part if torch has it for Gloo; then the same test runs on the other group.

``--device gpu`` does the same against NCCL, on the GPUs that are here. GPUs are lent by the minute, so ``--jobs`` of
them run side by side, and both groups at once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from outputs import file_to_write, folder_to_write
from sidelane.cli.output import write_text

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
GROUPS = {"cpu": ("gloo", "sidelane"), "gpu": ("nccl", "sidelane")}
SECONDS = 60  # that a test may take
RANKS, MANY_RANKS = {"cpu": 4, "gpu": 2}, 8
WANTS_MANY = "Skipped due to small world size."
ASK_FOR_GLOO = "test_accumulate_gradients_no_sync"  # these do something only where the backend is called gloo


def suite(group: str, ranks: int, device: str) -> type[unittest.TestCase]:
    """The test class of torch, with ranks on a group of that name."""
    folder = tempfile.mkdtemp(prefix="sidelane-torch-suite-")
    theirs_is = GROUPS[device][0]
    os.environ |= {
        "BACKEND": theirs_is,  # what decides which tests there are
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": folder,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS),
        "OMP_NUM_THREADS": "1",
        # A process that has asked the driver cannot be forked.
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
    }
    import torch
    import torch.utils._triton

    if device == "gpu":
        stay_out_of_cuda(torch)
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test as theirs

    import sidelane
    import sidelane.integrations.torch_world  # here, since the ranks are copies of this process

    torch.set_num_threads(1)
    sidelane.register()
    begin = theirs.dist.init_process_group
    theirs.dist.init_process_group = lambda *args, **options: begin(*args, **{**options, "backend": group})
    theirs.INIT_METHOD = "env://"
    for feature in ("ddp", "subgroup", "gpu", "cuda"):
        theirs.DistTestCases.backend_feature[feature].add(group)

    if device == "gpu":  # before each test it draws seeds, for which torch starts the driver; the ranks do it again
        common_utils.TestCase.setUp = lambda self: None  # type: ignore[method-assign]

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            asks = device == "gpu" or self._testMethodName.startswith(ASK_FOR_GLOO)
            theirs.BACKEND = theirs_is if asks else group  # of the ranks
            if device == "gpu" and driver_is_started():
                raise RuntimeError("torch_suite: something has started the CUDA driver in the process that forks")
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    Suite.setUpClass()  # type: ignore[no-untyped-call]
    return Suite


def stay_out_of_cuda(torch: Any) -> None:
    """Keep this process from initialising CUDA, by which its forks could not any more. Whoever tries is told."""
    count = torch.cuda._device_count_nvml()
    if count < 0:
        raise RuntimeError("torch_suite: NVML does not tell how many GPUs there are, and CUDA must not be asked here")
    parent, begin = os.getpid(), torch.cuda._lazy_init

    def lazily() -> None:
        if os.getpid() == parent:
            raise RuntimeError("torch_suite: CUDA would be initialised in the process that forks")
        begin()

    torch._C._cuda_getDeviceCount = lambda: count  # which marks its caller's forks as bad
    torch.cuda._lazy_init = lazily
    has_triton = torch.utils._triton.has_triton  # asks the device, if only what common_device_type is to be like
    torch.utils._triton.has_triton = lambda: os.getpid() != parent and has_triton()


def driver_is_started() -> bool:
    """True where a fork of this process cannot use CUDA any more. Asks without starting it."""
    context = ctypes.c_void_p()
    return bool(ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0)


def run(
    group: str, ranks: int, pattern: str, out: Path, device: str = "cpu", share: int = 0, jobs: int = 1
) -> dict[str, list[str]]:
    """Run one of so many shares of the tests whose names fit, and write what came of each: a status, and a reason.

    A test of parts of the world wants 8 ranks, and skips itself with fewer: it runs once more, with 8.
    """
    cases = suite(group, ranks, device)
    names = [name for name in unittest.TestLoader().getTestCaseNames(cases) if re.search(pattern, name)][share::jobs]
    found: dict[str, list[str]] = {}
    for number, name in enumerate(names):
        began = time.monotonic()
        found[name] = outcome(cases(name))
        if found[name] == [SKIPPED, WANTS_MANY] and device == "cpu":
            os.environ["WORLD_SIZE"] = str(MANY_RANKS)
            found[name] = outcome(cases(name))
            os.environ["WORLD_SIZE"] = str(ranks)
        out.write_text(json.dumps(found, indent=1))
        took = time.monotonic() - began
        print(f"{number + 1}/{len(names)} {group} {name}: {' '.join(found[name])[:150]} ({took:.1f} s)", flush=True)
    return found


def outcome(case: unittest.TestCase) -> list[str]:
    """Run one test: its status, and a reason."""
    result = unittest.TestResult()
    case.run(result)
    bad = [*result.failures, *result.errors]
    if bad:
        return [FAILED, reason_of(bad[0][1])]
    return [SKIPPED, result.skipped[0][1]] if result.skipped else [PASSED, ""]


def reason_of(trace: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = [line for line in trace.splitlines() if re.match(r"\s*[\w.]*(Error|Exception|Exit)\b.*:", line)]
    return (lines[-1] if lines else trace.strip().splitlines()[-1]).strip()[:300]


def table(results: dict[str, dict[str, list[str]]], ranks: int, torch_version: str, device: str = "cpu") -> str:
    """The page for the documentation."""
    theirs_is, ours_is = GROUPS[device]
    label = {"gloo": "Gloo", "nccl": "NCCL"}[theirs_is]
    where = f"{ranks} CPU ranks, and with {MANY_RANKS} where a test wants more" if device == "cpu" else f"{ranks} GPUs"
    options = "" if device == "cpu" else ' TORCH_TESTS="--device=gpu"'
    gloo, ours = results[theirs_is], results[ours_is]
    names = sorted(set(gloo) & set(ours))
    pairs = Counter((gloo[name][0], ours[name][0]) for name in names)
    ran = sum(count for (theirs, _), count in pairs.items() if theirs == PASSED)
    both = pairs[PASSED, PASSED]
    lines = [
        f"# Compatibility with PyTorch's own tests{'' if device == 'cpu' else ' on GPUs'}",
        "",
        textwrap.fill(
            f"`make test-torch{options}` runs the process-group tests that ship with torch (`distributed_test.py`) on "
            f"{label} and the Sidelane group, with {where}. This page is what `tools/torch_suite.py` wrote, with torch "
            f"{torch_version}.{' No GPU took part.' if device == 'cpu' else ''}",
            115,
            break_on_hyphens=False,
        ),
        "",
        f"Of {len(names)} tests, {label} passes {ran}; the Sidelane group passes {both} of these "
        f"({100 * both / max(ran, 1):.0f}%).",
        "",
        f"| {label} | Sidelane | tests |",
        "|---|---|---|",
        *(f"| {theirs} | {mine} | {count} |" for (theirs, mine), count in sorted(pairs.items())),
        "",
        "## What differs",
        "",
        f"| test | {label} | Sidelane | what it says |",
        "|---|---|---|---|",
    ]
    for name in names:
        if gloo[name][0] != ours[name][0]:
            why = (ours[name][1] or gloo[name][1]).replace("|", "\\|")[:160]
            lines.append(f"| `{name}` | {gloo[name][0]} | {ours[name][0]} | {why} |")
    skipped = Counter(gloo[name][1] for name in names if (gloo[name][0], ours[name][0]) == (SKIPPED, SKIPPED))
    lines += ["", "## The most frequent reasons to skip a test on both", "", "| tests | reason |", "|---|---|"]
    lines += [f"| {count} | {why.replace('|', '/')[:160]} |" for why, count in skipped.most_common(5)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=tuple(GROUPS), default="cpu")
    parser.add_argument("--group", help="run on this one alone, and write no page")
    parser.add_argument("--ranks", type=int, help=f"default: {RANKS}")
    parser.add_argument("--match", default="", help="regular expression for names of tests")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the tests of a group")
    parser.add_argument("--share", type=int, default=None, help="with --group: one of the shares")
    parser.add_argument("--results", type=folder_to_write, default=Path("report"), help="folder for what is found")
    parser.add_argument("--page", type=file_to_write, help="write the table of both there")
    given = parser.parse_args()
    groups, ranks = GROUPS[given.device], given.ranks or RANKS[given.device]
    if given.group not in (None, *groups):
        parser.error(f"--group (value={given.group}, allowed={', '.join(groups)})")
    given.results.mkdir(parents=True, exist_ok=True)
    files = {
        group: [given.results / f"torch_suite_{group}_{share}.json" for share in range(given.jobs)] for group in groups
    }
    if given.share is not None:
        out = files[given.group][given.share]
        found = run(given.group, ranks, given.match, out, given.device, given.share, given.jobs)
        print(Counter(status for status, _ in found.values()))
        return 0
    for file in (file for each in files.values() for file in each):
        file.unlink(missing_ok=True)
    options: list[Any] = [*("--ranks", str(ranks), "--match", given.match, "--results", str(given.results))]
    options += ["--device", given.device, "--jobs", str(given.jobs)]
    # A process each: torch's module is made for one backend.
    for some in (groups,) if given.device == "gpu" else (groups[:1], groups[1:]):
        chosen = [group for group in some if given.group in (None, group)]
        commands = [
            [sys.executable, __file__, "--group", group, "--share", str(share), *options]
            for group in chosen
            for share in range(given.jobs)
        ]
        codes = [process.wait() for process in [subprocess.Popen(command) for command in commands]]
        if any(codes):
            print(f"[sidelane] processes that did not end well: {sum(map(bool, codes))}", file=sys.stderr)
    if given.group:
        return 0
    import torch

    results = {
        group: {name: one for file in each if file.exists() for name, one in json.loads(file.read_text()).items()}
        for group, each in files.items()
    }
    page = table(results, ranks, torch.__version__.partition("+")[0], given.device)
    if given.page:
        write_text(given.page, page)
    else:
        print(page)
    lost = [name for name, (status, _) in results[groups[0]].items() if status == PASSED]
    kept = [name for name in lost if results["sidelane"].get(name, [FAILED])[0] == PASSED]
    return 0 if lost and len(kept) >= 0.9 * len(lost) else 1


if __name__ == "__main__":
    sys.exit(main())
