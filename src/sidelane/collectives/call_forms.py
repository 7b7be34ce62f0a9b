"""Forms of a call: one tensor or pair, a list, a batch, an uneven exchange. All take the one path of ``call_path``."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from sidelane.choice import Abilities
from sidelane.collectives.agreement import Agreement
from sidelane.collectives.arguments import Arguments, identities
from sidelane.collectives.call_cache import Requests
from sidelane.collectives.calls import compare
from sidelane.collectives.plan import check_variant
from sidelane.memory.control import ControlBlock
from sidelane.memory.posts import PostedCall
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside


class CallRequest(NamedTuple):
    """The arguments of a collective on one or many tensors.

    Attributes:
        kind: kind of the collective.
        given: outputs and inputs, or the one argument that is both.
        details: root or reduction.
    """

    kind: Kind
    given: tuple[Any, ...]
    details: tuple[Hashable, ...] = ()


def own_part(copied: object) -> tuple[Hashable, ...]:
    """Return the details of an all_to_all: empty if it copies own parts, which is the default and the common case."""
    return () if copied is True else (copied if copied is False else repr(copied),)


class CallForm(abc.ABC):
    """The interface of a call to ``CallPath``, and what most forms do.

    Attributes:
        name: kind of the collective, or ``BATCH``.
        details: all arguments besides tensors and variant. May raise the errors of :meth:`requests`.
        tensors: the caller's tensors; None where this rank has none.
        repeated_as: key by which compiled code finds the call again; None for one collective on single tensors.
        exchanges: the ranks exchange more than its signature in each call (:meth:`posted`).
    """

    __slots__ = ()
    exchanges = False

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    @abc.abstractmethod
    def details(self) -> Hashable: ...

    @property
    @abc.abstractmethod
    def tensors(self) -> tuple[Any, ...]: ...

    @property
    def repeated_as(self) -> CallRequest | None:
        return None

    def identities(self) -> Hashable:
        """Return all properties of the tensors that :meth:`requests` depends on. May raise its errors."""
        return identities(self.tensors)

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        """Raise ValueError for a variant that does not exist for this kind of call."""
        check_variant(Kind(self.name), variant, abilities)

    @abc.abstractmethod
    def requests(self, arguments: Arguments) -> Requests:
        """Return the checked requests of this rank. Raises TypeError or ValueError for arguments that do not fit."""

    def agreement(self, requests: Requests, variant: str, frozen: bool, beside: Beside) -> Agreement:
        """Return the part of the requests that must be the same on all ranks."""
        return Agreement.of(requests, variant, frozen, beside)

    def posted(self, agreement: Agreement) -> tuple[str, str]:
        """Return the signature of a request that was made, which the ranks compare, and what else they exchange."""
        return agreement.text(), ""

    def settled(self, control: ControlBlock, number: int, posts: Sequence[PostedCall]) -> CallForm:
        """Compare the posts of all ranks, and return the call that follows from them.

        Raises:
            PeerError, MismatchError: as ``calls.compare``.
        """
        compare(control, number, posts)
        return self

    def written(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the call writes."""
        return () if self.tensors[0] is None else (self.tensors[0],)


class SingleCall(CallForm):
    """One collective on a tensor or a pair of tensors: the common case. Making it takes a fraction of a microsecond."""

    __slots__ = ("details", "name", "tensors")
    name: Kind
    tensors: tuple[Any, ...]
    details: tuple[Hashable, ...]

    def __init__(self, name: Kind, tensors: tuple[Any, ...], details: tuple[Hashable, ...]) -> None:
        self.name, self.tensors, self.details = name, tensors, details

    def requests(self, arguments: Arguments) -> Requests:
        return (getattr(arguments, self.name)(*self.tensors, *self.details),)
