"""From what all ranks agreed on to a verified program."""

from __future__ import annotations

import dataclasses
import hashlib

from sidelane.collectives.arguments import Request
from sidelane.execute.base import Capabilities
from sidelane.program.build import Transport, build, variants
from sidelane.program.collective import REDUCING, Collective, Kind
from sidelane.program.ir import Program
from sidelane.program.transform import freeze, lower, prelaunch
from sidelane.program.verify import verify

AUTO = "auto"
PRELAUNCH = "+prelaunch"

MOST_PROGRAMS = 1024
"""Programs remembered; the oldest goes first, on all ranks alike. Uneven calls can have any number of them."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The part of a call that must be the same on every rank: from it, every rank makes the same program.

    Attributes:
        variant: as asked by the caller, ``auto`` included.
        input_place, output_place: number of the symmetric block and offset in it; None for ordinary memory, and for the
            arguments that only the root has.
        frozen: the call is being captured into a graph.
    """

    collective: Collective
    dtype: str
    variant: str
    input_place: tuple[int, int] | None
    output_place: tuple[int, int] | None
    frozen: bool

    @staticmethod
    def of(request: Request, variant: str, frozen: bool) -> Agreement:
        kind = request.collective.kind
        input_place = None if kind is Kind.SCATTER else request.input.place
        output_place = None if kind is Kind.GATHER else request.output.place
        if kind is Kind.REDUCE_SCATTER:
            input_place = output_place = None  # peers write into staging only
        elif kind is Kind.ALL_REDUCE:
            input_place = None
            output_place = request.whole.place if request.collective.in_place else output_place
        elif request.collective.in_place:
            # Each rank's part lies elsewhere in the whole, which is what has to be at one place on all ranks.
            input_place = output_place = request.whole.place
        elif output_place is not None:
            input_place = None  # peers write into the output; where an input lies is its own rank's business
        return Agreement(
            collective=request.collective,
            dtype=str(request.dtype).removeprefix("torch."),
            variant=variant,
            input_place=input_place,
            output_place=output_place,
            frozen=frozen,
        )

    def text(self) -> str:
        """One line for people and for comparison between ranks; the digest covers what the words leave out."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()
        places = f"input {_place(self.input_place)}, output {_place(self.output_place)}"
        captured = ", captured" if self.frozen else ""
        return f"{self.collective} of {self.dtype}, {places}, variant {self.variant}{captured} #{digest}"


class Planner:
    """Makes, verifies and keeps the programs of one communicator."""

    def __init__(self, capabilities: Capabilities, *, verify_programs: bool) -> None:
        self._capabilities = capabilities
        self._verify = verify_programs
        self._programs: dict[Agreement, Program] = {}  # in the order of their first call, which all ranks share

    def known(self, agreement: Agreement) -> bool:
        """True if all ranks have made this call before."""
        return agreement in self._programs

    def program(self, agreement: Agreement) -> Program:
        """The program for a call.

        Raises:
            ValueError: no such variant for this collective and these buffers.
            ProgramError: the program is wrong (a defect of Sidelane).
        """
        program = self._programs.get(agreement)
        if program is None:
            program = self._plan(agreement)
            if self._verify:
                verify(program)
            if len(self._programs) >= MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[agreement] = program
        return program

    def _plan(self, agreement: Agreement) -> Program:
        variant, prelaunched = agreement.variant, False
        if variant.endswith(PRELAUNCH):
            variant, prelaunched = variant.removesuffix(PRELAUNCH), True
        if prelaunched and agreement.frozen:
            raise ValueError(
                f"{agreement.collective.kind}: variant (value={agreement.variant!r}, allowed in a capture=without "
                f"{PRELAUNCH}: a graph hands over all its commands at once anyway)"
            )
        if variant == AUTO:
            variant = default_variant(agreement.collective)
        transport = choose_transport(agreement, variant)
        program = lower(build(agreement.collective, variant, transport), self._capabilities.moves)
        if prelaunched:
            program = prelaunch(program)
        return freeze(program) if agreement.frozen else program


def check_variant(kind: Kind, variant: str) -> None:
    """Refuse a variant that no call of this kind can have.

    Raises:
        ValueError: with the allowed names.
    """
    if variant != AUTO and variant.removesuffix(PRELAUNCH) not in variants(kind):
        allowed = ", ".join((AUTO, *variants(kind)))
        raise ValueError(f"{kind}: variant (value={variant!r}, allowed={allowed}; all but auto also with {PRELAUNCH})")


def default_variant(collective: Collective) -> str:
    """One engine a rank: on the machines measured so far, peers share one copy engine (``results/h200x4``)."""
    return "b2b" if collective.world_size > 1 else "pcpy"


def choose_transport(agreement: Agreement, variant: str) -> Transport:
    """The transport that copies least for the buffers at hand.

    Raises:
        ValueError: ``bcst`` or ``swap`` with an output in ordinary memory.
    """
    collective = agreement.collective
    if collective.kind in REDUCING:
        return Transport.PUSH if agreement.output_place is not None else Transport.PULL
    if not any(map(any, collective.counts)):
        return Transport.PUSH
    if variant in ("bcst", "swap"):
        if agreement.output_place is None and collective.world_size > 1:
            raise ValueError(
                f"{collective.kind}: variant {variant!r} writes into the peers' outputs, so output must be "
                "symmetric memory (value=ordinary memory, allowed=a tensor from Communicator.empty)"
            )
        return Transport.PUSH
    if collective.in_place and collective.kind is Kind.ALL_TO_ALL:
        return Transport.STAGED
    if agreement.output_place is not None:
        return Transport.PUSH
    if agreement.input_place is not None:
        return Transport.PULL
    return Transport.STAGED


def _place(place: tuple[int, int] | None) -> str:
    return "ordinary" if place is None else f"symmetric {place[0]}+{place[1]}"
