"""What a caller asks for, before anything is known about it: the forms of a call, which all take one path."""

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
    """A collective on one or many tensors, as its caller asked for it.

    Attributes:
        kind: which.
        given: outputs and inputs, or the one argument that is both.
        details: root or operation.
    """

    kind: Kind
    given: tuple[Any, ...]
    details: tuple[Hashable, ...] = ()


def own_part(copied: object) -> tuple[Hashable, ...]:
    """Details of an all_to_all. Nothing where it copies own parts, as torch's does: most calls are known by that."""
    return () if copied is True else (copied if copied is False else repr(copied),)


class CallForm(Protocol):
    """A call as ``CallPath`` takes it.

    Attributes:
        name: of the call: its kind, or ``BATCH``.
        details: all that is asked besides tensors and variant.
        tensors: of the caller; None where this rank has none.
        repeated_as: what compiled code knows it by when it comes again; None for one collective on single tensors.
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
        """Everything about the tensors that :meth:`request` looks at. Raises as that does, or not at all."""
        ...

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        """Raise ValueError for a variant that no such call can have."""
        ...

    def request(self, arguments: Arguments) -> AnyRequest:
        """What this rank asks. Raises TypeError or ValueError for what is no such call."""
        ...

    def agreement(self, request: Any, variant: str, frozen: bool, beside: Beside) -> AnyAgreement:
        """What all ranks must agree on, of what :meth:`request` returned."""
        ...

    def written(self) -> tuple[torch.Tensor, ...]:
        """Those of the tensors that the call writes."""
        ...


class SingleCall(NamedTuple):
    """One collective on a tensor, or a pair of them. Every call on tensors is one: it is made in a fraction of a us."""

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
