"""The study of phases: single transfers and collectives, with stamps and without, measured and predicted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from sidelane.machine.inventory import machine_name
from sidelane.program.batch import Definition
from sidelane.program.collective import Collective
from sidelane.program.verify import verify
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.reference import rounded_bytes
from sidelane_lab.baselines.roster import check_asked
from sidelane_lab.cli.collectives import PhasesOptions
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.machines.load import find, machine_names
from sidelane_lab.machines.spec import Machine
from sidelane_lab.studies.phases.predict import phase_row, predicted_row, predicted_rows
from sidelane_lab.studies.phases.programs import GRAPH, TRANSFERS, Operation, operations
from sidelane_lab.studies.phases.rig import Rig, TimedCall, error, fill
from sidelane_lab.studies.phases.rows import PhaseRow, draw_phases, phase_tables
from sidelane_lab.studies.phases.split import FIELDS, slowest, split

FALLBACK_MACHINE = "h200x4"
"""Predicted next to measurements on a machine that the catalogue does not have."""

FEW_CALLS_FROM_BYTES = 64 << 20
FEW_CALLS = 9
MEASURED = "measured"


def _check(options: PhasesOptions, place: LaunchTarget) -> None:
    """Refuse operations and variants that there are not, a launch that is not known here, and machines."""
    operations(options.operations, options.variants, 1)
    check_asked(place.device_type, (), launches=options.launches)
    if options.predict:
        find(options.predict)


def _measure(rank: Rank, options: PhasesOptions, sender: Sender) -> Iterator[PhaseRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    rounded = functools.partial(rounded_bytes, world_size=rank.world_size)
    sizes = sender.rounded(options.sizes_on(rank.device.type), rounded)
    launches = [name for name in LAUNCHES if not (on_cpu and name == "graph")]
    if options.launches:
        launches = [name for name in launches if name in options.launches]
    by_size = [operations(options.operations, options.variants, nbytes) for nbytes in sizes]
    sender.steps = len(sizes)
    machine, note = _described(rank, options)
    if machine.world_size < rank.world_size:
        sender.note(f"nothing is predicted: {machine.title} has fewer GPUs than there are ranks")
    study = _Study(rank, options)
    with study.meter.on_stream():
        rig = study.open([operation for chosen in by_size for operation in chosen])
        if rig.notice:
            sender.note(rig.notice)
        for nbytes, chosen in zip(sizes, by_size, strict=True):
            sender.step(f"phases {format_bytes(nbytes)}")
            ways = [(operation, launch) for operation in chosen for launch in launches]
            jobs = [_Job(*way) for way in ways if way[1] in way[0].launches]
            rows = study.rows(nbytes, jobs)
            if machine.world_size >= rank.world_size:
                rows += [predicted_row(machine, operation, rank.world_size, note) for operation in chosen]
            yield from rows
        rig.close()


def _described(rank: Rank, options: PhasesOptions) -> tuple[Machine, str]:
    """Return what to predict next to the measurements, and a note where that is another machine than this one."""
    if not options.predict and rank.device.type != "cpu":
        here = machine_name(torch.cuda.get_device_name(rank.device), rank.world_size)
        if here in machine_names():
            return find(here), ""
    machine = find(options.predict or FALLBACK_MACHINE)
    ranks = f"{rank.world_size} ranks of " if rank.world_size < machine.world_size else ""
    return machine, f"predicted for {ranks}{machine.title}"


@dataclasses.dataclass(slots=True)
class _Job:
    """One way to call an operation: with stamps and without. ``problem``: why it has no times."""

    operation: Operation
    launch: str
    calls: tuple[TimedCall | None, ...] = ()
    problem: str = ""
    wrong: bool = False


class _Study:
    """The part of one rank in the study."""

    def __init__(self, rank: Rank, options: PhasesOptions) -> None:
        self._rank, self._options = rank, options
        control = dist.new_group(backend="gloo")
        assert isinstance(control, dist.ProcessGroup)
        # Its device barrier stays unused: ranks begin by the clock.
        self.meter = Meter(rank.device, device_barrier=lambda: None, timeout_s=options.step_s, group=control)
        self._pacer = Pacer(self.meter)
        self._epoch = 0

    def open(self, chosen: Sequence[Operation]) -> Rig:
        """Make the rig, with room for these. Collective."""
        self._rig, ranks = Rig(self._rank, self._options.step_s), self._rank.world_size
        self._native = self._rig.executor.capabilities.moves
        self._rig.reserve([operation.program(ranks, native=self._native) for operation in chosen])
        return self._rig

    def rows(self, nbytes: int, jobs: Sequence[_Job]) -> list[PhaseRow]:
        """Prepare, check and time all ways to call; a row for each. Collective."""
        for job in jobs:
            self._prepare(job)
        good = [job for job in jobs if not job.problem]
        few = nbytes >= FEW_CALLS_FROM_BYTES
        options = self._options
        if good:
            calls, in_step = self._pacer.run(
                [call for job in good for call in job.calls],
                self._next_epoch,
                warmup=options.warmup,
                repeats=min(options.calls, FEW_CALLS) if few else options.calls,
                gap_us=2_000.0 + nbytes * self._rank.world_size / (1e3 if self._rank.device.type == "cpu" else 200e3),
            )
        rows = []
        for job in jobs:
            if job.problem:
                correct = False if job.wrong else None
                rows.append(phase_row(job.operation, job.launch, MEASURED, None, correct=correct, note=job.problem))
                continue
            index = 2 * good.index(job)
            stamp, plain = (slowest(calls[:, at], in_step[at]) for at in (index, index + 1))
            note = "" if in_step[index].mean() >= 0.5 else "in most calls some rank began late"
            phases = split(stamp)
            row = phase_row(job.operation, job.launch, MEASURED, phases, correct=True, note=note)
            rows.append(dataclasses.replace(row, total_unstamped_us=plain.total_us, host_us=plain.host_us))
        return rows

    def _prepare(self, job: _Job) -> None:
        """Load both programs, run each once and check its bytes. Collective."""
        operation = job.operation
        ranks, frozen = self._rank.world_size, job.launch == GRAPH
        programs = [operation.program(ranks, stamped=s, native=self._native, frozen=frozen) for s in (True, False)]
        calls: list[TimedCall | None] = []

        def load() -> None:
            for program in programs:
                if operation.name not in TRANSFERS:  # those have no flags: the host orders them
                    verify(program)
                calls.append(self._rig.prepare(program, job.launch))

        job.problem = self.meter.attempt(load) or ""
        for call in calls:
            if not job.problem:
                self._check(job, call, programs[0].collective)
        job.calls = tuple(calls)

    def _check(self, job: _Job, call: TimedCall | None, collective: Definition) -> None:
        assert isinstance(collective, Collective), "programs of this study hold one collective"
        epoch, rank, views = self._next_epoch(), self._rank.rank, self._rig.tensor
        seed = self._options.seed + epoch

        def write() -> None:
            fill(collective, rank, views, seed)
            self.meter.finish("filling the buffers")

        def run() -> None:
            if call is not None:
                call.arm(epoch)
                call.begin(epoch)
                call.finish()

        own = job.operation.name not in TRANSFERS
        job.problem = self.meter.attempt(write) or self.meter.attempt(run) or ""
        if not job.problem:
            wrong = self.meter.attempt(lambda: error(collective, rank, views, seed, own_chunk=own))
            job.problem, job.wrong = wrong or "", wrong is not None

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch


# Single calls on ranks that begin together, at moments that they have agreed on: all processes of a machine share one
# monotonic clock, so nothing is exchanged around a call and no barrier runs on the devices. What is timed is a call on
# an idle machine.

LATE_US = {"cpu": 500.0, "gpu": 5.0}
"""A call that begins this much too late on some rank does not count."""
SPARE_US = {"cpu": 3_000.0, "gpu": 250.0}
"""Between two calls, beyond what the slowest took."""
_LEAD_NS = 5_000_000
_SPIN_NS = 300_000


class Pacer:
    """Runs calls one at a time, taking turns, on all ranks alike.

    Args:
        meter: carries what the ranks tell each other.
    """

    def __init__(self, meter: Meter) -> None:
        self._kind = "cpu" if meter.device.type == "cpu" else "gpu"
        self._meter = meter

    def run(
        self,
        calls: Sequence[TimedCall | None],
        next_epoch: Callable[[], int],
        *,
        warmup: int,
        repeats: int,
        gap_us: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Time every call ``repeats`` times. Collective.

        Args:
            calls: the same number on every rank, in the same order; None where a rank has no part.
            next_epoch: number of the next call, the same on every rank.
            warmup: rounds before the measured ones, which also tell how far apart the calls have to be.
            repeats: measured rounds.
            gap_us: between calls in the warm-up.

        Returns:
            ``[ranks, calls, repeats, fields of Sample]`` with NaN where a rank had no part, and ``[calls, repeats]``,
            true where every rank began in time.
        """
        with _without_collections():
            first, _ = self._rounds(calls, next_epoch, warmup, [gap_us] * len(calls))
            totals = first[:, :, 1] if warmup else np.full((len(calls), 1), gap_us)
            worst = self._of_all_ranks(np.nan_to_num(np.median(totals, axis=1))).max(axis=0)
            gaps = [1.3 * float(us) + SPARE_US[self._kind] for us in worst]
            values, late = self._rounds(calls, next_epoch, repeats, gaps)
        return self._of_all_ranks(values), self._of_all_ranks(late).max(axis=0) == 0

    def _rounds(
        self, calls: Sequence[TimedCall | None], next_epoch: Callable[[], int], count: int, gaps: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        values = np.full((len(calls), count, FIELDS), np.nan)
        late = np.zeros((len(calls), count), dtype=bool)
        at = int(self._of_all_ranks(np.array([time.perf_counter_ns() + _LEAD_NS], dtype=np.float64)).max())
        for number in range(count):
            for index, call in enumerate(calls):
                epoch = next_epoch()
                if call is not None:
                    call.arm(epoch)
                    _wait_until(at)
                    begin = time.perf_counter_ns()
                    call.begin(epoch)
                    returned = time.perf_counter_ns()
                    call.finish()
                    known = time.perf_counter_ns()
                    values[index, number] = call.sample(begin, returned, known).values()
                    late[index, number] = begin - at > 1e3 * LATE_US[self._kind]
                at += int(1e3 * gaps[index])
        return values, late

    def _of_all_ranks(self, mine: np.ndarray) -> np.ndarray:
        """Return every rank's array, by rank."""
        return np.array(self._meter.of_all_ranks(mine.ravel().tolist())).reshape(-1, *mine.shape)


def _wait_until(at_ns: int) -> None:
    while (left := at_ns - time.perf_counter_ns()) > 0:
        if left > _SPIN_NS:
            time.sleep((left - _SPIN_NS) / 1e9)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collecting garbage takes longer than what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


STUDY = Study(
    name="phases",
    title="Where one transfer and one collective spend their time",
    legend=(
        "control: the host submits; schedule: until the first byte may move, entry handshake included; copy: until"
        " the last byte has arrived, own chunk included; sync: exit handshake, and until the host knows. With one "
        "handshake, that is schedule, and 'slot' the part of copy in front of it. Medians of single calls of the "
        "slowest rank; 'no stamps' is the whole call without looking, 'host' what the call takes the host. "
        "Definitions: results/notes/phases.md."
    ),
    row=PhaseRow,
    tables=phase_tables,
    plots=lambda rows, results, folder: draw_phases(rows, results.where, folder),
    measure=_measure,
    predict=predicted_rows,
    check=_check,
    progress="phases",
)
