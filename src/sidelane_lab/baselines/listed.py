"""Calls with lists of tensors in a study: a candidate bound to a case whose bytes are spread over many tensors.

What is compared at one size:

    in one call         all_gather([o0, o1, ...], [i0, i1, ...])            NCCL: all calls in one group
    ``separate``        all_gather(o0, i0); all_gather(o1, i1); ...

Both move the same bytes between the same tensors, and each call is checked as a single one is, tensor by tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from sidelane.program.collective import Kind
from sidelane_lab.baselines.candidate import (
    Binds,
    Entrant,
    Implementation,
    Lists,
    Prepared,
    TakesLists,
    nothing_to_wait_for,
)
from sidelane_lab.baselines.reference import Case, fill_input, output_error, poison
from sidelane_lab.harness.rows import SEPARATE

COALESCED = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
"""What torch hands over as one operation, ``all_gather_into_tensor_coalesced`` and so on, from inside its manager."""


def separately(variant: str) -> str:
    """The name of a variant that takes the tensors of a list in a call each.

    >>> separately(""), separately("window")
    ('separate', 'window+separate')
    """
    return f"{variant}+{SEPARATE}" if variant else SEPARATE


def is_separate(variant: str) -> bool:
    """True for what :func:`separately` names."""
    return variant.rpartition("+")[2] == SEPARATE


def in_one_call(variant: str) -> str:
    """The variant that each call of ``separately(variant)`` is.

    >>> in_one_call("separate"), in_one_call("window+separate"), in_one_call("b2b")
    ('', 'window', 'b2b')
    """
    return variant.rpartition("+")[0] if is_separate(variant) else variant


def prepare(candidate: Entrant, case: Case, implementation: Implementation, calls: int = 1) -> Prepared:
    """Bind a candidate to a case, which may be one of a list. See :class:`Prepared`."""
    return (PreparedList if case.sizes else Prepared)(candidate, case, implementation, calls)


class PreparedList(Prepared):
    """A candidate bound to a case with a list. Arguments as those of :class:`Prepared`."""

    def __init__(self, candidate: Entrant, case: Case, implementation: Implementation, calls: int = 1) -> None:
        self._parts = case.parts
        self._variant = in_one_call(candidate.variant)
        each = dataclasses.replace(candidate, variant=self._variant)
        pairs = tuple(implementation.tensors(part, each) for part in self._parts)
        outputs = [pair.output for pair in pairs if pair.output is not None]
        assert len(outputs) == len(pairs), "what allocates its outputs takes no lists"
        self._lists = Lists(self._parts, pairs, outputs, [pair.input for pair in pairs])
        super().__init__(each, self._parts[0], implementation, calls)
        self.candidate, self.variant, self.case = candidate, candidate.variant, case

    def settle(self) -> None:
        super().settle()
        if is_separate(self.candidate.variant) and not is_separate(self.variant):
            self.variant = separately(self.variant)

    def fill(self, seed: int) -> None:
        for output in self._lists.outputs:
            poison(output)
        # Behind all poison: in place, an input is a part of an output.
        for part, input in zip(self._parts, self._lists.inputs, strict=True):
            fill_input(part, input, seed)

    def error(self, seed: int) -> str | None:
        for number, (part, output) in enumerate(zip(self._parts, self._lists.outputs, strict=True)):
            wrong = output_error(part, output, seed)
            if wrong is not None:
                return f"number {number} in the list: {wrong}"
        return None

    def _call(self) -> Callable[[], None]:
        if not is_separate(self.candidate.variant):
            assert isinstance(self._implementation, TakesLists), "candidates_of has no others"
            return self._implementation.start_list(self._lists, self._variant)
        start, variant = self._implementation.start, self._variant
        # On a CPU each call is waited for before the next one begins; on a device the stream does that.
        for part, pair in zip(self._parts, self._lists.pairs, strict=True):
            start(part, pair, variant)()
        return nothing_to_wait_for

    def _bound(self) -> Callable[[], object]:
        implementation, variant = self._implementation, self._variant
        if not (is_separate(self.candidate.variant) and isinstance(implementation, Binds)):
            return self.run
        calls = [implementation.bind(*pair, variant) for pair in zip(self._parts, self._lists.pairs, strict=True)]

        def run() -> None:
            for call in calls:
                call()

        return run


@contextlib.contextmanager
def coalesced(
    group: dist.ProcessGroup | None, device: torch.device | None = None, *, async_ops: bool = False
) -> Iterator[Any]:
    """Collect torch's collectives in a ``with`` block and hand them over together: torch's own manager, mended.

    After an error in its block, torch's goes on collecting for ever: later calls on the group would do nothing.

    Args:
        group: None for the default one.
        device: for collectives that are not in ``COALESCED``: the block stands between the library's own group calls.
        async_ops: what the block gets has a ``wait``.

    Raises:
        RuntimeError: the backend has no such thing.
    """
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    began = False
    try:
        with dist._coalescing_manager(group=chosen, device=device, async_ops=async_ops) as manager:
            began = True
            yield manager
    except BaseException:
        collecting = dist.distributed_c10d._world.pg_coalesce_state.pop(chosen, None) is not None
        if began and collecting and device is not None:
            with contextlib.suppress(Exception):
                chosen._end_coalescing(device)  # nobody else would end the library's group
        raise
