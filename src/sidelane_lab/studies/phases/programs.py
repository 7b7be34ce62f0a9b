"""The operations whose phases are studied, as Programs, and their phases on a machine that need not be here.

Transfers are bare copies of rank 0, as the DMA collectives paper (section 3) measured one: its host starts the engine
and waits, and nothing else orders the ranks. Collectives are what a communicator runs, handshakes and own chunk
included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import REDUCING, Collective, Kind, all_gather, all_to_all, scatter
from sidelane.program.ir import MOVES, Move, Program, has_epochs
from sidelane.program.transform import freeze, lower
from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.study import MODEL
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import bare
from sidelane_lab.sim.prelaunch import PRELAUNCH, prelaunch
from sidelane_lab.studies.phases.rows import KIND_OF, PHASED, PREDICTED, PhaseRow, PhasesOptions
from sidelane_lab.studies.phases.split import Phases, predict
from sidelane_lab.studies.phases.stamp import stamp

ALL_MOVES: frozenset[type[Move]] = frozenset(MOVES)
EAGER, GRAPH = LAUNCHES
COPY, COPIES = "copy", "copies"
TRANSFERS = (COPY, COPIES)
_ADDS = (
    "compute units add between two handshakes, beside the copies of other pieces, which is none of the four phases; "
    "sidelane collective and sidelane power measure it"
)
_RECEIVES = "ranks that copy nothing have no phases; sidelane collective measures broadcasts"
NO_PHASES: Mapping[str, str] = MappingProxyType(
    {
        **{kind.value: _ADDS for kind in REDUCING},
        **{kind.value: _RECEIVES for kind in (Kind.BROADCAST, Kind.SCATTER, Kind.GATHER)},
    }
)
"""Why a collective is no operation of this study."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one size, in one variant.

    Attributes:
        name: ``copy``: rank 0 copies ``nbytes`` to rank 1. ``copies``: to every peer, ``nbytes`` each. The collectives:
            out of place unless the name says otherwise.
        variant: of ``program.builders``; with ``+prelaunch`` behind a trigger.
        nbytes: of each copy of a transfer; gathered bytes of an all_gather, the local buffer of an all_to_all.
    """

    name: str
    variant: str
    nbytes: int

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.nbytes < 1:
            raise ValueError(f"Operation: nbytes (value={self.nbytes}, allowed=1 and more)")

    @property
    def prelaunched(self) -> bool:
        return self.variant.endswith(PRELAUNCH)

    @property
    def launches(self) -> tuple[str, ...]:
        """Ways to call it. In a graph of the caller's, what is prelaunched is the same as what is not."""
        return (EAGER,) if self.prelaunched else (EAGER, GRAPH)

    def __str__(self) -> str:
        return f"{self.name} {self.variant}"

    def program(
        self,
        ranks: int,
        *,
        stamped: bool = False,
        native: AbstractSet[type[Move]] = ALL_MOVES,
        frozen: bool = False,
    ) -> Program:
        """Build the program.

        Args:
            ranks: in the group.
            stamped: with stamps around the copies.
            native: the move commands that the executor has.
            frozen: for a graph.

        Raises:
            ValueError: no such variant of this collective, a size that it does not have, or fewer than two ranks.
        """
        if ranks < 2:
            raise ValueError(f"{self.name}: ranks (value={ranks}, allowed=2 and more)")
        program = build(self._collective(ranks), base_of(self.variant), Transport.PUSH)
        if self.name in TRANSFERS:
            program = bare(program)
        program = dataclasses.replace(lower(program, native), alone=True)  # as a call that says nothing of the kind
        if stamped:
            program = stamp(program)
        if frozen and has_epochs(program):
            program = freeze(program)
        return prelaunch(program) if self.prelaunched else program

    def _collective(self, ranks: int) -> Collective:
        part = max(1, self.nbytes // ranks)
        match self.name:
            case "copy":
                return scatter([0, self.nbytes, *[0] * (ranks - 2)], root=0)
            case "copies":
                return scatter([0, *[self.nbytes] * (ranks - 1)], root=0)
            case "all_to_all":
                return all_to_all([[part] * ranks] * ranks)
            case _:
                return all_gather([part] * ranks, in_place=self.name.endswith("in_place"))


def _check_name(name: str) -> None:
    if name not in PHASED:
        why = f": {NO_PHASES[name]}" if name in NO_PHASES else ""
        raise ValueError(f"Operation: name (value={name!r}, allowed={', '.join(PHASED)}){why}")


def base_of(variant: str) -> str:
    """The name that ``program.builders`` knows.

    >>> base_of("b2b+prelaunch"), base_of("pcpy")
    ('b2b', 'pcpy')
    """
    return variant.removesuffix(PRELAUNCH)


def operations(names: Sequence[str], wanted: Sequence[str], nbytes: int) -> list[Operation]:
    """Every operation in every wanted variant that it has.

    The one copy of a transfer is the same on whatever engine.

    Raises:
        ValueError: an operation that does not exist, or a variant that none of the operations has.
    """
    found = []
    used: set[str] = set()
    for name in names:
        _check_name(name)
        allowed = _variants(name)
        kept = [variant for variant in wanted if variant in allowed]
        used.update(kept)
        if name == COPY:
            kept = ["b2b" + variant.removeprefix(base_of(variant)) for variant in kept]
        found += [Operation(name, variant, nbytes) for variant in dict.fromkeys(kept)]
    unknown = [variant for variant in wanted if variant not in used]
    if unknown:
        plain = sorted({variant for name in names for variant in variants(KIND_OF[name])})
        allowed_names = f"{', '.join(plain)}, each also with {PRELAUNCH}"
        raise ValueError(f"variants: (value={', '.join(unknown)}, allowed={allowed_names})")
    return found


def _variants(name: str) -> tuple[str, ...]:
    plain = variants(KIND_OF[name])
    return (*plain, *(variant + PRELAUNCH for variant in plain))


def predicted_rows(machine: Machine, options: PhasesOptions) -> list[PhaseRow]:
    """Return the rows of a machine that is described.

    Raises:
        ValueError: no such operation or variant, or the machine has several nodes.
    """
    return [
        predicted_row(machine, operation, machine.gpus)
        for nbytes in options.sizes_on("cuda")
        for operation in operations(options.operations, options.variants, nbytes)
    ]


def predicted_row(machine: Machine, operation: Operation, ranks: int, note: str = "") -> PhaseRow:
    """Return the phases of an operation on a machine that is described.

    Raises:
        ValueError: the machine has fewer GPUs than there are ranks or several nodes, or the variant does not exist.
    """
    machine.refuse_nodes("phases, which are of copy engines in one node")
    phases = predict(operation.program(ranks, stamped=True), machine)
    return phase_row(operation, MODEL, PREDICTED, phases, note=note)


def phase_row(
    operation: Operation,
    launch: str,
    source: str,
    phases: Phases | None,
    *,
    correct: bool | None = None,
    note: str = "",
) -> PhaseRow:
    """A row whose time without stamps is its time."""
    names = [field.name for field in dataclasses.fields(Phases)]
    figures: dict[str, Any] = {name: None if phases is None else getattr(phases, name) for name in names}
    return PhaseRow(
        operation=operation.name,
        variant=operation.variant,
        bytes=operation.nbytes,
        launch=launch,
        source=source,
        total_unstamped_us=figures["total_us"],
        correct=correct,
        note=note,
        **figures,
    )
