"""All-to-alls that change the layout, as sequence parallelism has them before and behind its attention.

``there``: [batch, positions / N, heads, size] becomes [batch, positions, heads / N, size]; ``back``: the other way;
``contiguous``: as many bytes without another layout, which is the least that an exchange can take. The library permutes
into contiguous parts, exchanges and permutes, in three ways (:data:`LIBRARY`). All ways of a shape take turns round by
round, the slowest rank counts, and outputs are compared before and behind.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from sidelane import config as settings
from sidelane.c3.lanes import Lanes
from sidelane.c3.strategies import named
from sidelane.c3.strategy import ideal_speedup, speedup
from sidelane.c3.workload import CPU_GEMM_FLOPS, Gemm
from sidelane.cli.launch import Rank
from sidelane.cli.table import grouped
from sidelane.config import COMPUTE, NOTHING
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import captured, coalesced, nothing_to_wait_for
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.layouts import ALONE, BESIDE, LayoutOptions, Shape
from sidelane_lab.harness.measure import Job, Meter, Problem, Rounds, WayComparison, outcome
from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.report import Cell, spread, table_of
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import OF_LIBRARY, Allowed, FlatRow, Study
from sidelane_lab.pairs.outcome import median_of_rounds, percent_of_rounds
from sidelane_lab.pairs.run import HIDE_LAUNCH_US, GemmRun, Pairs, Workers

THERE, BACK, CONTIGUOUS = LAYOUTS = "there", "back", "contiguous"
SYMMETRIC, ORDINARY = MEMORIES = "symmetric", "ordinary"
EACH, GROUPED, TOGETHER = LIBRARY = "each", "grouped", "together"
"""The library's ways: a call for each tensor; these in a group of NCCL's; one call for a buffer with all tensors."""

DTYPE = torch.bfloat16
WAN, LLAMA = (1, 32760, 40, 128), (1, 8192, 32, 128)
ROW_BYTES = (128, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""Bytes of the heads of a position that go to one rank, which lie side by side."""

TENSOR_BYTES = 64 << 20
"""Bytes of a tensor of all ranks whose rows are so wide."""

SMALL = (2, 48, 8, 16)
BESIDE_SHAPES = WAN, LLAMA, SMALL
GEMM = Gemm(8192, 8192, 8192)
MOST_CALLS, SAMPLE_US = 20, 2000.0
BYTES_PER_US = 300e3
MOST_CPU_CALLS = 2
PRIME = 32749
"""Largest prime of 15 bits: patterns are numbers below it, which no bit of a bfloat16's sign tells apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutRow(FlatRow):
    """An exchange of several tensors of one shape, alone or next to a GEMM.

    Attributes:
        shape: batch, positions and heads of all ranks, and the size of a head.
        tensors: number of tensors of that shape in an exchange.
        layout: ``there``: from positions to heads; ``back``: the other way; ``contiguous``: as many bytes in parts that
            lie side by side.
        row_bytes: heads of one position for one rank.
        bytes: bytes that leave a GPU in an exchange.
        launch: ``eager`` or ``graph``.
        implementation: ``auto`` is Sidelane's; ``nccl`` and ``gloo`` permute before and behind their exchange.
        memory: ``symmetric``, or ``ordinary``.
        variant: Sidelane's, or how the library is called: ``each`` tensor, ``grouped`` calls, or all ``together`` in
            one buffer.
        time_us: of an exchange with its permutes, median over the rounds of the slowest rank; p10_us and p90_us
            likewise. Next to a GEMM: of both together.
        gbps: ``bytes`` over the time; null next to a GEMM.
        correct: outputs were compared in this run; None when it could not run.
        note: why there is no time.
        gemm: next to which it ran; empty if it ran alone.
        gemm_us: isolated time of the GEMM, in the same rounds.
        comm_us: isolated time of the same exchange, in the same rounds.
        best_comm_us: the fastest of these, of all ways.
        speedup, ideal, percent_of_ideal: as in :class:`C3Row`.
    """

    allowed: ClassVar[Allowed] = (("layout", LAYOUTS), ("launch", LAUNCHES), ("memory", MEMORIES))
    figures: ClassVar[tuple[str, ...]] = ("time_us",)

    shape: str
    tensors: int
    layout: str
    row_bytes: int
    bytes: int
    dtype: str
    launch: str
    implementation: str
    memory: str
    variant: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    gbps: float | None
    correct: bool | None
    note: str = ""
    gemm: str = ""
    gemm_us: float | None = None
    comm_us: float | None = None
    best_comm_us: float | None = None
    speedup: float | None = None
    ideal: float | None = None
    percent_of_ideal: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutCase:
    """Tensors of one exchange.

    Attributes:
        shape: of all ranks; positions and heads are multiples of the number of ranks.
        tensors: number of tensors.
        rank, world_size, device: of this process.
    """

    shape: Shape
    tensors: int
    rank: int
    world_size: int
    device: torch.device

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def row_bytes(self) -> int:
        return self.shape[2] // self.world_size * self.shape[3] * DTYPE.itemsize

    @property
    def leaving_bytes(self) -> int:
        """Bytes that leave a GPU."""
        own = math.prod(self.shape) // self.world_size * DTYPE.itemsize
        return self.tensors * own // self.world_size * (self.world_size - 1)

    def shape_of(self, layout: str) -> Shape:
        """Shape of a rank's tensor behind an exchange."""
        batch, positions, heads, size = self.shape
        n = self.world_size
        return (batch, positions, heads // n, size) if layout == THERE else (batch, positions // n, heads, size)

    def pattern(self, seed: int, number: int, rank: int, layout: str) -> Tensor:
        """Return the contents of a tensor of a rank that has some heads (``there``) or some positions (otherwise)."""
        batch, positions, heads, size = self.shape_of(layout)
        first = (0, rank * heads) if layout == THERE else (rank * positions, 0)
        steps = (7919, 131, 31, 7)
        value = torch.full((1, 1, 1, 1), 1013 * seed + 577 * number, dtype=torch.int32, device=self.device)
        for dim, (begin, length) in enumerate(zip((0, *first, 0), (batch, positions, heads, size), strict=True)):
            places = torch.arange(begin, begin + length, dtype=torch.int32, device=self.device)
            shape = [1, 1, 1, 1]
            shape[dim] = length
            value = value + (places * steps[dim]).view(shape)
        return (value % PRIME).to(torch.int16).view(DTYPE)

    def sent(self, seed: int, number: int, layout: str) -> Tensor:
        """Return what a tensor of this rank holds before an exchange."""
        return self.pattern(seed, number, self.rank, THERE if layout == BACK else BACK)

    def right(self, seed: int, number: int, layout: str) -> Tensor:
        """Return what it holds behind one."""
        if layout != CONTIGUOUS:
            return self.pattern(seed, number, self.rank, layout)
        everyone = (self.pattern(seed, number, rank, BACK) for rank in range(self.world_size))
        parts = [tensor.flatten().tensor_split(self.world_size)[self.rank] for tensor in everyone]
        return torch.cat(parts).view(self.shape_of(BACK))


Run = Callable[[], list[Tensor]]


class LayoutExchange:
    """One way to make an exchange, with its tensors.

    Args:
        case: tensors.
        layout: of :data:`LAYOUTS`.
        implementation, memory, variant: see :class:`LayoutRow`.
        given: tensors that are sent.
        run: makes one exchange on the current stream, and returns the results.
    """

    def __init__(
        self,
        case: LayoutCase,
        layout: str,
        implementation: str,
        memory: str,
        variant: str,
        given: Sequence[Tensor],
        run: Run,
        said: Callable[[], str] = str,
    ) -> None:
        self.case, self.layout, self.implementation, self.memory = case, layout, implementation, memory
        self.variant, self._given, self._run, self._said = variant, given, run, said
        self.key: tuple[str, ...] = (layout, implementation, memory, variant)
        self._results: list[Tensor] = []
        self._thread = ThreadPoolExecutor(1) if case.device.type == "cpu" else None

    def run(self) -> None:
        """Make one exchange."""
        self._results = self._run()

    def start(self) -> Callable[[], object]:
        """Begin one; the result waits for the end on a CPU."""
        if self._thread is None:
            self.run()
            return nothing_to_wait_for
        return self._thread.submit(self.run).result

    def fill(self, seed: int) -> None:
        """Put in fresh inputs and poison outputs."""
        for tensor in self._results:
            tensor.view(torch.int16).fill_(-1)
        for number, tensor in enumerate(self._given):
            tensor.copy_(self.case.sent(seed, number, self.layout))

    def error(self, seed: int) -> str | None:
        """Say what is wrong with the outputs; None if nothing is."""
        for number, tensor in enumerate(self._results):
            right = self.case.right(seed, number, self.layout)
            if not torch.equal(tensor.reshape(right.shape).view(torch.int16), right.view(torch.int16)):
                return f"tensor {number} of {', '.join(self.key)} is wrong"
        self.variant = self._said() or self.variant
        return None

    def close(self) -> None:
        """Let go of the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def permuted(tensor: Tensor, layout: str, n: int) -> Tensor:
    """Return a view of a tensor before an exchange with the rank that each part goes to in front."""
    batch, positions, heads, size = tensor.shape
    if layout == THERE:
        return tensor.view(batch, positions, n, heads // n, size).permute(2, 0, 1, 3, 4)
    if layout == BACK:
        return tensor.view(batch, n, positions // n, heads, size).transpose(0, 1)
    return tensor.view(n, -1)


def merged(parts: Tensor, layout: str, shape: Shape) -> Tensor:
    """Return the tensor of parts that came from each rank, [n, ...]; a view where they lie so."""
    if layout == THERE:
        return parts.permute(1, 0, 2, 3, 4).reshape(shape)
    if layout == BACK:
        return parts.permute(1, 2, 0, 3, 4).reshape(shape)
    return parts.view(shape)


def library_run(case: LayoutCase, layout: str, variant: str, given: Sequence[Tensor]) -> Run:
    """Return the library's exchange of tensors in ordinary memory."""
    n, shape = case.world_size, case.shape_of(layout)

    def each() -> list[Tensor]:
        sent = [permuted(tensor, layout, n).contiguous() for tensor in given]
        came = [torch.empty_like(part) for part in sent]
        for output, part in zip(came, sent, strict=True):
            dist.all_to_all_single(output, part)
        return [merged(output, layout, shape) for output in came]

    def grouped() -> list[Tensor]:
        sent = [permuted(tensor, layout, n).contiguous() for tensor in given]
        came = [torch.empty_like(part) for part in sent]
        with coalesced(None, case.device):
            for output, part in zip(came, sent, strict=True):
                dist.all_to_all_single(output, part)
        return [merged(output, layout, shape) for output in came]

    def together() -> list[Tensor]:
        views = [permuted(tensor, layout, n) for tensor in given]
        sent = views[0].new_empty(n, len(views), *views[0].shape[1:])
        torch.stack(views, 1, out=sent)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        return [merged(came[:, number], layout, shape) for number in range(len(views))]

    return {EACH: each, GROUPED: grouped, TOGETHER: together}[variant]


class LayoutExchanges:
    """Ways to make the exchanges of a case. Collective.

    Args:
        comm: communicator of Sidelane's.
        case: tensors.
    """

    def __init__(self, comm: Communicator, case: LayoutCase) -> None:
        self._comm, self._case = comm, case
        self._tensors: dict[tuple[str, str, bool], list[Tensor]] = {}

    def ways(self, layouts: Sequence[str], beside: str) -> list[LayoutExchange]:
        """Make all ways of some layouts; ``beside``: what Sidelane's calls are told of."""
        found = []
        for layout in layouts:
            found += [self._of_library(layout, variant) for variant in self._variants(layout)]
            found += [self._own(layout, memory, beside) for memory in MEMORIES]
        return found

    def _variants(self, layout: str) -> list[str]:
        """Return the library's ways; parts that lie side by side need no buffer for all, and Gloo has no groups."""
        left_out = {GROUPED} if self._case.device.type == "cpu" else set()
        left_out |= {TOGETHER} if layout == CONTIGUOUS else set()
        return [one for one in LIBRARY if one == EACH or (self._case.tensors > 1 and one not in left_out)]

    def _given(self, layout: str, memory: str, is_output: bool = False) -> list[Tensor]:
        """Return tensors for one side of an exchange; all ways of a kind of memory share them."""
        has_heads = (layout == THERE) is is_output if layout != CONTIGUOUS else False
        key = memory, THERE if has_heads else BACK, is_output
        if key not in self._tensors:
            shape = self._case.shape_of(key[1])

            def make() -> Tensor:
                if memory == SYMMETRIC:
                    return self._comm.empty(*shape, dtype=DTYPE)
                return torch.empty(shape, dtype=DTYPE, device=self._case.device)

            self._tensors[key] = [make() for _ in range(self._case.tensors)]
        return self._tensors[key]

    def _of_library(self, layout: str, variant: str) -> LayoutExchange:
        given, name = self._given(layout, ORDINARY), "gloo" if self._case.device.type == "cpu" else "nccl"
        run = library_run(self._case, layout, variant, given)
        return LayoutExchange(self._case, layout, name, ORDINARY, variant, given, run)

    def _own(self, layout: str, memory: str, beside: str) -> LayoutExchange:
        given, output = self._given(layout, memory), self._given(layout, memory, is_output=True)
        dims = {THERE: {"scatter_dim": 2, "gather_dim": 1}, BACK: {"scatter_dim": 1, "gather_dim": 2}}.get(layout, {})
        options: dict[str, Any] = {**dims, "beside": beside}
        pair = (output, given) if dims else tuple([tensor.view(-1) for tensor in one] for one in (output, given))

        def run() -> list[Tensor]:
            self._comm.all_to_all(*pair, **options)
            return output

        def said() -> str:
            choice = self._comm.last_choice()
            return "" if choice is None else choice.candidate.variant

        return LayoutExchange(self._case, layout, "auto", memory, "", given, run, said)


def shapes_of(options: LayoutOptions, rank: Rank) -> list[Shape]:
    """Return the shapes that are measured, positions and heads as multiples of the number of ranks."""
    n = rank.world_size
    if options.shapes:
        chosen = list(options.shapes)
    elif rank.device.type == "cpu":
        chosen = [SMALL]
    else:
        chosen = [WAN, LLAMA]
        for nbytes in ROW_BYTES:
            size = 64 if nbytes <= 512 else 128
            heads = n * nbytes // (size * DTYPE.itemsize)
            chosen.append((1, TENSOR_BYTES // (heads * size * DTYPE.itemsize), heads, size))
    return list(dict.fromkeys(rounded(shape, n) for shape in chosen))


def rounded(shape: Shape, n: int) -> Shape:
    """Round positions and heads up to multiples of the number of ranks.

    >>> rounded((1, 10, 7, 64), 4)
    (1, 12, 8, 64)
    """
    batch, positions, heads, size = shape
    return batch, -(-positions // n) * n, -(-heads // n) * n, size


def _measure(rank: Rank, options: LayoutOptions, sender: Sender) -> Iterator[LayoutRow]:
    """Make the rows. Collective."""
    if rank.device.type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    shapes = shapes_of(options, rank)
    usual = {rounded(shape, rank.world_size) for shape in BESIDE_SHAPES}
    beside = [shape for shape in shapes if options.shapes or shape in usual]
    meter = make_meter(rank, options.step_s)
    config = dataclasses.replace(settings.current(), timeout_s=options.step_s, beside=NOTHING)
    study = _Study(meter, options, Communicator(device=rank.device, config=config))
    sender.steps = (ALONE in options.parts) * len(shapes) + (BESIDE in options.parts) * len(beside)
    for part, some in ((ALONE, shapes), (BESIDE, beside)):
        for shape in some if part in options.parts else ():
            case = LayoutCase(shape, options.tensors, rank.rank, rank.world_size, rank.device)
            sender.step(f"{options.tensors} tensors of {case.name}{', next to a GEMM' * (part == BESIDE)}")
            yield from study.alone(case) if part == ALONE else study.beside(case)
    study.close()


class _Study:
    """The part of one rank, which times exchanges together with the other ranks."""

    def __init__(self, meter: Meter, options: LayoutOptions, comm: Communicator) -> None:
        self._meter, self._options, self._comm = meter, options, comm
        self._seeds = itertools.count(options.seed + 1)
        self._lanes = Lanes.on(meter.device)

    def close(self) -> None:
        self._meter.finish("layouts")
        self._comm.close()

    def alone(self, case: LayoutCase) -> Iterator[LayoutRow]:
        """Measure every way, eager and in graphs. Collective."""
        compared = WayComparison[tuple[str, ...], tuple[Callable[[], object], int]]()
        chosen = self._options.launches or LAUNCHES
        launches = [one for one in chosen if one == LAUNCHES[0] or case.device.type != "cpu"]
        with self._meter.on_stream():
            exchanges = LayoutExchanges(self._comm, case)
            # One each for a launch: results of a graph lie where it was captured.
            ways: dict[tuple[str, ...], LayoutExchange] = {
                (launch, *way.key): way for launch in launches for way in exchanges.ways(LAYOUTS, NOTHING)
            }
            for key, way in ways.items():
                compared.add(key, self._ready(way, key[0]))
            jobs = {key: Job(run, repeats, calls_of(case)) for key, (run, repeats) in compared.ready.items()}
            if jobs:
                compared.rounds = self._rounds(jobs)
            compared.check_again(lambda key, timed: self._checked(ways[key], timed[0]))
        for key, way in ways.items():
            names = (*way.key[:-1], way.variant)
            yield _row(case, key[0], names, compared.rounds.get(key), compared.problems.get(key))
            way.close()

    def beside(self, case: LayoutCase) -> Iterator[LayoutRow]:
        """Measure every way that changes the layout alone and next to a GEMM, the exchange first. Collective."""
        gemm_of = gemm_on(case.device)
        problems: dict[tuple[str, ...], Problem] = {}
        with self._meter.on_stream(), Workers() as workers:
            ways = {way.key: way for way in LayoutExchanges(self._comm, case).ways((THERE, BACK), COMPUTE)}
            gemm = GemmRun(gemm_of, case.device)
            gemm.fill(next(self._seeds))
            pairs = Pairs(gemm, self._lanes, workers)
            launches = {key: pairs.launch(named("conccl"), way) for key, way in ways.items()}  # type: ignore[arg-type]

            def checked(key: tuple[str, ...]) -> None:
                gemm.poison()
                problem = self._checked(ways[key], launches[key], gemm)
                if problem is not None:
                    problems[key] = problem

            for key in ways:
                checked(key)
            able = [key for key in ways if key not in problems]
            hide_us = 0.0 if case.device.type == "cpu" else HIDE_LAUNCH_US
            jobs: dict[Any, Job] = {"gemm": Job(gemm.run, hide_launch_us=hide_us)}
            for key in able:
                jobs[key, "alone"] = Job(ways[key].run, hide_launch_us=hide_us)
                jobs[key, "both"] = Job(launches[key], hide_launch_us=hide_us)
            rounds = self._rounds(jobs)
            for key in able:
                checked(key)
        for layout in (THERE, BACK):
            alone = {key: rounds[key, "alone"].times_us for key in able if key[0] == layout and key not in problems}
            best = min(alone.values(), key=statistics.median, default=())
            for key, way in ways.items():
                if key[0] != layout:
                    continue
                columns: dict[str, Any] = {"gemm": gemm_of.name}
                both = rounds.get((key, "both"))
                if key in alone and both is not None:
                    series = rounds["gemm"].times_us, best, both.times_us
                    columns |= {
                        "gemm_us": statistics.median(series[0]),
                        "comm_us": statistics.median(alone[key]),
                        "best_comm_us": statistics.median(best),
                        "speedup": median_of_rounds(speedup, *series),
                        "ideal": median_of_rounds(ideal_speedup, *series[:2]),
                        "percent_of_ideal": percent_of_rounds(*series),
                    }
                names = (*key[:-1], way.variant)
                yield _row(case, LAUNCHES[0], names, both, problems.get(key), **columns)
                way.close()

    def _ready(self, way: LayoutExchange, launch: str) -> tuple[Callable[[], object], int] | Problem:
        """Check a way, and bring it into the form that is timed: what runs, and how often."""
        problem = self._checked(way, way.run)
        if problem is not None:
            return problem
        calls = calls_of(way.case)
        if launch == LAUNCHES[0]:
            return way.run, calls
        graphs: list[torch.cuda.CUDAGraph] = []
        refused = self._meter.attempt(lambda: graphs.append(captured(way.run, calls)))
        if refused is not None:
            return Problem(refused)
        return self._checked(way, graphs[0].replay) or (graphs[0].replay, 1)

    def _checked(self, way: LayoutExchange, run: Callable[[], object], gemm: GemmRun | None = None) -> Problem | None:
        """Run on fresh inputs and poisoned outputs, and compare. Collective."""
        seed, label = next(self._seeds), ", ".join(way.key)

        def step() -> None:
            way.fill(seed)
            run()

        def compare() -> str | None:
            return way.error(seed) or (None if gemm is None else gemm.error())

        return self._meter.check(label, step, compare)

    def _rounds(self, jobs: Mapping[Any, Job]) -> dict[Any, Rounds]:
        return self._meter.rounds(jobs, warmup=self._options.warmup, repeats=self._options.repeats)


def gemm_on(device: torch.device) -> Gemm:
    """Return the GEMM that runs beside exchanges, divided where a CPU core multiplies."""
    if device.type != "cpu":
        return GEMM
    divisor = 1
    while GEMM.scaled(divisor).flops > CPU_GEMM_FLOPS:
        divisor *= 2
    return dataclasses.replace(GEMM, dtype="float32").scaled(divisor)


def calls_of(case: LayoutCase) -> int:
    """Return the exchanges of a sample: as many as take about two milliseconds, 20 at most."""
    if case.device.type == "cpu":
        return MOST_CPU_CALLS
    return max(1, min(MOST_CALLS, round(SAMPLE_US / (30.0 + case.leaving_bytes / BYTES_PER_US))))


def _row(
    case: LayoutCase,
    launch: str,
    names: Sequence[str],
    rounds: Rounds | None,
    problem: Problem | None,
    **more: Any,
) -> LayoutRow:
    layout, implementation, memory, variant = names
    columns = outcome(rounds, problem)
    time_us = columns["time_us"]
    return LayoutRow(
        shape=case.name,
        tensors=case.tensors,
        layout=layout,
        row_bytes=case.row_bytes,
        bytes=case.leaving_bytes,
        dtype=str(DTYPE).removeprefix("torch."),
        launch=launch,
        implementation=implementation,
        memory=memory,
        variant=variant,
        gbps=None if time_us is None or more else case.leaving_bytes / time_us / 1e3,
        **columns,
        **more,
    )


def _over_library(row: LayoutRow, same: Sequence[LayoutRow]) -> str:
    """Return the library's best time for the same over that of a row; more than 1: the row is faster."""
    theirs = [one for one in same if one.layout == row.layout and one.implementation in OF_LIBRARY]
    alike = [one.time_us for one in theirs if one.time_us]
    return f"{min(alike) / row.time_us:.3f}" if alike and row.time_us and row.implementation not in OF_LIBRARY else ""


def _over_contiguous(row: LayoutRow, same: Sequence[LayoutRow]) -> str:
    """Return the time of a row over that of the contiguous exchange of the same implementation and memory."""
    alike = [
        one.time_us
        for one in same
        if one.layout == CONTIGUOUS
        and (one.implementation, one.memory) == (row.implementation, row.memory)
        and one.time_us
    ]
    return f"{row.time_us / min(alike):.3f}" if alike and row.time_us and row.layout != CONTIGUOUS else ""


WHO: Mapping[str, Cell] = {
    "<layout": "layout",
    "<implementation": "implementation",
    "<memory": "memory",
    "<variant": "variant",
}
TIMES: Mapping[str, Cell] = {"time\nus": "time_us", "p10-p90\nus": spread}
ALONE_COLUMNS: Mapping[str, Cell] = {
    **WHO,
    **TIMES,
    "GB/s": "gbps",
    "library\nover it": _over_library,
    "over con-\ntiguous": _over_contiguous,
    "<correct": "correct",
}
BESIDE_COLUMNS: Mapping[str, Cell] = {
    **WHO,
    "alone\nus": "comm_us",
    **TIMES,
    "speed-up": "speedup:.3f",
    "ideal": "ideal:.3f",
    "% of\nideal": "percent_of_ideal:.0f",
    "<correct": "correct",
}


def layout_tables(rows: Sequence[LayoutRow]) -> list[Any]:
    """Make a table for each shape and launch, and one for each shape next to a GEMM."""
    tables = []
    by = grouped(rows, lambda row: (row.shape, row.tensors, row.launch, row.gemm), ordered=False)
    for (_, _, launch, gemm), alike in by:
        first = alike[0]
        title = f"{first.tensors} tensors of {first.shape}, rows of {first.row_bytes} bytes, {first.dtype}, {launch}"
        if gemm:
            gemm_us = next((row.gemm_us for row in alike if row.gemm_us is not None), None)
            title += f", next to {gemm}" + ("" if gemm_us is None else f" of {gemm_us:.0f} us")
        columns = BESIDE_COLUMNS if gemm else ALONE_COLUMNS
        tables.append(table_of(title, alike, columns, keys=4, value=None))
    return tables


STUDY = Study(
    name="layouts",
    title="All-to-alls with a layout",
    legend=(
        "Exchanges of sequence parallelism. there: from positions to heads; back; contiguous: as many bytes in parts "
        "that lie side by side. The library permutes before and behind: each tensor by itself, calls in one group, or "
        "all tensors together in one buffer. Medians over rounds of the slowest rank. 'library over it': the library's "
        "fastest way over the time of the line; 'over contiguous': the time over that of the same implementation and "
        "memory without another layout. Next to a GEMM the exchange is released first; % of ideal is that of the C3 "
        "study, with the fastest exchange of the table."
    ),
    row=LayoutRow,
    tables=layout_tables,
    measure=_measure,
    progress="layouts",
)
