"""Shapes of calls and names of variants, for the code that chooses how to run a call: legality, times, heuristics."""

from __future__ import annotations

import dataclasses
import functools
import math

from sidelane.config import BESIDE, COMPUTE, NOTHING
from sidelane.fields import at_least, number, one_of, optional, plain_text, validate
from sidelane.program.collective import Collective, Kind

NARROW = "_narrow"
PUSH = "_push"

_KIND, _COUNT, _BYTES = one_of(Kind), at_least(1), at_least(0)


def _gemm_of(name: str, value: object) -> tuple[int, int, int, str]:
    """Check the sizes and the dtype of a GEMM."""
    if not isinstance(value, tuple | list) or len(value) != 4:
        raise TypeError(f"{name} (value={value!r}, allowed=(m, n, k, dtype))")
    m, n, k = (_COUNT(name, size) for size in value[:3])
    return m, n, k, plain_text(name, value[3])


_GEMM = optional(_gemm_of)


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """A computation beside a call, by its time; ``Communicator.computation`` makes one, the same on every rank.

    Attributes:
        us: time that it takes alone, in microseconds.
        gemm: (m, n, k, dtype) if it is one.
        copies_hidden: share of the shorter of the two that disappears where copy engines move the bytes.
        kernels_hidden: the same share for calls that kernels run.

    Raises:
        TypeError: a field is not of its kind.
        ValueError: ``us`` is not a positive finite time, or a share is not between 0 and 1.
    """

    us: float
    gemm: tuple[int, int, int, str] | None = None
    copies_hidden: float = 1.0
    kernels_hidden: float = 0.0

    def __post_init__(self) -> None:
        validate(self, us=number, gemm=_GEMM, copies_hidden=number, kernels_hidden=number)
        if not (math.isfinite(self.us) and self.us > 0):
            raise ValueError(f"computation: us (value={self.us!r}, allowed=microseconds above 0)")
        if not (self.copies_hidden <= 1 and self.kernels_hidden <= 1):
            raise ValueError(
                f"computation: hidden (value={self.copies_hidden}, {self.kernels_hidden}, allowed=1 and less: a share)"
            )

    def __str__(self) -> str:
        what = "" if self.gemm is None else " ({}x{}x{} {})".format(*self.gemm)
        return f"compute of {self.us:.4g} us{what}"

    def together_us(self, comm_us: float, *, by_kernels: bool) -> float:
        """Return the expected time of both together in microseconds.

        Args:
            comm_us: time of the call alone in microseconds.
            by_kernels: kernels move its bytes, not copy engines.

        >>> Computation(1000.0, copies_hidden=0.9).together_us(500.0, by_kernels=False)
        1050.0
        """
        hidden = self.kernels_hidden if by_kernels else self.copies_hidden
        return max(self.us, comm_us) + (1.0 - hidden) * min(self.us, comm_us)


Beside = str | Computation
"""Type of the hint ``beside``: ``nothing``, ``compute``, or a computation by its time."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallShape:
    """Properties of a call that the choice depends on; the same on every rank.

    Attributes:
        kind: kind of the collective.
        world_size: number of ranks in the group.
        nbytes: gathered size of an all_gather, the largest local buffer of the others.
        dtype: dtype of the elements; it matters to the reducing collectives only.
        in_place: input and output share memory; of a list, of some tensor.
        symmetric: peers can write into the output (it lies at one place in symmetric memory); of a reduce_scatter read
            the input, of an all_reduce both.
        captured: the call is captured into a graph of the caller's.
        beside: kind of work next to it: ``nothing`` or ``compute``.
        copies_own: bytes that stay on their rank are copied into its output; of a list, those of every tensor.
        even: every two ranks exchange the same number of bytes, the root and each of the others if there is one (the
            shards of an all_reduce may differ).
        listed: it is a call on a list of tensors; ``nbytes`` are those of all, the other fields are true of each.
        tensors: number of tensors.
        mixed: the list has several kinds of collective; ``kind`` is that with the most bytes.
        uniform: all tensors have one reduction and dtype, if they reduce, and one root, if they have any.
        resharded: parts of tensors lie in rows (``program.resharding``).
        computation: computation that runs next to it, if its time is known; ``beside`` is ``compute`` then.
    """

    kind: Kind
    world_size: int
    nbytes: int
    dtype: str = "bfloat16"
    in_place: bool = False
    symmetric: bool = True
    captured: bool = False
    beside: str = NOTHING
    even: bool = True
    listed: bool = False
    tensors: int = 1
    mixed: bool = False
    uniform: bool = True
    computation: Computation | None = None
    copies_own: bool = True
    resharded: bool = False

    def __post_init__(self) -> None:
        validate(
            self, kind=_KIND, world_size=_COUNT, nbytes=_BYTES, tensors=_BYTES, dtype=plain_text, beside=plain_text
        )

    @staticmethod
    def of(collective: Collective, dtype: str, *, symmetric: bool, captured: bool, beside: Beside) -> CallShape:
        """Describe a call of ``collective``."""
        check_beside(str(collective.kind), beside)
        timed = isinstance(beside, Computation)
        sizes = {nbytes for row in collective.counts for nbytes in row}
        return CallShape(
            kind=collective.kind,
            world_size=collective.world_size,
            nbytes=collective.largest_buffer,
            dtype=dtype,
            in_place=collective.in_place,
            symmetric=symmetric,
            captured=captured,
            beside=COMPUTE if timed else str(beside),
            computation=beside if isinstance(beside, Computation) else None,
            copies_own=collective.copies_own,
            even=len(sizes) == 1 or collective.kind in (Kind.ALL_REDUCE, Kind.BROADCAST),
        )


def check_beside(function: str, beside: object) -> None:
    """Refuse an unknown hint.

    Raises:
        ValueError: the hint is unknown; the text lists the allowed ones.
    """
    if not isinstance(beside, Computation) and beside not in BESIDE:
        raise ValueError(
            f"{function}: beside (value={beside!r}, allowed={', '.join(BESIDE)}, a result of Communicator.computation)"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """Parts of a variant's name.

    Attributes:
        algorithm: name of the algorithm without suffixes: ``b2b``, ``one_shot``.
        narrow: the kernel leaves nine tenths of the SMs to other kernels.
        pushes: the kernel stores shards with the ranks that add them up; otherwise those ranks fetch them.
    """

    algorithm: str
    narrow: bool = False
    pushes: bool = False

    @staticmethod
    @functools.cache
    def of(name: str) -> Variant:
        """Split a name into its parts. Suffixes are in the order of ``name``; a name without suffixes is its algorithm.

        >>> Variant.of("two_shot_narrow")
        Variant(algorithm='two_shot', narrow=True, pushes=False)
        """
        rest, found = name, []
        for suffix in (PUSH, NARROW):
            found.append(rest.endswith(suffix))
            rest = rest.removesuffix(suffix)
        pushes, narrow = found
        return Variant(rest, narrow, pushes)

    @property
    def name(self) -> str:
        """Name of the variant with its suffixes; :meth:`of` splits it."""
        suffixes = ((NARROW, self.narrow), (PUSH, self.pushes))
        return self.algorithm + "".join(suffix for suffix, there in suffixes if there)

    @property
    def wide(self) -> str:
        """Name of the same variant with all the SMs that it can use."""
        return dataclasses.replace(self, narrow=False).name
