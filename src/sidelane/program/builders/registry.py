"""Algorithms for copy engines: what each file of this folder says of itself, and what everybody else asks.

A new algorithm is a new file here that calls :func:`register`. ``build``, ``verify``, the choice, the commands and the
tests go by what it says; no table elsewhere knows its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sidelane.fields import an, one_of, settle, several, text, whole
from sidelane.program.builders.beside import beside
from sidelane.program.builders.transport import Transport
from sidelane.program.collective import Collective, Kind
from sidelane.program.ir import Program
from sidelane.program.shape import CallShape

_KIND, _TRANSPORT, _COLLECTIVE = one_of(Kind), one_of(Transport), an(Collective)
_KINDS = several(_KIND)


def no_objection(shape: CallShape) -> str:
    """An algorithm that is legal wherever its kinds are."""
    return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to run some collectives on copy engines.

    Attributes:
        name: as callers write it in ``variant=``.
        kinds: of the collectives that it runs.
        preference: the least is taken first among those that are expected to be equally fast.
        assemble: makes the commands of a moving collective, before ``finish``; None for one that takes turns.
        whole: makes a whole program where more than that is to be done; None: ``finish(assemble(...))``.
        finish: the steps behind ``assemble``, or behind the merging of many.
        into_outputs: ranks write into the outputs of others, which must be symmetric.
        merges: its programs have one handshake with every peer, so that those of many tensors can be made one.
        in_turns: it has two programs that follow each other (``alternating``), and is not for prelaunched calls.
        objection: why it is not legal for a call, in words; empty if it is.
        thumb: why to take it where nothing was measured, in words; empty if there is no reason to.
    """

    name: str
    kinds: tuple[Kind, ...]
    preference: int
    assemble: Callable[[Collective, Transport], Program] | None = None
    whole: Callable[[Collective, Transport], Program] | None = None
    finish: Callable[[Program], Program] = beside
    into_outputs: bool = False
    merges: bool = True
    in_turns: bool = False
    objection: Callable[[CallShape], str] = no_objection
    thumb: Callable[[CallShape], str] = no_objection

    def __post_init__(self) -> None:
        settle(self, name=text, kinds=_KINDS, preference=whole)


_registered: dict[tuple[Kind, str], Algorithm] = {}


def register(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known.

    Raises:
        ValueError: there is one of that name for one of its kinds.
    """
    for kind in algorithm.kinds:
        if _registered.setdefault((kind, algorithm.name), algorithm) is not algorithm:
            raise ValueError(f"register: name (value={algorithm.name!r}, allowed=what no algorithm for {kind} has)")
    return algorithm


def algorithms(kind: Kind) -> tuple[Algorithm, ...]:
    """All for a collective, in order of preference between equals."""
    kind = _KIND("algorithms: kind", kind)
    found = [algorithm for (of, _), algorithm in _registered.items() if of is kind]
    return tuple(sorted(found, key=lambda algorithm: (algorithm.preference, algorithm.name)))


def find_algorithm(kind: Kind, name: str) -> Algorithm | None:
    """The one of that name for a collective; None if there is none."""
    return _registered.get((_KIND("find_algorithm: kind", kind), text("find_algorithm: name", name)))


def variants(kind: Kind) -> tuple[str, ...]:
    """Names of those that are one program, in order of preference between equals."""
    return tuple(algorithm.name for algorithm in algorithms(kind) if not algorithm.in_turns)


def list_variants(kind: Kind) -> tuple[str, ...]:
    """Those of :func:`variants` for batches, which have one handshake for all of their parts."""
    return tuple(algorithm.name for algorithm in algorithms(kind) if algorithm.merges)


def merges(name: str) -> bool:
    """Programs of the algorithm of that name can be merged to one for many tensors, whatever the collective."""
    return all(algorithm.merges for (_, known), algorithm in _registered.items() if known == name)


def in_turns(name: str) -> bool:
    """The algorithm of that name has two programs that follow each other."""
    return any(algorithm.in_turns for (_, known), algorithm in _registered.items() if known == name)


def for_every_kind(name: str) -> bool:
    """Every collective has an algorithm of that name, so that a batch of several kinds can have it."""
    return all((kind, name) in _registered for kind in Kind)


def writes_into_outputs(variant: str) -> bool:
    """Ranks write into the outputs of others in the algorithm of that name, which must be symmetric then."""
    return any(algorithm.into_outputs for (_, name), algorithm in _registered.items() if name == variant)


def build(collective: Collective, variant: str, transport: Transport = Transport.PUSH) -> Program:
    """Build the program of a collective.

    Args:
        collective: what to do (see ``program.collective``).
        variant: one of ``variants(collective.kind)``.
        transport: which buffers are symmetric. Reducing collectives begin with staging whatever is said here.

    Raises:
        TypeError: an argument is something else.
        ValueError: the variant does not exist for this collective, or cannot run with this transport.
    """
    collective, transport = _COLLECTIVE("build: collective", collective), _TRANSPORT("build: transport", transport)
    algorithm = find_algorithm(collective.kind, text("build: variant", variant))
    if algorithm is None or algorithm.assemble is None:
        allowed = ", ".join(variants(collective.kind))
        raise ValueError(f"build: variant of {collective.kind} (value={variant!r}, allowed={allowed})")
    if algorithm.whole is not None:
        return algorithm.whole(collective, transport)
    return algorithm.finish(algorithm.assemble(collective, transport))
