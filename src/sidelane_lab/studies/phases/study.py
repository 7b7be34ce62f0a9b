"""The study of phases: single transfers and collectives, with stamps and without, measured and predicted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sidelane.machine.inventory import machine_name
from sidelane.program.collective import Collective
from sidelane.program.verify import verify
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.reference import rounded_bytes
from sidelane_lab.baselines.roster import check_asked
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.harness.ways import Rounds, Way
from sidelane_lab.machines.load import find, machine_names
from sidelane_lab.machines.spec import Machine
from sidelane_lab.studies.phases import programs
from sidelane_lab.studies.phases.rig import Rig, error, fill
from sidelane_lab.studies.phases.rows import PhaseRow, PhasesOptions, phase_tables
from sidelane_lab.studies.phases.split import FIELDS, Sample, slowest, split

FALLBACK_MACHINE = "h200x4"
"""Predicted next to measurements on a machine that the catalogue does not have."""

FEW_CALLS_FROM_BYTES = 64 << 20
FEW_CALLS = 9
MEASURED = "measured"


def _check(options: PhasesOptions, place: LaunchTarget) -> None:
    """Refuse operations and variants that there are not, a launch that is not known here, and machines."""
    programs.operations(options.operations, options.variants, 1)
    check_asked(place.device_type, (), launches=options.launches)
    if options.predict:
        find(options.predict)


def _measure(rank: Rank, options: PhasesOptions, sender: Sender) -> Iterator[PhaseRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    rounded = functools.partial(rounded_bytes, world_size=rank.world_size)
    sizes = sender.rounded(options.sizes_on(rank.device.type), rounded)
    launches = [name for name in LAUNCHES if not (on_cpu and name == programs.GRAPH)]
    if options.launches:
        launches = [name for name in launches if name in options.launches]
    by_size = [programs.operations(options.operations, options.variants, nbytes) for nbytes in sizes]
    sender.steps = len(sizes)
    machine, note = _described(rank, options)
    is_predicted = machine.world_size >= rank.world_size
    if not is_predicted:
        sender.note(f"nothing is predicted: {machine.title} has fewer GPUs than there are ranks")
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    # Its device barrier stays unused: ranks begin by the clock.
    meter = Meter(rank.device, device_barrier=lambda: None, timeout_s=options.step_s, group=control)
    seeds = itertools.count(options.seed + 1)
    with meter.on_stream():
        rig = Rig(rank, options.step_s)
        native = rig.executor.capabilities.moves
        rig.reserve([one.program(rank.world_size, native=native) for chosen in by_size for one in chosen])
    if rig.notice:
        sender.note(rig.notice)
    for nbytes, chosen in zip(sizes, by_size, strict=True):
        sender.step(f"phases {format_bytes(nbytes)}")
        ways = [(operation, launch) for operation in chosen for launch in launches if launch in operation.launches]
        yield from measured_rows(meter, rig, options, nbytes, ways, seeds)
        if is_predicted:
            yield from (programs.predicted_row(machine, operation, rank.world_size, note) for operation in chosen)
    rig.close()


def measured_rows(
    meter: Meter,
    rig: Rig,
    options: PhasesOptions,
    nbytes: int,
    ways: Sequence[tuple[programs.Operation, str]],
    seeds: Iterator[int],
) -> Iterator[PhaseRow]:
    """Check and time operations of one size, each launched in one way, with stamps and without. Collective."""
    samples: dict[tuple[programs.Operation, str, bool], tuple[Sample, bool]] = {}

    def timed(ready: dict[tuple[programs.Operation, str, bool], PhaseWay]) -> dict[Any, Rounds]:
        if ready:
            calls, in_step = Pacer(meter).run(
                list(ready.values()),
                warmup=options.warmup,
                repeats=min(options.calls, FEW_CALLS) if nbytes >= FEW_CALLS_FROM_BYTES else options.calls,
                gap_us=2_000.0 + nbytes * rig.rank.world_size / (1e3 if meter.device.type == "cpu" else 200e3),
            )
            for at, key in enumerate(ready):
                samples[key] = slowest(calls[:, at], in_step[at]), in_step[at].mean() >= 0.5
        return {key: Rounds((sample.total_us,)) for key, (sample, _) in samples.items()}

    makers = {
        (*way, stamped): functools.partial(PhaseWay, meter, rig, *way, stamped=stamped)
        for way in ways
        for stamped in (True, False)
    }
    problems = {one.key: one.problem for one in meter.compare(makers, seeds, timed)}
    for operation, launch in ways:
        problem = problems[operation, launch, True] or problems[operation, launch, False]
        if problem is not None:
            correct = False if problem.wrong else None
            yield programs.phase_row(operation, launch, MEASURED, None, correct=correct, note=problem.text)
            continue
        (stamped, in_step), (plain, _) = (samples[operation, launch, has_stamps] for has_stamps in (True, False))
        note = "" if in_step else "in most calls some rank began late"
        row = programs.phase_row(operation, launch, MEASURED, split(stamped), correct=True, note=note)
        yield dataclasses.replace(row, total_unstamped_us=plain.total_us, host_us=plain.host_us)


def _described(rank: Rank, options: PhasesOptions) -> tuple[Machine, str]:
    """Return what to predict next to the measurements, and a note where that is another machine than this one."""
    if not options.predict and rank.device.type != "cpu":
        here = machine_name(torch.cuda.get_device_name(rank.device), rank.world_size)
        if here in machine_names():
            return find(here), ""
    machine = find(options.predict or FALLBACK_MACHINE)
    ranks = f"{rank.world_size} ranks of " if rank.world_size < machine.world_size else ""
    return machine, f"predicted for {ranks}{machine.title}"


class PhaseWay(Way):
    """An operation that a rank calls one by one.

    Args:
        meter: of this rank.
        rig: its executor and memory.
        operation: what it does.
        launch: eager or graph.
        stamped: with stamps around the copies.

    Attributes:
        call: the program; None where this rank has no part.
    """

    def __init__(self, meter: Meter, rig: Rig, operation: programs.Operation, launch: str, *, stamped: bool) -> None:
        native, ranks = rig.executor.capabilities.moves, rig.rank.world_size
        program = operation.program(ranks, stamped=stamped, native=native, frozen=launch == programs.GRAPH)
        self._has_flags = operation.name not in programs.TRANSFERS  # those have none: the host orders them
        if self._has_flags:
            verify(program)
        assert isinstance(program.collective, Collective), "programs of this study hold one collective"
        self.label, self.call = f"{operation} {launch}", rig.prepare(program, launch)
        self._meter, self._rig, self._collective = meter, rig, program.collective

    def fill(self, seed: int) -> None:
        """Put in fresh inputs and poison the outputs, on all ranks before one goes on. Collective."""

        def write() -> None:
            fill(self._collective, self._rig.rank.rank, self._rig.tensor, seed)
            self._meter.finish("filling the buffers")

        if (refused := self._meter.attempt(write)) is not None:
            raise RuntimeError(refused)

    def run(self) -> None:
        epoch = self._rig.next_epoch()
        if self.call is not None:
            self.call.arm(epoch)
            self.call.begin(epoch)
            self.call.finish()

    def sampled(self, at_ns: int) -> tuple[Sample, int]:
        """Call it at a moment. Returns what was seen, and by how many nanoseconds the call was late."""
        epoch, call = self._rig.next_epoch(), self.call
        if call is None:
            return NO_PART, 0
        call.arm(epoch)
        _wait_until(at_ns)
        begin = time.perf_counter_ns()
        call.begin(epoch)
        returned = time.perf_counter_ns()
        call.finish()
        return call.sample(begin, returned, time.perf_counter_ns()), begin - at_ns

    def error(self, seed: int) -> str | None:
        return error(self._collective, self._rig.rank.rank, self._rig.tensor, seed, own_chunk=self._has_flags)


NO_PART = Sample(*[float("nan")] * FIELDS)
"""The sample of a rank that has no part in a call."""


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
        calls: Sequence[PhaseWay],
        *,
        warmup: int,
        repeats: int,
        gap_us: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Time every call ``repeats`` times. Collective.

        Args:
            calls: the same on every rank, in the same order.
            warmup: rounds before the measured ones, which also tell how far apart the calls have to be.
            repeats: measured rounds.
            gap_us: between calls in the warm-up.

        Returns:
            ``[ranks, calls, repeats, fields of Sample]`` with NaN where a rank had no part, and ``[calls, repeats]``,
            true where every rank began in time.
        """
        with _without_collections():
            first, _ = self._rounds(calls, warmup, [gap_us] * len(calls))
            totals = first[:, :, 1] if warmup else np.full((len(calls), 1), gap_us)
            worst = self._of_all_ranks(np.nan_to_num(np.median(totals, axis=1))).max(axis=0)
            gaps = [1.3 * float(us) + SPARE_US[self._kind] for us in worst]
            values, late = self._rounds(calls, repeats, gaps)
        return self._of_all_ranks(values), self._of_all_ranks(late).max(axis=0) == 0

    def _rounds(self, calls: Sequence[PhaseWay], count: int, gaps: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        values = np.full((len(calls), count, FIELDS), np.nan)
        late = np.zeros((len(calls), count), dtype=bool)
        at = int(self._of_all_ranks(np.array([time.perf_counter_ns() + _LEAD_NS], dtype=np.float64)).max())
        for number in range(count):
            for index, call in enumerate(calls):
                sample, late_ns = call.sampled(at)
                values[index, number] = sample.values()
                late[index, number] = late_ns > 1e3 * LATE_US[self._kind]
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
    measure=_measure,
    predict=programs.predicted_rows,
    check=_check,
    progress="phases",
)
