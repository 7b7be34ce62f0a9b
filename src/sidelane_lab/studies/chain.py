"""GEMM to collective and back (DMA collectives paper, 4.3 and Figure 16): producer, all-gather, consumer.

    producer GEMM writes this rank's shard -> all-gather -> consumer GEMM reads everyone's

All three are handed to one stream. The end of the producer releases the copies, and their end the consumer, by flags on
the device; no host stands in between. Eager and as one graph, for every implementation, next to both GEMMs alone; and
with Sidelane's copies prelaunched, which a graph cannot hold (docs/internals/prelaunch.md):

    host      arm(): copies, signals   produce()   trigger()         consume()
    stream    ........................ GEMM ------ write | wait done . GEMM
    engines   wait trigger ............................. copies, signals . done
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sidelane.program.builders import variants
from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.options import (
    LAUNCHES,
    StudyOptions,
    either,
    implementations,
    names,
    size_span,
    study_command,
)
from sidelane_lab.harness.report import Cell, tables_by, text_of
from sidelane_lab.harness.study import IMPLEMENTATIONS, OF_LIBRARY, FlatRow, Study
from sidelane_lab.harness.table import MISSING, Line, Table, grouped, number
from sidelane_lab.harness.ways import Job, Rounds, Way, outcome
from sidelane_lab.pairs.workload import Gemm

if TYPE_CHECKING:
    import torch

    from sidelane.session.prelaunch import Prelaunched
    from sidelane_lab.baselines.candidate import Entrant, Implementation
    from sidelane_lab.baselines.reference import Case
    from sidelane_lab.baselines.roster import Roster
    from sidelane_lab.harness.launch import LaunchTarget, Rank
    from sidelane_lab.harness.running import Sender
    from sidelane_lab.machines.spec import Machine

CALLS = 8
"""Chains in a sample."""

WIDTH = 4096
"""Columns of what the producer makes, and its inner dimension: a layer of an 8B model."""

CONSUMED = 512
"""Columns of what the consumer makes: it reads all that was gathered, for an eighth of the producer's work a rank."""


ALONE, ALONE_AS_GRAPH = "GEMMs alone", "GEMMs alone, in a graph"
PRELAUNCHED = "prelaunched"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOptions(StudyOptions):
    """Measure a GEMM, an all-gather of its result and a GEMM that reads that, with no host between."""

    study = "chain"
    examples = (
        ("sidelane chain", "every implementation, launched in every way"),
        ("sidelane chain --launch prelaunched --variants b2b", "copies that are armed ahead of the first GEMM"),
    )

    sizes: tuple[int, ...] = size_span(gpus=("1M", "256M"), cpus=("1M", "4M"))
    variants: tuple[str, ...] = names("--variants", (), "Of Sidelane's: b2b, pcpy, one_shot, ...", shown="all")
    launches: tuple[str, ...] = either(
        "--launch",
        (*LAUNCHES, PRELAUNCHED),
        "prelaunched: Sidelane's copy engines, armed ahead of the first GEMM.",
        every="all",
    )
    implementations: tuple[str, ...] = implementations()
    warmup: int = 3
    repeats: int = 11


chain = study_command("chain", ChainOptions)


def chain_gemms(nbytes: int, ranks: int, dtype: str) -> tuple[Gemm, Gemm]:
    """Producer and consumer of a chain whose gathered size is ``nbytes``.

    >>> [gemm.name for gemm in chain_gemms(1 << 20, 4, "bfloat16")]
    ['32x4096x4096', '128x512x4096']
    """
    rows = nbytes // (WIDTH * ELEMENT_BYTES[dtype])
    return Gemm(rows // ranks, WIDTH, WIDTH, dtype), Gemm(rows, CONSUMED, WIDTH, dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class ChainRow(FlatRow):
    """A GEMM, an all-gather of its result and a GEMM that reads the gathered rows, one after the other.

    Attributes:
        bytes: gathered size.
        launch: eager or graph; ``prelaunched`` where the all-gather was submitted ahead of the producer, and fired
            after it by one write (docs/internals/prelaunch.md).
        gemms_us: time of both GEMMs with nothing between them, launched as the chain is (``prelaunched``: eager).
        time_us: time of the chain, median over the rounds of the slowest rank.
        correct: True if the consumer's output agreed with a reference in this run; None when it could not run.
        note: reason why there is no time, or a remark.
    """

    allowed = (("launch", (*LAUNCHES, PRELAUNCHED)), ("implementation", IMPLEMENTATIONS))
    figures = ("time_us",)

    bytes: int
    dtype: str
    in_place: bool
    launch: str
    implementation: str
    variant: str
    gemms_us: float
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    correct: bool | None
    note: str = ""


def _check(options: ChainOptions, place: LaunchTarget) -> None:
    """Refuse names that are not known on this kind of device."""
    from sidelane_lab.baselines.roster import check_asked

    names = {name: getattr(options, name) for name in ("implementations", "variants", "launches")}
    check_asked(place.device_type, (Kind.ALL_GATHER,), **names)


def _measure(rank: Rank, options: ChainOptions, sender: Sender) -> Iterator[ChainRow]:
    """Make the rows. Collective."""
    import torch

    from sidelane_lab.baselines.reference import Case
    from sidelane_lab.baselines.roster import make_roster

    dtype = torch.float32 if rank.device.type == "cpu" else torch.bfloat16
    step = rank.world_size * WIDTH * dtype.itemsize

    def rounded(nbytes: int) -> int:
        return -(-nbytes // step) * step

    sizes = sender.rounded(options.sizes_on(rank.device.type), rounded)
    sender.steps = len(sizes)
    roster = make_roster(rank, wanted=options.implementations, timeout_s=options.step_s)
    cases = [Case.on(rank, Kind.ALL_GATHER, size, dtype) for size in sizes]
    roster.reserve_for(cases, sender.note)
    seeds = itertools.count(options.seed + 1)
    for case in cases:
        sender.step(f"chain over an all-gather of {format_bytes(case.nbytes)}")
        yield from measure_case(roster, case, options, seeds)
    roster.close()


def measure_case(roster: Roster, case: Case, options: ChainOptions, seeds: Iterator[int]) -> Iterator[ChainRow]:
    """Measure all that takes part at one size. Collective.

    Args:
        roster: what takes part; its buffers hold the case.
        case: an all_gather of whole rows of ``WIDTH`` elements.
        options: of the study.
        seeds: gives seeds, the same on every rank.

    Yields:
        Rows, the same on every rank.
    """
    from sidelane_lab.baselines.candidate import CALLS_AHEAD, HIDDEN_LAUNCH_US, captured

    meter = roster.meter
    alone: dict[Any, Rounds] = {}

    def timed(ready: dict[Entrant, Chain]) -> Mapping[Any, Rounds]:
        jobs: dict[Any, Job] = {ALONE: Job(gemms.alone, repeats=CALLS, calls=CALLS, ahead=CALLS_AHEAD)}
        if any(candidate.launch == "graph" for candidate in ready):
            graph = captured(gemms.alone, CALLS)
            jobs[ALONE_AS_GRAPH] = Job(graph.replay, calls=CALLS, hide_launch_us=HIDDEN_LAUNCH_US)
        alone.update(meter.in_turns(jobs | {key: way.job() for key, way in ready.items()}, options))
        return alone

    with meter.on_stream():
        gemms = Gemms(case)
    makers = {
        candidate: functools.partial(Chain, gemms, candidate, case, implementation)
        for implementation in roster.implementations.values()
        for candidate in candidates_for(implementation, options)
        if implementation.tensors(case, candidate).output is not None
    }
    for one in meter.compare(makers, seeds, timed):
        candidate, of_graph = one.key, one.key.launch == "graph"
        yield ChainRow(
            bytes=case.nbytes,
            dtype=str(case.dtype).removeprefix("torch."),
            in_place=candidate.in_place,
            launch=candidate.launch,
            implementation=candidate.implementation,
            variant=candidate.variant if one.way is None else one.way.collective.variant,
            gemms_us=alone[ALONE_AS_GRAPH if of_graph and ALONE_AS_GRAPH in alone else ALONE].median_us,
            **outcome(one.rounds, one.problem),
        )


def candidates_for(implementation: Implementation, options: ChainOptions) -> list[Entrant]:
    """Every way in which an implementation can run the chain."""
    from sidelane.session.prelaunch import prelaunchable
    from sidelane_lab.baselines.candidate import Entrant, candidates_of
    from sidelane_lab.baselines.roster import OwnDma, applicable

    found = candidates_of(implementation, Kind.ALL_GATHER, only=options.variants, launches=options.launches)
    if isinstance(implementation, OwnDma) and (not options.launches or PRELAUNCHED in options.launches):
        comm = implementation.communicator
        found += [
            Entrant(implementation.name, variant, in_place, PRELAUNCHED)
            for in_place in (False, True)
            for variant in prelaunchable(applicable(Kind.ALL_GATHER, comm.world_size, comm.abilities))
            if not options.variants or variant in options.variants
        ]
    return found


class Chain(Way):
    """One way to run the chain. Its GEMMs share weights and the consumer's output with those of the others.

    A prelaunched all-gather is armed ahead of the producer, and fired behind it.
    """

    def __init__(self, gemms: Gemms, candidate: Entrant, case: Case, implementation: Implementation) -> None:
        from sidelane_lab.baselines.candidate import ReadyCall
        from sidelane_lab.baselines.roster import OwnDma

        self.collective = ReadyCall(candidate, case, implementation)
        self.label, self.as_graph = self.collective.label, self.collective.as_graph
        self._gemms, self._tensors = gemms, self.collective.tensors
        self._handle: Prelaunched | None = None
        output, input = self._tensors.output, self._tensors.input
        if candidate.launch == PRELAUNCHED:
            assert isinstance(implementation, OwnDma)
            assert output is not None
            prepare = implementation.communicator.prepare_all_gather
            self._handle = prepare(output, input, variant=candidate.variant)
            # CUDA loads a kernel at its first launch, which would wait for what is armed.
            gemms.produce(input)
            gemms.consume(output)

    def fill(self, seed: int) -> None:
        self._gemms.refill(seed)

    def run(self) -> None:
        """Produce, gather, consume, once (a graph: all of a sample). Nothing may come between arming and firing."""
        if self.graphs:
            self.graphs[0].replay()
            return
        handle, output = self._handle, self._tensors.output
        assert output is not None, "implementations that allocate their output take no part"
        if handle is None:
            self._gemms.produce(self._tensors.input)
            self.collective.start()()
        else:
            handle.arm()
            try:
                self._gemms.produce(self._tensors.input)
            finally:
                handle.trigger()  # without a product, too: the peers wait for this rank's copies
        self._gemms.consume(output)

    def run_again(self) -> None:
        """Run all chains of a sample."""
        for _ in range(1 if self.as_graph else CALLS):
            self.run()

    def error(self, seed: int) -> str | None:
        return self._gemms.error()

    def settle(self) -> None:
        self.collective.settle()

    def capture(self) -> None:
        """Go over to a graph that holds the chains of one sample."""
        from sidelane_lab.baselines.candidate import captured

        self.graphs = (captured(self.run, CALLS),)

    def job(self) -> Job:
        """Return all chains of a sample, timed as the study of collectives times its calls."""
        from sidelane_lab.baselines.candidate import CALLS_AHEAD, HIDDEN_LAUNCH_US

        if self.graphs:
            return Job(self.run, calls=CALLS, hide_launch_us=HIDDEN_LAUNCH_US)
        return Job(self.run, repeats=CALLS, calls=CALLS, ahead=CALLS_AHEAD)

    def close(self) -> None:
        super().close()
        if self._handle is not None:
            self._handle.close()
        self._handle = None


class Gemms:
    """Producer and consumer of one case."""

    def __init__(self, case: Case) -> None:
        import torch

        rows = case.nbytes // (WIDTH * case.dtype.itemsize)
        dtype, device = case.dtype, case.device
        self.x = torch.empty(rows // case.world_size, WIDTH, dtype=dtype, device=device)
        self.w = torch.randn(WIDTH, WIDTH, dtype=dtype, device=device) / WIDTH**0.5
        self.v = torch.randn(WIDTH, CONSUMED, dtype=dtype, device=device) / WIDTH**0.5
        self.y = torch.empty(rows, CONSUMED, dtype=dtype, device=device)
        self.shard = torch.empty_like(self.x)
        self.whole = torch.zeros(rows, WIDTH, dtype=dtype, device=device)
        self._rank, self._world_size = case.rank, case.world_size
        self._mm = torch.mm

    def refill(self, seed: int) -> None:
        """A fresh input of the producer, and poison where the consumer writes."""
        import torch

        generator = torch.Generator().manual_seed(seed + 1000 * self._rank)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        self.y.fill_(float("nan"))

    def produce(self, shard: torch.Tensor) -> None:
        self._mm(self.x, self.w, out=shard.view(-1, WIDTH))

    def consume(self, whole: torch.Tensor) -> None:
        self._mm(whole.view(-1, WIDTH), self.v, out=self.y)

    def alone(self) -> None:
        """Both, once, with nothing between them."""
        self.produce(self.shard)
        self.consume(self.whole)

    def error(self) -> str | None:
        """Compare with what the consumer must have made, by way of the process group. Collective."""
        import torch
        import torch.distributed as dist

        self.produce(self.shard)
        parts = [torch.empty_like(self.shard) for _ in range(self._world_size)]
        dist.all_gather(parts, self.shard)
        expected = torch.mm(torch.cat(parts), self.v)
        # One product in two shapes may be summed in another order.
        return None if torch.allclose(self.y, expected, rtol=2e-2, atol=2e-2) else "the consumer's output is wrong"


COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<implementation": "implementation",
    "<variant": "variant",
    "<place": lambda row, _: "in" if row.in_place else "out",
    "chain\nus": "time_us",
    "GEMMs\nalone us": "gemms_us",
    "between\nus": lambda row, _: number(None if row.time_us is None else row.time_us - row.gemms_us),
    "<correct": "correct",
}
BEST_COLUMNS = (
    *("bytes", "<launch", "<fastest of\nSidelane", "us", "auto\nus", "<fastest of\nthe library", "us", "ratio"),
)
OWN = ("dma", "sm", "auto")


def chain_tables(rows: Sequence[ChainRow]) -> list[Table]:
    """Make a table of Sidelane's best against the library's, then one for each way to launch."""
    return [
        *([_chain_summary(rows)] if rows else []),
        *tables_by(
            rows,
            lambda row: row.launch,
            lambda row: f"GEMM, all_gather, GEMM, {row.dtype}, {row.launch}",
            COLUMNS,
            keys=4,
            groups=lambda row: row.bytes,
            least=lambda row: row.time_us,
            ordered=True,
        ),
    ]


def _chain_summary(rows: Sequence[ChainRow]) -> Table:
    """The fastest of both sides, size by size. Libraries have no prelaunched calls: there it is their eager one."""

    def fastest(nbytes: int, launch: str, names: Collection[str]) -> ChainRow | None:
        found = [row for row in rows if (row.bytes, row.launch) == (nbytes, launch) and row.implementation in names]
        return min((row for row in found if row.time_us), key=lambda row: row.time_us or 0.0, default=None)

    lines = []
    for (nbytes, launch), _ in grouped(rows, lambda row: (row.bytes, row.launch)):
        ours, auto = fastest(nbytes, launch, OWN), fastest(nbytes, launch, ("auto",))
        theirs = fastest(nbytes, "eager" if launch == PRELAUNCHED else launch, OF_LIBRARY)
        us = [number(row.time_us if row else None) for row in (ours, auto, theirs)]
        # On our side without the implementation: the variant tells it.
        named = [[text_of(row, (), cell) for cell in COLUMNS.values()] if row else [] for row in (ours, theirs)]
        names = [" ".join(filter(None, each[first:4])) for each, first in zip(named, (2, 1), strict=True)]
        ratio = theirs.time_us / ours.time_us if theirs and theirs.time_us and ours and ours.time_us else None
        cells = (format_bytes(nbytes), launch, names[0], us[0], us[1], names[1], us[2])
        lines.append(Line((*cells, MISSING if ratio is None else f"{ratio:.3f}"), best=ratio is not None and ratio > 1))
    return Table(f"GEMM, all_gather, GEMM, {rows[0].dtype}: the fastest", BEST_COLUMNS, tuple(lines), keys=2)


def predict_row(machine: Machine, row: ChainRow) -> tuple[float, ...]:
    """Return the microseconds of the same chain: nothing is hidden in it. Nothing if the model does not speak to it."""
    from sidelane_lab.model.collectives import executed_run, library_us  # a measurement does not load the model

    if row.launch != "graph":
        return ()
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return (row.gemms_us + library_us(machine, Kind.ALL_GATHER, row.bytes),)
    if row.implementation != "dma" or row.variant not in variants(Kind.ALL_GATHER):
        return ()
    return (row.gemms_us + executed_run(machine, Kind.ALL_GATHER, row.bytes, row.variant, row.in_place).time_us,)


STUDY = Study(
    name="chain",
    title="From a GEMM to a collective and back",
    legend=(
        "A producer GEMM, an all-gather of what it made, a consumer GEMM, on one stream; 'between' is the chain "
        "less both GEMMs alone. Medians over rounds of the slowest rank; the fastest of each size is bold. "
        "Prelaunched: the copies are armed ahead of the producer and fired behind it. The first table has the "
        "fastest of NCCL (Gloo on CPUs) over that of Sidelane, bold where ours is ahead; launched alike, but "
        "prelaunched calls against eager ones. Ours is the best of more ways than theirs; 'auto' is the one that "
        "nobody picked afterwards."
    ),
    row=ChainRow,
    tables=chain_tables,
    measure=_measure,
    predict_row=predict_row,
    check=_check,
    progress="producer, all-gather, consumer",
)
