"""The cost of collectives where the caller's tensors are ordinary memory, next to symmetric memory and to NCCL.

Two parts: collectives alone (``alone``), and next to a GEMM (``pairs``). The ways that are compared are in ``ways``;
all of a case take turns round by round in one process, the slowest rank counts, and outputs are compared before and
behind.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

import torch

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.reference import Case, rounded_bytes
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.ordinary import ALONE, BESIDE, OrdinaryOptions
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.pairs.pair import pair_streams
from sidelane_lab.pairs.workload import Workload
from sidelane_lab.studies.c3.bench import case_of, scaled_workload
from sidelane_lab.studies.c3.rows import too_few_cores
from sidelane_lab.studies.ordinary.parts import Parts
from sidelane_lab.studies.ordinary.rows import OrdinaryRow, draw_alone, ordinary_tables
from sidelane_lab.studies.ordinary.ways import make_ways

MOVING = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
"""Collectives that run next to a GEMM: copy engines move bytes, and add none."""

GEMM_DTYPE = "bfloat16"
PAIRS = {"cpu": ("8192x8192x8192_97M",), "cuda": tuple(f"8192x8192x8192_{size}" for size in ("97M", "330M", "1.2G"))}
"""Pairs where nobody says."""


@dataclasses.dataclass(frozen=True)
class OrdinaryPlan:
    """Cases of a study, as this rank has them.

    Attributes:
        alone: cases.
        pairs: with the case of each.
    """

    alone: tuple[Case, ...]
    pairs: tuple[tuple[Workload, Case], ...]

    @property
    def reserved(self) -> tuple[Case, ...]:
        """The cases that need buffers that stay."""
        return (*self.alone, *(case for _, case in self.pairs))


def plan_of(rank: Rank, options: OrdinaryOptions) -> OrdinaryPlan:
    """All that the options ask for.

    Args:
        rank: of this process.
        options: of the study.
    """
    device, moving = rank.device, [kind for kind in options.collectives if kind in MOVING]

    def cases(kinds: Iterable[Kind], sizes: Iterable[int]) -> tuple[Case, ...]:
        rounded = sorted({rounded_bytes(size, rank.world_size) for size in sizes})
        return tuple(Case.on(rank, kind, size) for kind in kinds for size in rounded)

    asked = options.pairs or PAIRS[device.type]
    workloads = [
        scaled_workload(text, kind, dtype=GEMM_DTYPE, full_size=False, rank=rank) for kind in moving for text in asked
    ]
    return OrdinaryPlan(
        cases(options.collectives, options.sizes_on(device.type)) if ALONE in options.parts else (),
        tuple((one, case_of(rank, one)) for one in workloads) if BESIDE in options.parts else (),
    )


def _measure(rank: Rank, options: OrdinaryOptions, sender: Sender) -> Iterator[OrdinaryRow]:
    """Make the rows. Collective."""
    if rank.device.type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    plan = plan_of(rank, options)
    sender.steps = len(plan.alone) + len(plan.pairs)
    rounded = functools.partial(rounded_bytes, world_size=rank.world_size)
    sender.rounded(options.sizes, rounded)
    roster, ways = make_ways(rank, make_meter(rank, options.step_s), options.step_s)
    if plan.reserved:
        roster.reserve(
            max(case.output_bytes for case in plan.reserved), max(case.input_bytes for case in plan.reserved)
        )
    ways = {name: way for name, way in ways.items() if name in roster.implementations}
    for name, reason in roster.unavailable.items():
        sender.note(f"{name} takes no part: {reason}")
    parts = Parts(roster.meter, ways, options, itertools.count(options.seed + 1))
    streams = pair_streams(rank.device)
    for case in plan.alone:
        sender.step(f"{case.kind} {format_bytes(case.nbytes)}")
        yield from parts.alone(case)
    for workload, case in plan.pairs:
        sender.step(workload.name)
        yield from parts.pair(workload, case, streams)
    roster.close()


STUDY = Study(
    name="ordinary",
    title="Collectives on ordinary memory",
    legend=(
        "Sidelane's auto on tensors that peers reach in different ways, and NCCL (Gloo on CPUs) on ordinary ones. "
        "Medians over rounds of the slowest rank; the fastest is bold. 'library over it': the library's time over "
        "that of the line. Next to a GEMM the collective is released first, on its own stream; % of ideal is the "
        "strict one of the C3 study, with the fastest collective of the table. The notes are what "
        "Communicator.last_choice says."
    ),
    row=OrdinaryRow,
    tables=ordinary_tables,
    plots=draw_alone,
    warning=too_few_cores,
    measure=_measure,
    progress="ordinary memory",
)
