"""The parts of the study: collectives alone, and next to a GEMM.

All ways of a case take turns round by round. Each is checked, timed and checked once more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from sidelane.c3.partitions import PairStreams
from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US, Entrant, ReadyCall
from sidelane_lab.baselines.reference import Case
from sidelane_lab.cli.ordinary import OrdinaryOptions
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.ways import Rounds, WayOutcome, outcome
from sidelane_lab.pairs.beside import compare_beside
from sidelane_lab.pairs.workload import Workload
from sidelane_lab.studies.collectives import bus_gbps, calls_per_sample, hides_launches
from sidelane_lab.studies.ordinary.rows import OrdinaryRow
from sidelane_lab.studies.ordinary.ways import PLACES, Way


class OrdinaryCall(ReadyCall):
    """A call on tensors that peers reach as its row says.

    Attributes:
        said: the variant that the last right call ran as, and why.
    """

    said = ("", "")

    def __init__(self, candidate: Entrant, case: Case, way: Way, calls: int = 1) -> None:
        super().__init__(candidate, case, way, calls)
        self._way = way

    def error(self, seed: int) -> str | None:
        return super().error(seed) or self._way.objection(self.tensors)

    def settle(self) -> None:
        self.said = self._way.said()


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts on this rank; every rank makes the same calls.

    Attributes:
        meter: of this rank.
        ways: what is compared, with buffers that are large enough.
        options: of the study.
        seeds: of random inputs.
    """

    meter: Meter
    ways: Mapping[str, Way]
    options: OrdinaryOptions
    seeds: Iterator[int]

    def alone(self, case: Case) -> Iterator[OrdinaryRow]:
        """Measure every way in and out of place. Collective."""
        calls = calls_per_sample(case.kind, case.nbytes, case.device.type)

        def timed(ready: dict[Entrant, OrdinaryCall]) -> dict[Entrant, Rounds]:
            jobs = {
                candidate: call.job(HIDDEN_LAUNCH_US if hides_launches(case, candidate) else 0.0)
                for candidate, call in ready.items()
            }
            return self.meter.in_turns(jobs, self.options)

        candidates = candidates_for(self.ways, case, PLACES[case.kind])
        makers = {key: functools.partial(OrdinaryCall, key, case, way, calls) for key, way in candidates.items()}
        for one in self.meter.compare(makers, self.seeds, timed):
            yield row_of(case, candidates[one.key], one, one.way, in_place=one.key.in_place)

    def pair(self, workload: Workload, case: Case, streams: PairStreams | None) -> Iterator[OrdinaryRow]:
        """Measure every way alone and next to a GEMM, as the strategy ``conccl`` has it. Collective.

        Args:
            workload: the pair.
            case: its collective.
            streams: streams, on an accelerator.
        """
        gemm, beside = workload.gemm, {name: way.next_to_computation() for name, way in self.ways.items()}
        candidates = candidates_for(beside, case, (False,))
        makers = {key: functools.partial(OrdinaryCall, key, case, way) for key, way in candidates.items()}
        for one, columns in compare_beside(self.meter, makers, gemm, streams, self.seeds, self.options):
            columns |= {"gemm": gemm.name, **{name: getattr(gemm, name) for name in "mnk"}}
            yield row_of(case, candidates[one.key], one, None if one.way is None else one.way.call, **columns)


def candidates_for(ways: Mapping[str, Way], case: Case, places: tuple[bool, ...]) -> dict[Entrant, Way]:
    """Return what can be run of a case, out of place and in place as ``places`` says."""
    return {
        Entrant(way.name, variant, in_place): way
        for way in ways.values()
        for in_place in places
        for variant in way.variants(case.kind, in_place)
    }


def _with_late(said: str, rounds: Rounds | None) -> str:
    """Say in how many rounds some host had not queued everything when the clock started, too."""
    late = 0 if rounds is None else rounds.late
    return "; ".join(filter(None, (said, f"the host was late in {late} rounds" if late else "")))


def row_of(
    case: Case, way: Way, found: WayOutcome[Any, Any], call: OrdinaryCall | None, *, in_place: bool = False, **more: Any
) -> OrdinaryRow:
    """Make a row of a collective.

    Args:
        case: what it did.
        way: how.
        found: its outcome.
        call: what ran; None where nothing did.
        in_place: input and output share memory.
        more: columns of what was next to it.
    """
    variant, reason = ("", "") if call is None or found.problem is not None else call.said
    columns = outcome(found.rounds, found.problem, _with_late(reason, found.rounds))
    median, beside = columns["time_us"], "gemm" in more
    return OrdinaryRow(
        collective=case.kind,
        bytes=case.nbytes,
        dtype=str(case.dtype).removeprefix("torch."),
        in_place=in_place,
        launch="eager",
        implementation=way.name,
        variant=variant,
        prelaunch=False,
        bus_gbps=None if median is None or beside else bus_gbps(case.kind, case.nbytes, case.world_size, median),
        energy_mj=None,
        reach=way.reach,
        **columns,
        **more,
    )
