"""What a caller asks for, before anything is known about it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from sidelane.program.collective import Kind


class Asked(NamedTuple):
    """A collective on one or many tensors, as its caller asked for it.

    Attributes:
        kind: which.
        given: outputs and inputs, or the one argument that is both.
        details: root or operation.
    """

    kind: Kind
    given: tuple[Any, ...]
    details: tuple[Hashable, ...] = ()
