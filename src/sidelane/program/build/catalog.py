"""Every builder by name: the one door through which programs are made."""

from __future__ import annotations

from sidelane.program.build import moving, reducing
from sidelane.program.build.beside import beside
from sidelane.program.build.moving import Transport
from sidelane.program.build.relayed import RELAY, relay
from sidelane.program.build.striped import STRIPED, stripe
from sidelane.program.collective import REDUCING, Collective, Kind
from sidelane.program.ir import Program

_MOVING = {"pcpy": moving.pcpy, "b2b": moving.b2b, "bcst": moving.bcst, "swap": moving.swap, RELAY: relay}

INTO_OUTPUTS = ("bcst", "swap", RELAY)
"""Variants in which ranks write into the outputs of others, which must be symmetric."""


def variants(kind: Kind) -> tuple[str, ...]:
    """Names of the variants that exist for a collective, in order of preference between equals."""
    if kind in REDUCING:
        return ("b2b", "pcpy")
    if kind is Kind.ALL_GATHER:
        return ("b2b", STRIPED, "bcst", "pcpy")
    if kind is Kind.BROADCAST:
        return ("b2b", STRIPED, RELAY, "bcst", "pcpy")
    if kind is Kind.ALL_TO_ALL:
        return ("b2b", STRIPED, "swap", "pcpy")
    return ("b2b", STRIPED, "pcpy")


def list_variants(kind: Kind) -> tuple[str, ...]:
    """Those of :func:`variants` for batches, which have one handshake for all of their parts: relays have many."""
    return tuple(name for name in variants(kind) if name != RELAY)


def build(collective: Collective, variant: str, transport: Transport = Transport.PUSH) -> Program:
    """Build the program of a collective.

    Args:
        collective: what to do (see ``program.collective``).
        variant: one of ``variants(collective.kind)``.
        transport: which buffers are symmetric. Reducing collectives begin with staging whatever is said here.

    Raises:
        ValueError: the variant does not exist for this collective, or cannot run with this transport.
    """
    allowed = variants(collective.kind)
    if variant not in allowed:
        raise ValueError(f"build: variant of {collective.kind} (value={variant!r}, allowed={', '.join(allowed)})")
    if collective.kind in REDUCING:
        return reducing.reduce(collective, variant, transport)
    return finish(assemble(collective, variant, transport), variant)


def assemble(collective: Collective, variant: str, transport: Transport) -> Program:
    """What the builder makes of a moving collective, before :func:`finish`."""
    return _MOVING[base_of(variant)](collective, transport)


def base_of(variant: str) -> str:
    """The variant whose builder makes another one's commands.

    >>> base_of("striped"), base_of("swap")
    ('b2b', 'swap')
    """
    return "b2b" if variant == STRIPED else variant


def finish(program: Program, variant: str) -> Program:
    """The steps behind the builders of moving programs."""
    program = beside(program)
    return stripe(program) if variant == STRIPED else program
