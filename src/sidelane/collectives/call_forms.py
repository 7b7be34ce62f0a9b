"""Forms of a call: one tensor or pair, a list, a batch. All of them take the one path of ``call_path``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch

from sidelane.choice import Abilities
from sidelane.collectives.arguments import Arguments, Request, identities
from sidelane.collectives.list_calls import ListRequest
from sidelane.collectives.plan import Agreement, AnyAgreement, check_variant
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside

AnyRequest = Request | ListRequest


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


class CallForm(Protocol):
    """The interface of a call to ``CallPath``.

    Attributes:
        name: kind of the collective, or ``BATCH``.
        details: all arguments besides tensors and variant.
        tensors: the caller's tensors; None where this rank has none.
        repeated_as: key by which compiled code finds the call again; None for one collective on single tensors.
    """

    @property
    def name(self) -> str: ...

    @property
    def details(self) -> Hashable: ...

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]: ...

    @property
    def repeated_as(self) -> CallRequest | None: ...

    def identities(self) -> Hashable:
        """Return all properties of the tensors that :meth:`request` depends on. May raise the errors of that method."""
        ...

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        """Raise ValueError for a variant that does not exist for this kind of call."""
        ...

    def request(self, arguments: Arguments) -> AnyRequest:
        """Return the checked request of this rank. Raises TypeError or ValueError for arguments that do not fit."""
        ...

    def agreement(self, request: Any, variant: str, frozen: bool, beside: Beside) -> AnyAgreement:
        """Return the part of a request that must be the same on all ranks."""
        ...

    def written(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the call writes."""
        ...


class SingleCall(NamedTuple):
    """One collective on a tensor or a pair of tensors: the common case. Making it takes a fraction of a microsecond."""

    name: Kind
    tensors: tuple[Any, ...]
    details: tuple[Hashable, ...]
    repeated_as: None = None

    def identities(self) -> Hashable:
        return identities(self.tensors)

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        check_variant(self.name, variant, abilities)

    def request(self, arguments: Arguments) -> Request:
        asked: Request = getattr(arguments, self.name)(*self.tensors, *self.details)
        return asked

    def agreement(self, request: Request, variant: str, frozen: bool, beside: Beside) -> Agreement:
        return Agreement.of(request, variant, frozen, beside)

    def written(self) -> tuple[torch.Tensor, ...]:
        return () if self.tensors[0] is None else (self.tensors[0],)
