"""The parts that a machine is measured in: what is typed, for how long, what has to be there before, and its file.

What a part takes is reckoned from runs on two H200s. Parts of one file put their rows together in this order.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import device_tests
from sidelane_lab.cli.fused import FUSED_OPS
from sidelane_lab.model.study import TABLE_II
from sidelane_lab.papers.results import JUDGES

ROOT = Path(__file__).resolve().parent.parent.parent
SIDELANE = (sys.executable, "-m", "sidelane")
PARTS_FOLDER = "parts"
ROWS, TEXT, ALONE = "rows", "text", "alone"
LONGEST_S = 560.0
"""Of a part: calls of ten minutes begin and end around it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One command.

    Attributes:
        name: of the part.
        file: that it writes, or adds rows to, in the folder of the results.
        command: all but the option of the file; ``{out}`` stands for the folder, ``{above}`` for the folder around
            it, ``{machine}`` for what is measured.
        seconds: that it takes, about.
        timeout_s: after which it is ended.
        small: the same in its smallest form on CPU ranks; empty where it needs GPUs.
        needs: parts that must have ended well before.
        after: parts that must have, or have failed for good.
        into: the option with which it is told its file; it stands last.
        budget: the option with which it is told for how long it may begin something, if its file grows from call to
            call; else empty.
        margin_s: what it may take longer than that.
        kind: of its file: ``ROWS`` and ``TEXT`` are put together of parts, one that stands ``ALONE`` is not.
    """

    name: str
    file: str
    command: tuple[str, ...]
    seconds: float
    timeout_s: float
    small: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    into: str = "--json"
    budget: str = ""
    margin_s: float = 40.0
    kind: str = ROWS

    @property
    def study(self) -> str:
        """What a user names to have this part and those of the same file."""
        return Path(self.file).stem


def sidelane(text: str, *others: str) -> tuple[str, ...]:
    """A command of ``sidelane``."""
    return (*SIDELANE, *text.split(), *others)


def on_cpus(text: str) -> tuple[str, ...]:
    """The same between CPU ranks."""
    return sidelane(text, "--device", "cpu", "--ranks", "2")


def collectives(file: str, runs: Sequence[tuple[str, str, float, float]]) -> Iterator[Part]:
    """Parts of ``sidelane collective``: kinds, options, seconds, time-out."""
    for number, (kinds, options, seconds, timeout_s) in enumerate(runs, 1):
        asked = " ".join(f"--collective {kind}" for kind in kinds.split())
        tensors = " --tensors 2" if "--tensors" in options else ""
        yield Part(
            name=f"{file}-{number}" if len(runs) > 1 else file,
            file=f"{file}.json",
            command=sidelane(f"collective {asked} {options} --no-profile"),
            seconds=seconds,
            timeout_s=timeout_s,
            small=on_cpus(f"collective {asked} --variants b2b{tensors} --max-bytes 1K --iterations 1 --warmup 0"),
        )


MOVED, REDUCED = "all_gather all_to_all", "reduce_scatter all_reduce"
LISTS = "--tensors 8 --factor 8 --iterations 7 --min-bytes 64K --max-bytes 256M"
TINY_PAIR = "256x256x256_{size} --collective all_gather"
TINY_RUN = "--repeats 1 --warmup 0"
HEAVY = ("mb1_13G", "cb5_1.63G", "mb2_3.25G", "cb5_13G")
HUGE = ("cb5_20G", "mb2_26.5G")
LIGHT = tuple(pair for pair in TABLE_II if pair not in (*HEAVY, *HUGE))
LITTLE_ROOM = "--warmup 2 --repeats 6 --implementations nccl,dma,dma_left"
PAIRS = (
    # GEMMs of 35 ms at the power cap vary, so that they take more rounds; buffers of 20 GB leave no room for windows.
    ("light", LIGHT, "--warmup 2 --repeats 5", 220.0, 60.0),
    ("heavy", HEAVY, "--warmup 2 --repeats 9", 250.0, 90.0),
    # What one of these lacks need not hold up the other.
    *((f"huge-{number}", (pair,), LITTLE_ROOM, 65.0, 90.0) for number, pair in enumerate(HUGE, 1)),
)
FUSED_SECONDS = {"embedding_all_to_all": 75.0, "all_to_all_gemm": 75.0}
FEW_TOKENS, MANY_TOKENS = ("8b:1x4096", "70b:1x2048"), ("8b:2x4096", "8b:1x8192", "70b:1x4096")
STEP_WAYS = "nccl,nccl_ce,sidelane,compute_only,compute_only_straight"


def studies() -> Iterator[Part]:
    """All but the tests: what others need first, and what users ask for most."""
    yield from collectives(
        "collectives",
        (
            (MOVED, "--factor 2 --max-bytes 32M --iterations 7", 110, 240),
            (MOVED, "--min-bytes 64M --iterations 5", 60, 180),
            (REDUCED, "--factor 2 --max-bytes 32M --iterations 9", 110, 240),
            (REDUCED, "--min-bytes 64M --iterations 5", 100, 300),
        ),
    )
    yield Part(
        name="auto-table",
        file=f"{PARTS_FOLDER}/auto-table.json",
        command=sidelane("tune --from-results {out}/collectives.json"),
        seconds=15,
        timeout_s=60,
        small=sidelane("tune --from-results {out}/collectives.json"),
        needs=tuple(f"collectives-{number}" for number in range(1, 5)),
        into="--output",
        kind=ALONE,
    )
    yield Part(
        name="isolated",
        file="isolated.json",
        command=sidelane("tune --study c3"),
        seconds=200,
        timeout_s=LONGEST_S,
        small=on_cpus("tune --study c3 --gemm 256,256,256 --bytes 4K"),
        into="--output",
        budget="--seconds",
    )
    for number, (name, pairs, options, seconds, margin_s) in enumerate(PAIRS):
        yield Part(
            name=f"c3-{name}",
            file="c3.json",
            command=sidelane(f"c3 {' '.join(pairs)} {options} --isolated {{out}}/isolated.json --resume"),
            seconds=seconds,
            timeout_s=LONGEST_S,
            small=on_cpus(
                f"c3 {TINY_PAIR} --strategy serial --strategy conccl {TINY_RUN} --resume".format(size=f"{4 << number}K")
            ),
            needs=("isolated",),
            budget="--budget",
            margin_s=margin_s,
        )
    yield Part(
        name="heuristics",
        file="heuristics.json",
        command=sidelane("c3 --study heuristics --results {out}/c3.json --isolated {out}/isolated.json"),
        seconds=15,
        timeout_s=90,
        small=sidelane("c3 --study heuristics --results {out}/c3.json --isolated {out}/isolated.json"),
        needs=("c3-light",),
        after=tuple(f"c3-{name}" for name, *_ in PAIRS if name != "light"),
    )
    for number, (cases, seconds) in enumerate(((FEW_TOKENS, 55), (MANY_TOKENS, 80)), 1):
        yield Part(
            name=f"fsdp-{number}",
            file="fsdp.json",
            command=sidelane(f"fsdp --cases {','.join(cases)}"),
            seconds=seconds,
            timeout_s=220,
            small=on_cpus(f"fsdp --cases 8b:1x512 --layers 2 --implementations sidelane {TINY_RUN}"),
        )
    for number, case in enumerate(FEW_TOKENS, 1):
        yield Part(
            name=f"fsdp-profile-{number}",
            file="fsdp-profile.json",
            command=sidelane(f"fsdp --cases {case} --profile --repeats 4 --implementations {STEP_WAYS}"),
            seconds=40,
            timeout_s=120,
        )
    for part, seconds in (("alone", 70), ("beside", 50)):
        small = {
            "alone": f"--collective all_gather --max-bytes 64K {TINY_RUN}",
            "beside": f"--collective all_gather --pair 256x256x256_4K {TINY_RUN}",
        }
        yield Part(
            name=f"ordinary-{part}",
            file="ordinary.json",
            command=sidelane(f"ordinary --part {part}"),
            seconds=seconds,
            timeout_s=200,
            small=on_cpus(f"ordinary --part {part} {small[part]}"),
        )
    for part in ("alone", "beside"):
        yield Part(
            name=f"layouts-{part}",
            file="layouts.json",
            command=sidelane(f"layouts --part {part}"),
            seconds=60,
            timeout_s=200,
            small=on_cpus(f"layouts --part {part} --shape 1x8x4x8 {TINY_RUN}"),
        )
    for workload in ("attention", "decode", "experts", "mlp", "recommendation"):
        yield Part(
            name=f"e2e-{workload}",
            file="e2e.json",
            command=sidelane(f"e2e --workloads {workload} --seconds 6"),
            seconds=80,
            timeout_s=300,
            small=on_cpus(f"e2e --workloads {workload} --rounds 1 --steps 1"),
        )
    for op in FUSED_OPS:
        yield Part(
            name=f"fused-{op}",
            file="fused.json",
            command=sidelane(f"fused --ops {op} --repeats 9"),
            seconds=FUSED_SECONDS.get(op, 55.0),
            timeout_s=220,
            small=on_cpus(f"fused --ops {op} --repeats 1"),
        )
    for pair in ("cb1_896M", "mb1_896M"):
        yield Part(
            name=f"occupancy-{pair.partition('_')[0]}",
            file="occupancy.json",
            command=sidelane(f"c3 {pair} --study occupancy --repeats 3 --warmup 1"),
            seconds=70,
            timeout_s=200,
            small=on_cpus(f"c3 {TINY_PAIR.format(size='4K')} --study occupancy --blocks 1 --iterations 2 {TINY_RUN}"),
        )
    yield Part(
        name="process-group",
        file="process-group.json",
        command=sidelane("pg"),
        seconds=80,
        timeout_s=200,
        small=on_cpus(f"pg --operations all_reduce --bytes 1K --no-first {TINY_RUN}"),
    )
    # By themselves: NCCL 2.28 fails in groups of broadcasts behind groups of others (results/notes/performance.md).
    yield from collectives(
        "broadcasts",
        (("broadcast", "--factor 4 --max-bytes 1G --iterations 9", 45, 120), ("broadcast", LISTS, 30, 90)),
    )
    yield from collectives("lists", ((f"{MOVED} {REDUCED}", LISTS, 110, 220),))
    yield Part(
        name="chain",
        file="chain.json",
        command=sidelane("chain --max-bytes 256M"),
        seconds=90,
        timeout_s=200,
        small=on_cpus("chain --min-bytes 64K --max-bytes 64K --variants b2b --implementations dma"),
    )
    yield Part(
        name="host",
        file="host.json",
        command=sidelane("host --batches 30"),
        seconds=30,
        timeout_s=120,
        small=on_cpus("host --bytes 1K --variants b2b --calls 2 --batches 2"),
    )
    yield Part(
        name="prelaunch",
        file="prelaunch.json",
        command=sidelane("prelaunch --factor 4 --max-bytes 1G --repeats 9"),
        seconds=60,
        timeout_s=200,
        small=on_cpus(f"prelaunch --collective all_gather --variants b2b --max-bytes 1K {TINY_RUN}"),
    )
    yield Part(
        name="phases",
        file="phases.json",
        command=sidelane("phases --variants b2b"),
        seconds=40,
        timeout_s=120,
        small=on_cpus("phases --operation copy --max-bytes 1K --calls 1 --warmup 1"),
    )
    for number, options in enumerate(
        ("", "--collective reduce_scatter --collective all_reduce --variants b2b,pcpy"), 1
    ):
        yield Part(
            name=f"power-{number}",
            file="power.json",
            command=sidelane(f"power {options}"),
            seconds=90,
            timeout_s=220,
        )


LANES = 3
"""Processes of tests side by side: nothing is timed in them."""
TESTS_S = 600.0
"""Of a part's tests, one after another."""
USUAL_TEST_S = 30.0
TEST_SECONDS = {
    "fused": 440, "kernels": 250, "reach": 190, "communicator": 150, "lists": 100, "attention": 90, "crowd": 75,
    "own_parts": 75, "failure": 65, "nodes": 65, "prelaunch": 60, "process_group": 55,
}  # fmt: skip
"""Of the longer files."""
Tests = tuple[float, tuple[str, ...]]
"""Seconds, about, and files or tests, as pytest takes them."""


def parts_of_device_tests() -> Iterator[Part]:
    """All tests for GPUs, what takes longest first, in parts of about ``TESTS_S`` of one process."""
    groups: list[list[Tests]] = []
    for tests in sorted(tests_by_file(), reverse=True):
        group = next((group for group in groups if sum(s for s, _ in (*group, tests)) <= TESTS_S), None)
        if group is None:
            groups.append([tests])
        else:
            group.append(tests)
    for number, group in enumerate(groups, 1):
        names = (name for _, names in group for name in names)
        yield Part(
            name=f"device-tests-{number}",
            file="device-tests.txt",
            command=(sys.executable, "tools/device_tests.py", "--lanes", str(LANES), *names),
            seconds=sum(seconds for seconds, _ in group) / LANES + 20,
            timeout_s=LONGEST_S,
            into="--summary",
            kind=TEXT,
        )


def tests_by_file() -> Iterator[Tests]:
    """Each file; one that takes very long in two halves."""
    for path in map(Path, device_tests.files()):
        name = path.relative_to(ROOT).as_posix()
        seconds = TEST_SECONDS.get(path.stem.removeprefix("test_").removeprefix("device_"), USUAL_TEST_S)
        if seconds <= TESTS_S / 2:
            yield seconds, (name,)
            continue
        found = re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        for half in (found[0::2], found[1::2]):
            yield seconds / 2, tuple(f"{name}::{test}" for test in half)


def claims() -> Part:
    """Predictions held against what was measured."""
    return Part(
        name="claims",
        file="claims.json",
        command=sidelane("claims --machine {machine} --no-ranges --results {above}"),
        seconds=30,
        timeout_s=120,
        after=tuple(part.name for part in studies() if part.study in JUDGES),
        kind=ALONE,
    )


def all_parts() -> tuple[Part, ...]:
    """In the order in which they are run."""
    return (*studies(), *parts_of_device_tests(), claims())
