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
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from sidelane.choice.candidate import applicable
from sidelane.cli.launch import Rank
from sidelane.collectives import Communicator
from sidelane.collectives.prelaunched import Prelaunched, prelaunchable
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.candidate import (
    CALLS_AHEAD,
    HIDDEN_LAUNCH_US,
    Entrant,
    Implementation,
    Prepared,
    candidates_of,
    captured,
)
from sidelane_lab.baselines.own import Dma
from sidelane_lab.baselines.reference import Case
from sidelane_lab.baselines.roster import Roster, make_roster
from sidelane_lab.harness.results.files import Results
from sidelane_lab.harness.results.rows.calls import PRELAUNCHED, ChainRow
from sidelane_lab.harness.results.rows.flat import LAUNCHES
from sidelane_lab.harness.running.measure import Job, Meter, Rounds
from sidelane_lab.harness.running.study import Sender, StudyOptions, run_study
from sidelane_lab.studies.chain.shapes import CONSUMED, WIDTH

CALLS = 8
"""Chains in a sample."""

ALONE = Entrant("", "GEMMs alone")
ALONE_AS_GRAPH = dataclasses.replace(ALONE, launch="graph")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOptions(StudyOptions):
    """What to measure.

    Attributes:
        sizes: gathered bytes; multiples of a row of ``WIDTH`` elements on every rank.
        variants: of Sidelane's collectives; empty takes all.
        launches: ``eager``, ``graph``, ``prelaunched``; empty takes all that exist.
        warmup: rounds before the measured ones.
        repeats: measured rounds.
    """

    sizes: tuple[int, ...] = tuple(1 << power for power in range(20, 29, 2))
    variants: tuple[str, ...] = ()
    launches: tuple[str, ...] = ()
    warmup: int = 3
    repeats: int = 11

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        allowed = (*LAUNCHES, PRELAUNCHED)
        if not set(self.launches) <= set(allowed):
            raise ValueError(f"ChainOptions: launches (value={self.launches}, allowed={', '.join(allowed)})")


def main(options: ChainOptions) -> Results | None:
    """Run the study; see :func:`sidelane_lab.harness.running.study.run_study`."""
    return run_study("chain", ChainRow, _measure, options, "producer, all-gather, consumer")


def _measure(rank: Rank, options: ChainOptions) -> int:
    """Every rank's part of the study. Returns the number of rows."""
    dtype = torch.float32 if rank.device.type == "cpu" else torch.bfloat16
    step = rank.world_size * WIDTH * dtype.itemsize

    def rounded(nbytes: int) -> int:
        return -(-nbytes // step) * step

    sizes = sorted(set(map(rounded, options.sizes)))
    sender = Sender(rank, len(sizes))
    sender.note_rounding(options.sizes, rounded)
    roster = make_roster(rank, wanted=options.implementations, timeout_s=options.step_s)
    cases = [Case(Kind.ALL_GATHER, size, dtype, rank.rank, rank.world_size, rank.device) for size in sizes]
    roster.reserve(max(case.output_bytes for case in cases), max(case.input_bytes for case in cases))
    for name, reason in roster.unavailable.items():
        sender.note(f"{name} takes no part: {reason}")
    seeds = itertools.count(options.seed + 1)
    count = 0
    for case in cases:
        sender.step(f"chain over an all-gather of {format_bytes(case.nbytes)}")
        for row in measure_case(roster, case, options, seeds):
            sender.row(row)
            count += 1
    roster.close()
    return count


class _Chain:
    """One way to run the chain. Its GEMMs share weights and the consumer's output with those of the others."""

    def __init__(self, gemms: _Gemms, collective: Prepared) -> None:
        self.collective = collective
        self._gemms = gemms
        self._graph: torch.cuda.CUDAGraph | None = None

    def preparation(self) -> tuple[Callable[[], None], ...]:
        """What must come before the first run, in steps each of which can fail."""
        return ()

    def run(self) -> None:
        """Produce, gather, consume, once."""
        tensors = self.collective.tensors
        self._gemms.produce(tensors.input)
        self.collective.start()()
        assert tensors.output is not None, "implementations that allocate their output take no part"
        self._gemms.consume(tensors.output)

    def capture(self) -> None:
        """Go over to a graph that holds the chains of one sample."""
        self._graph = captured(self.run, CALLS)

    def sample(self) -> None:
        """All chains of a sample."""
        if self._graph is not None:
            self._graph.replay()
            return
        for _ in range(CALLS):
            self.run()

    def job(self) -> Job:
        """All chains of a sample, timed as a study of collectives times its calls."""
        if self._graph is not None:
            return Job(self._graph.replay, calls=CALLS, hide_launch_us=HIDDEN_LAUNCH_US)
        return Job(self.run, repeats=CALLS, calls=CALLS, ahead=CALLS_AHEAD)

    def release(self) -> None:
        """Drop the graph, and what :meth:`preparation` made. All ranks alike."""
        self._graph = None
        self.collective.release()


class _PrelaunchedChain(_Chain):
    """The chain with its all-gather armed ahead of the producer, and fired behind it."""

    def __init__(self, gemms: _Gemms, collective: Prepared, communicator: Communicator) -> None:
        super().__init__(gemms, collective)
        self._communicator = communicator
        self._handle: Prelaunched | None = None

    def preparation(self) -> tuple[Callable[[], None], ...]:
        output, input = self.collective.tensors.output, self.collective.tensors.input
        assert output is not None, "Sidelane writes into tensors that it is given"

        def load() -> None:
            # CUDA loads a kernel at its first launch, which would wait for what is armed.
            self._gemms.produce(input)
            self._gemms.consume(output)

        def prepare() -> None:
            self._handle = self._communicator.prepare_all_gather(output, input, variant=self.collective.variant)

        return load, prepare

    def run(self) -> None:
        """Arm, produce, fire, consume, once. Nothing else may come between the first and the third."""
        handle, tensors = self._handle, self.collective.tensors
        assert handle is not None, "its preparation comes first"
        assert tensors.output is not None
        handle.arm()
        try:
            self._gemms.produce(tensors.input)
        finally:
            handle.trigger()  # without a product, too: the peers wait for this rank's copies
        self._gemms.consume(tensors.output)

    def release(self) -> None:
        if self._handle is not None:
            self._handle.close()
        self._handle = None
        super().release()


class _Gemms:
    """Producer and consumer of one case."""

    def __init__(self, case: Case, meter: Meter) -> None:
        rows = case.nbytes // (WIDTH * case.dtype.itemsize)
        dtype, device = case.dtype, case.device
        self.x = torch.empty(rows // case.world_size, WIDTH, dtype=dtype, device=device)
        self.w = torch.randn(WIDTH, WIDTH, dtype=dtype, device=device) / WIDTH**0.5
        self.v = torch.randn(WIDTH, CONSUMED, dtype=dtype, device=device) / WIDTH**0.5
        self.y = torch.empty(rows, CONSUMED, dtype=dtype, device=device)
        self.shard = torch.empty_like(self.x)
        self.whole = torch.zeros(rows, WIDTH, dtype=dtype, device=device)
        self._world_size = case.world_size
        self._meter = meter

    def refill(self, seed: int) -> None:
        """A fresh input of the producer, and poison where the consumer writes."""
        self.x.copy_(torch.randn(self.x.shape, generator=torch.Generator().manual_seed(seed)))
        self.y.fill_(float("nan"))

    def produce(self, shard: torch.Tensor) -> None:
        torch.mm(self.x, self.w, out=shard.view(-1, WIDTH))

    def consume(self, whole: torch.Tensor) -> None:
        torch.mm(whole.view(-1, WIDTH), self.v, out=self.y)

    def alone(self) -> None:
        """Both, once, with nothing between them."""
        self.produce(self.shard)
        self.consume(self.whole)

    def expected(self) -> torch.Tensor:
        """What the consumer must have made, by way of the process group."""
        self.produce(self.shard)
        parts = [torch.empty_like(self.shard) for _ in range(self._world_size)]
        dist.all_gather(parts, self.shard)
        return torch.mm(torch.cat(parts), self.v)


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
    meter = roster.meter
    ready: dict[Entrant, _Chain] = {}
    problems: dict[Entrant, tuple[str, bool]] = {}
    with meter.on_stream():
        gemms = _Gemms(case, meter)
        for implementation in roster.implementations.values():
            for candidate in _candidates(implementation, options):
                chain = _chain(gemms, Prepared(candidate, case, implementation), implementation)
                if chain.collective.tensors.output is None:
                    continue
                problem = _prepare(meter, gemms, chain, candidate.launch == "graph", seeds)
                if problem is None:
                    ready[candidate] = chain
                else:
                    problems[candidate] = problem
                    chain.release()
        jobs = {ALONE: Job(gemms.alone, repeats=CALLS, calls=CALLS, ahead=CALLS_AHEAD)}
        if any(candidate.launch == "graph" for candidate in ready):
            graph = captured(gemms.alone, CALLS)
            jobs[ALONE_AS_GRAPH] = Job(graph.replay, calls=CALLS, hide_launch_us=HIDDEN_LAUNCH_US)
        jobs |= {candidate: chain.job() for candidate, chain in ready.items()}
        rounds = meter.rounds(jobs, warmup=options.warmup, repeats=options.repeats)
        for candidate, chain in ready.items():
            problem = _check(meter, gemms, chain.sample, candidate, next(seeds))
            if problem is not None:
                problems[candidate] = problem
            chain.release()
    for candidate in (*ready, *(c for c in problems if c not in ready)):
        variant = ready[candidate].collective.variant if candidate in ready else candidate.variant
        alone = rounds.get(ALONE_AS_GRAPH, rounds[ALONE]) if candidate.launch == "graph" else rounds[ALONE]
        yield _row(case, candidate, variant, rounds.get(candidate), alone, problems.get(candidate))


def _candidates(implementation: Implementation, options: ChainOptions) -> list[Entrant]:
    """Every way in which an implementation can run the chain."""
    found = candidates_of(implementation, Kind.ALL_GATHER, only=options.variants, launches=options.launches)
    if isinstance(implementation, Dma) and (not options.launches or PRELAUNCHED in options.launches):
        comm = implementation.communicator
        found += [
            Entrant(implementation.name, variant, in_place, PRELAUNCHED)
            for in_place in (False, True)
            for variant in prelaunchable(applicable(Kind.ALL_GATHER, comm.world_size, comm.abilities))
            if not options.variants or variant in options.variants
        ]
    return found


def _chain(gemms: _Gemms, collective: Prepared, implementation: Implementation) -> _Chain:
    if isinstance(implementation, Dma) and collective.candidate.launch == PRELAUNCHED:
        return _PrelaunchedChain(gemms, collective, implementation.communicator)
    return _Chain(gemms, collective)


def _prepare(
    meter: Meter, gemms: _Gemms, chain: _Chain, as_graph: bool, seeds: Iterator[int]
) -> tuple[str, bool] | None:
    candidate = chain.collective.candidate
    for step in chain.preparation():
        refused = meter.attempt(step)
        if refused is not None:
            return f"{step.__name__}: {refused}", False
    problem = _check(meter, gemms, chain.run, candidate, next(seeds))
    if problem is None and as_graph:
        refused = meter.attempt(chain.capture)
        problem = None if refused is None else (f"capture: {refused}", False)
    chain.collective.settle()
    return problem


def _check(
    meter: Meter, gemms: _Gemms, run: Callable[[], None], candidate: Entrant, seed: int
) -> tuple[str, bool] | None:
    """Run on a fresh input and compare. Returns what is wrong, and whether it ran and was wrong. Collective."""

    def step() -> None:
        gemms.refill(seed + 1000 * meter.rank)
        run()
        meter.finish(str(candidate))

    refused = meter.attempt(step)
    if refused is not None:
        return refused, False

    def compare() -> str | None:
        expected = gemms.expected()
        meter.finish("the reference")
        # One product in two shapes may be summed in another order.
        return None if torch.allclose(gemms.y, expected, rtol=2e-2, atol=2e-2) else "the consumer's output is wrong"

    wrong = meter.attempt(compare)
    return None if wrong is None else (wrong, True)


def _row(
    case: Case,
    candidate: Entrant,
    variant: str,
    rounds: Rounds | None,
    alone: Rounds,
    problem: tuple[str, bool] | None,
) -> ChainRow:
    usable = rounds if problem is None else None
    return ChainRow(
        bytes=case.nbytes,
        dtype=str(case.dtype).removeprefix("torch."),
        in_place=candidate.in_place,
        launch=candidate.launch,
        implementation=candidate.implementation,
        variant=variant,
        gemms_us=alone.median_us,
        time_us=None if usable is None else usable.median_us,
        p10_us=None if usable is None else usable.p10_us,
        p90_us=None if usable is None else usable.p90_us,
        correct=True if problem is None else False if problem[1] else None,
        note="" if problem is None else problem[0],
    )
