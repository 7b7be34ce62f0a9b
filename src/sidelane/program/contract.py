"""Contracts of programs that are no collectives: named buffers, and the contents of each at the end.

The collectives of ``program.collective`` define themselves. Any other movement of bytes, such as of a cache from one
rank to another, is defined by a contract: ``verify`` proves that the program fulfils it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property

from sidelane.fields import an, optional, plain_text, several, validate, whole
from sidelane.program.collective import MAX_WORLD_SIZE, Buffer, Reduction, Span


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Bytes that a rank holds at the end.

    Attributes:
        dst: span of the bytes.
        srcs: sources, as the callers left them: one span, or those that ``reduction`` combines, in order.
        reduction: reduction of the sources; None for a copy.
    """

    dst: Span
    srcs: tuple[Span, ...]
    reduction: Reduction | None = None

    def __post_init__(self) -> None:
        plain = type(self.dst) is Span and type(self.srcs) is tuple and {Span}.issuperset(map(type, self.srcs))
        if not (plain and (self.reduction is None or type(self.reduction) is Reduction)):
            validate(self, dst=_SPAN, srcs=_SPANS, reduction=_REDUCTION)


_SPAN, _SPANS, _REDUCTION = an(Span), several(an(Span), Span), optional(an(Reduction))
_NAMES, _SIZES = several(plain_text, str), several(whole, int)
_RESULTS = several(an(Result), Result)


def _buffer(name: str, value: object) -> tuple[str, tuple[int, ...]]:
    """Check the name of a buffer and its bytes on each rank."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name} (value={value!r}, allowed=pairs of a name and bytes of the ranks)")
    return plain_text(name, value[0]), _SIZES(f"{name}: bytes of {value[0]!r}", value[1])


_BUFFERS = several(_buffer)


@dataclasses.dataclass(frozen=True)
class Contract:
    """A movement of bytes between named buffers of the ranks; :meth:`of` makes it from a mapping.

    Attributes:
        name: name of the contract in texts.
        world_size: number of ranks.
        sizes: bytes of each buffer on each rank, by name.
        results: all bytes that change.
        scratch: names of buffers that may hold anything at the end.
        computed: buffers for the results that callers compute while the program is under way. They have no memory: a
            ``caller`` queue copies from them where the caller's own kernels write, in front of a trigger.
        used: buffers for the data that callers read while the program is under way. They have no memory: a ``caller``
        queue copies to them whatever the caller's own kernels read, behind an arrival.

    Raises:
        TypeError, ValueError: see :meth:`of`.
    """

    name: str
    world_size: int
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[Result, ...]
    scratch: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    used: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        validate(self, name=plain_text, world_size=whole, sizes=_BUFFERS, results=_RESULTS)
        validate(self, scratch=_NAMES, computed=_NAMES, used=_NAMES)
        self._check_buffers()
        self._check_results()

    @staticmethod
    def of(
        name: str,
        buffers: Mapping[str, Sequence[int]],
        results: Iterable[Result],
        *,
        scratch: Iterable[str] = (),
        computed: Iterable[str] = (),
        used: Iterable[str] = (),
    ) -> Contract:
        """Define a movement.

        Args:
            name: name of the contract in texts.
            buffers: bytes on each rank, by name of the buffer; every program has ``staging`` besides.
            results: contents of the buffers at the end. Every other byte, but for scratch, must be as the caller left
                it.
            scratch: names of buffers that may hold anything at the end.
            computed: names of buffers for results that callers compute meanwhile.
            used: names of buffers for data that callers read meanwhile.

        Raises:
            TypeError: a name, a size or a result has another type.
            ValueError: no buffers, different numbers of ranks, negative sizes, or a result that does not lie in the
                buffers, overlaps another one, or does not match its sources.
        """
        if not isinstance(buffers, Mapping):
            raise TypeError(
                f"Contract: buffers (value={buffers!r}, allowed=a mapping from names to bytes of the ranks)"
            )
        sizes = _BUFFERS("Contract: buffers", tuple(buffers.items()))
        world_size = len(sizes[0][1]) if sizes else 0
        kinds = {"scratch": scratch, "computed": computed, "used": used}
        lists = {kind: [*some] if isinstance(some, Set) else some for kind, some in kinds.items()}
        named = {kind: tuple(sorted({*_NAMES(f"Contract: {kind}", some)})) for kind, some in lists.items()}
        return Contract(name, world_size, sizes, _RESULTS("Contract: results", results), **named)

    def buffer_bytes(self, rank: int, buffer: str) -> int:
        """Return the size of a buffer in bytes; 0 if the rank has none of that name."""
        sizes = self._by_name.get(buffer)
        return 0 if sizes is None else sizes[rank]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers."""
        return tuple(self._by_name)

    @property
    def bound(self) -> tuple[str, ...]:
        """Names of the buffers that have memory."""
        return tuple(name for name in self._by_name if name not in self.computed + self.used)

    @cached_property
    def _by_name(self) -> dict[str, tuple[int, ...]]:
        return dict(self.sizes)

    def _check_buffers(self) -> None:
        counts = {len(ranks) for _, ranks in self.sizes}
        if counts != {self.world_size} or not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"Contract: all buffers must have one number of ranks (value={sorted(counts)})")
        if any(size < 0 for _, ranks in self.sizes for size in ranks):
            raise ValueError(f"Contract: sizes must not be negative (value={self._by_name})")
        names = [buffer for buffer, _ in self.sizes]
        if Buffer.STAGING in names or not all(names) or len({*names}) < len(names):
            allowed = "each once, any but '' and 'staging'"
            raise ValueError(f"Contract: names of buffers (value={sorted(names)}, allowed={allowed})")
        kinds = {"scratch": {*self.scratch}, "computed": {*self.computed}, "used": {*self.used}}
        for kind, some in kinds.items():
            if some - {*names}:
                raise ValueError(f"Contract: {kind} (value={sorted(some - {*names})}, allowed={sorted(names)})")
        for (one, some), (other, others) in itertools.combinations(kinds.items(), 2):
            if both := some & others:
                raise ValueError(f"Contract: buffers that are {one} and {other} (value={sorted(both)})")

    def _check_results(self) -> None:
        ends: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for result in self.results:
            for span in (result.dst, *result.srcs):
                size = self.buffer_bytes(span.rank, span.buffer) if 0 <= span.rank < self.world_size else 0
                if span.nbytes <= 0 or not 0 <= span.offset <= span.end <= size:
                    raise ValueError(f"Contract: a result names bytes that there are not (value={span}, have={size})")
            if any(src.nbytes != result.dst.nbytes for src in result.srcs):
                raise ValueError(f"Contract: a result and what it is made of differ in size (value={result})")
            if len(result.srcs) != 1 if result.reduction is None else not result.srcs:
                raise ValueError(f"Contract: a result is a copy of one span, or a reduction of some (value={result})")
            if result.reduction is not None:
                element, spans = result.reduction.element_bytes, (result.dst, *result.srcs)
                if any(span.offset % element or span.nbytes % element for span in spans):
                    raise ValueError(
                        f"Contract: a reduction combines whole elements of {element} bytes (value={result})"
                    )
            if result.dst.buffer in self.scratch + self.computed:
                raise ValueError(
                    f"Contract: a result lies neither in scratch nor in a computed buffer (value={result.dst})"
                )
            ends.setdefault((result.dst.rank, result.dst.buffer), []).append((result.dst.offset, result.dst.end))
        for (rank, buffer), ranges in ends.items():
            ranges.sort()
            for (_, end), (start, _) in itertools.pairwise(ranges):
                if start < end:
                    raise ValueError(f"Contract: two results for byte {start} of {buffer} on rank {rank}")

    def __str__(self) -> str:
        nbytes = sum(result.dst.nbytes for result in self.results)
        return f"{self.name}({self.world_size} ranks, {nbytes} bytes)"
