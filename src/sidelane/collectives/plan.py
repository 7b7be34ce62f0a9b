"""Planner: it turns an agreement of all ranks into a plan with a verified program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

from sidelane.choice import Abilities, Candidate, Choice, Profile, choose
from sidelane.choice.candidate import EVERYTHING, SM, everything, find, takes_one_tensor
from sidelane.collectives.agreement import Agreement, CallPart
from sidelane.config import NOTHING
from sidelane.execute.base import Capabilities
from sidelane.program.builders import Transport, build, build_batch, writes_into_outputs
from sidelane.program.caching import Once, program_bytes
from sidelane.program.collective import Kind
from sidelane.program.ir import Move, Program
from sidelane.program.kernel import ALIGNMENT, KernelProgram, kernel_program
from sidelane.program.shape import CallShape
from sidelane.program.transform import freeze, hold, lower
from sidelane.program.verify import verify
from sidelane.sizes import format_bytes

AUTO = "auto"

P = TypeVar("P", bound="CallProgram")

CallProgram = Program | KernelProgram
"""Executable form of a call: a program or a kernel."""

MOST_PROGRAMS, MOST_PROGRAM_BYTES = 1024, 64 << 20
"""Largest number of cached programs, and bytes of these as ``caching`` estimates them.

The oldest goes first, on all ranks alike; uneven calls can need any number.
"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The way in which all ranks run a call that they have agreed on.

    Attributes:
        program: verified program.
        choice: candidate that it was made from, and the reason.
        staging: bytes of staging that the call needs on every rank, by type of program: also those that the same call
            needs in a capture, which cannot allocate and for which ``auto`` may choose another candidate.
    """

    program: CallProgram
    choice: Choice
    staging: Mapping[type[CallProgram], int]


class Planner:
    """Makes, verifies and caches the plans of one communicator.

    Args:
        capabilities: commands that the executor supports.
        profile: measured times by which ``auto`` chooses, the same on all ranks; None: choose by a heuristic.
        abilities: implementations that the machine supports, the same on all ranks.
        chosen_by: source of the profile, in words, for those who read a choice.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        profile: Profile | None = None,
        abilities: Abilities = EVERYTHING,
        chosen_by: str = "",
    ) -> None:
        self._capabilities = capabilities
        self._profile = profile
        self._abilities = abilities
        self._chosen_by = chosen_by
        self._plans: dict[Agreement, Plan] = {}  # in the order of their first call, which all ranks share
        self._nbytes = 0
        self._held: Once[Program, Program] = Once(lambda program: self._proved(hold(program)))

    def known(self, agreement: Agreement) -> bool:
        """Return True if all ranks have made this call before: no rank needs another agreement or allocation for it."""
        return agreement in self._plans

    def forget(self, agreement: Agreement) -> None:
        """Forget a plan whose first call failed here: the peers may not have made that call."""
        plan = self._plans.pop(agreement, None)
        if plan is not None:
            self._nbytes -= program_bytes(plan.program)

    def plan(self, agreement: Agreement) -> Plan:
        """Return the plan of a call.

        Raises:
            ValueError: the variant cannot run with these buffers.
            ProgramError: the program is wrong (a defect of Sidelane).
        """
        plan = self._plans.get(agreement)
        if plan is None:
            choice = self.choice(agreement)
            program = self._proved(self._make(agreement, choice.candidate))
            plan = Plan(program, choice, self._staging(agreement, program, choice.candidate))
            self._nbytes += program_bytes(program)
            while self._plans and (len(self._plans) >= MOST_PROGRAMS or self._nbytes > MOST_PROGRAM_BYTES):
                self.forget(next(iter(self._plans)))
            self._plans[agreement] = plan
        return plan

    def plan_that_fits(self, agreement: Agreement, fits: Callable[[CallProgram], bool]) -> Plan:
        """Return the plan of a call. If the choice of ``auto`` does not fit, take the best candidate that does.

        Args:
            agreement: the call.
            fits: returns True if a program fits, with the same result on all ranks.
        """
        plan = self.plan(agreement)
        if agreement.variant != AUTO or fits(plan.program):
            return plan
        for candidate, _ in plan.choice.table:
            program = self._make(agreement, candidate)
            if fits(program):
                reason = f"{plan.choice.candidate} needs staging that is not there, and a capture can allocate none"
                subject = _subject(agreement.call, candidate)
                taken = dataclasses.replace(plan.choice, candidate=candidate, reason=reason, subject=subject, by="")
                return Plan(self._proved(program), taken, {type(program): staging_bytes(program)})
        return plan

    def held(self, agreement: Agreement) -> tuple[Program, Choice]:
        """Return the program of a call behind one trigger on each rank (``transform.hold``), and its choice.

        Raises:
            ValueError, ProgramError: as :meth:`plan`.
        """
        plan = self.plan(agreement)
        assert isinstance(plan.program, Program), "the caller asked for a variant of the copy engines"
        return self._held(plan.program), plan.choice

    def choice(self, agreement: Agreement) -> Choice:
        """Choose the candidate of a call whose variant was checked, with the reason; the same on every rank."""
        if agreement.variant == AUTO:
            choice = choose(self._profile, agreement.call, self._abilities)
            return dataclasses.replace(choice, subject=_subject(agreement.call, choice.candidate), by=self._chosen_by)
        candidate = find(agreement.kinds[0], agreement.variant)
        assert candidate is not None, "check_variant lets nothing else through"
        reason, table = "the caller asked for it", ((candidate, None),)
        return Choice(candidate, reason, table, _subject(agreement.call, candidate))

    def _make(self, agreement: Agreement, candidate: Candidate) -> CallProgram:
        return make_program(agreement, candidate, self._capabilities.moves, through_host=self._abilities.through_host)

    def _proved(self, program: P) -> P:
        if isinstance(program, Program):
            verify(program)
        return program

    def _staging(
        self, agreement: Agreement, program: CallProgram, candidate: Candidate
    ) -> dict[type[CallProgram], int]:
        """Return ``Plan.staging``."""
        found: dict[type[CallProgram], int] = {type(program): staging_bytes(program)}
        repeats = agreement.variant == AUTO and agreement.call.even  # uneven calls seldom do: no use in planning twice
        if repeats and self._abilities.captures and not agreement.frozen:
            captured = dataclasses.replace(agreement, frozen=True)
            other = self.choice(captured).candidate
            if other != candidate:
                program = self._make(captured, other)
            found[type(program)] = max(found.get(type(program), 0), staging_bytes(program))
        return found


def staging_bytes(program: CallProgram) -> int:
    """Return the bytes of staging that a program needs on every rank."""
    return program.staging_bytes if isinstance(program, KernelProgram) else max(program.staging_bytes)


def _subject(call: CallShape, candidate: Candidate) -> str:
    """Return what runs, and how, in words."""
    name = "a batch" if call.mixed else str(call.kind)
    tensors = f" in {call.tensors} tensors" if call.listed else ""
    return f"{name} of {format_bytes(call.nbytes)}{tensors} by {candidate.mover}"


def make_program(
    agreement: Agreement, candidate: Candidate, moves: AbstractSet[type[Move]], *, through_host: bool = False
) -> CallProgram:
    """Make the program of a call; it is not verified yet.

    Args:
        agreement: the call.
        candidate: implementation and variant.
        moves: command types that the executor supports.
        through_host: see ``Abilities``.

    Raises:
        ValueError: the variant cannot run with these buffers.
    """
    if candidate.implementation == SM:
        # A list leaves out tensors without bytes, and its kernels read inputs of any alignment.
        there = [part for part in agreement.parts if part.has_bytes or not agreement.is_listed]
        inputs = [part.input_location for part in there]
        return kernel_program(
            agreement.collective,
            candidate.variant,
            symmetric_input=all(
                location is not None and (agreement.is_listed or location[1] % ALIGNMENT == 0) for location in inputs
            ),
            symmetric_output=all(part.output_location is not None for part in there),
            through_host=through_host,
        )
    program = lower(_build(agreement, candidate.variant), moves)
    # Copies of rows are not split into every other row.
    program = dataclasses.replace(program, alone=agreement.beside == NOTHING and not agreement.is_resharded)
    return freeze(program) if agreement.frozen else program


def _build(agreement: Agreement, variant: str) -> Program:
    if agreement.batch is not None:
        transports = [choose_transport(part.for_engines(), variant) for part in agreement.parts]
        return build_batch(agreement.batch, variant, transports)
    (part,) = agreement.parts
    return build(part.collective, variant, choose_transport(part, variant))


def check_variant(kind: Kind, variant: str, abilities: Abilities = EVERYTHING, *, listed: bool = False) -> None:
    """Refuse a variant that does not exist for this kind of call. ``listed``: a call with lists of tensors.

    Raises:
        TypeError: the variant is no string.
        ValueError: the variant does not exist; the allowed names are listed.
    """
    names = [found.variant for found in everything(kind, abilities) if not (listed and takes_one_tensor(found))]
    if not isinstance(variant, str):
        raise TypeError(f"{kind}: variant (value={variant!r}, allowed={', '.join((AUTO, *names))})")
    if variant != AUTO and variant not in names:
        allowed = ", ".join((AUTO, *names))
        elsewhere, here = ({found.variant for found in everything(kind, which)} for which in (EVERYTHING, abilities))
        where = f": {variant} is for other machines, see docs/internals/protocols.md and sidelane info"
        reason = where if variant in elsewhere - here else ""
        raise ValueError(
            f"{kind}: variant{' for lists' if listed else ''} (value={variant!r}, allowed={allowed}){reason}"
        )


def choose_transport(part: CallPart, variant: str) -> Transport:
    """Choose the transport with the fewest copies for the buffers of a call (for reductions: for their results).

    Raises:
        ValueError: the variant writes into outputs, and the output is ordinary memory.
    """
    collective = part.collective
    if not part.has_bytes or collective.kind is Kind.REDUCE_SCATTER:
        return Transport.PUSH
    if collective.kind is Kind.ALL_REDUCE:
        return Transport.PUSH if part.output_location is not None else Transport.STAGED
    if writes_into_outputs(variant):
        if part.output_location is None and collective.world_size > 1:
            raise ValueError(
                f"{collective.kind}: variant {variant!r} writes into the peers' outputs, so output must be "
                "symmetric memory (value=ordinary memory, allowed=a tensor from Communicator.empty)"
            )
        return Transport.PUSH
    if collective.in_place and collective.kind is Kind.ALL_TO_ALL:
        return Transport.STAGED
    if part.output_location is not None:
        return Transport.PUSH
    if part.input_location is not None:
        return Transport.PULL
    return Transport.STAGED
