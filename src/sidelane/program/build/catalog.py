"""Every builder by name: the one door through which programs are made."""

from __future__ import annotations

from sidelane.program.build import moving, reducing
from sidelane.program.build.moving import Transport
from sidelane.program.collective import REDUCING, Collective, Kind
from sidelane.program.ir import Program

_MOVING = {
    "pcpy": moving.pcpy,
    "b2b": moving.b2b,
    "striped": moving.striped,
    "bcst": moving.bcst,
    "swap": moving.swap,
}


def variants(kind: Kind) -> tuple[str, ...]:
    """Names of the variants that exist for a collective."""
    if kind in REDUCING:
        return ("pcpy", "b2b")
    if kind in (Kind.ALL_GATHER, Kind.BROADCAST):
        return ("pcpy", "b2b", "striped", "bcst")
    if kind is Kind.ALL_TO_ALL:
        return ("pcpy", "b2b", "striped", "swap")
    return ("pcpy", "b2b", "striped")


def build(collective: Collective, variant: str, transport: Transport = Transport.PUSH) -> Program:
    """Build the program of a collective.

    Args:
        collective: what to do (see ``program.collective``).
        variant: one of ``variants(collective.kind)``.
        transport: which buffers are symmetric. Reducing collectives push into staging whatever is said here.

    Raises:
        ValueError: the variant does not exist for this collective, or cannot run with this transport.
    """
    allowed = variants(collective.kind)
    if variant not in allowed:
        raise ValueError(f"build: variant of {collective.kind} (value={variant!r}, allowed={', '.join(allowed)})")
    if collective.kind in REDUCING:
        return reducing.reduce(collective, variant)
    return _MOVING[variant](collective, transport)
