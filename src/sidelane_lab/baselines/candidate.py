"""Implementations of collectives behind one interface.

An :class:`Implementation` owns one pair of buffers that serves all sizes. A :class:`Entrant` names one way to call
it. :class:`Prepared` is a candidate bound to a :class:`Case`: it can be filled, run, timed and checked. Calls with
lists of tensors are at the end; Sidelane's own implementations are in ``roster.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from sidelane.choice.candidate import DMA, SM
from sidelane.program.collective import Kind
from sidelane_lab.baselines.reference import ROOT, Case, fill_input, output_error, poison
from sidelane_lab.harness.study import SEPARATE
from sidelane_lab.harness.ways import Job, Way

# PyTorch 2.13 renamed both and warns of the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CALLS_AHEAD = 2
"""Eager calls that a sample makes in front of the clock: see ``ways.Job``."""

HIDDEN_LAUNCH_US = 100.0
"""Microseconds. Calls that take as long are timed without their launches, as graphs are: behind a spin so long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entrant:
    """One way to run a collective, by the names of the result file."""

    implementation: str
    variant: str = ""
    in_place: bool = False
    launch: str = "eager"

    def __str__(self) -> str:
        place = "in place" if self.in_place else "out of place"
        return " ".join(filter(None, (self.implementation, self.variant, place, self.launch)))


@dataclasses.dataclass(slots=True)
class Tensors:
    """Where a call reads and writes, 1-d.

    Attributes:
        output: None until an implementation that allocates it has run.
        input: what is read.
        keeps_input: False where a run overwrites its input although it is out of place.
    """

    output: torch.Tensor | None
    input: torch.Tensor
    keeps_input: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class TensorLists:
    """Where a call with a list reads and writes.

    Attributes:
        parts: the case of each tensor.
        pairs: its tensors.
        outputs, inputs: the same as lists.
    """

    parts: tuple[Case, ...]
    pairs: tuple[Tensors, ...]
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]


class Implementation:
    """A library that can run some collectives, with an output buffer and an input buffer that serve all cases.

    Attributes:
        name: as the result file has it.
        launches: ``eager``, and ``graph`` where its calls can be captured.
        leaves_own_part: all-to-alls leave every rank's own part in its input, and its place as it was.
        device: of the buffers.
        buffers: output and input; None before they are reserved.
    """

    name: str = ""
    launches: tuple[str, ...] = ("eager",)
    leaves_own_part = False
    device: torch.device
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        """Return the variants that exist; empty where it cannot do this at all."""
        raise NotImplementedError

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        """Call the library on the current stream; what comes back waits for the end on a CPU, and does nothing else."""
        raise NotImplementedError

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        """Return the variants of calls with lists of tensors; one that ends with ``separate`` is a call for each."""
        return ()

    def start_list(self, lists: TensorLists, variant: str) -> Callable[[], None]:
        """Call the library as ``start`` does, for all tensors in one call."""
        raise NotImplementedError

    def chosen(self) -> str:
        """Return what the last call was run as, where rows name that as their variant; empty elsewhere."""
        return ""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocate bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        """Allocate the buffers for all cases to come. Collective."""
        self.buffers = self.memory(output_bytes), self.memory(input_bytes)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        """Return views of the buffers for one case, of its dtype."""
        assert self.buffers is not None, "reserve comes first"
        return views(case, candidate.in_place, *self.buffers)

    def close(self) -> None:
        """Release what was made. Not called after a failure."""
        self.buffers = None


@runtime_checkable
class Binds(Protocol):
    """An implementation whose calls can be decided ahead of time, so that no question of a study is timed with them."""

    def bind(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], object]:
        """Return what calls the library as ``Implementation.start`` does, and nothing else."""
        ...


def nothing_to_wait_for() -> None:
    """Do nothing: ``start`` returns this where the stream keeps the order."""


def views(case: Case, in_place: bool, output: torch.Tensor, input: torch.Tensor) -> Tensors:
    """Views of two byte buffers for one case; in place as torch.distributed defines it for each collective.

    A tensor of a list lies where its case says.
    """
    output, input = output[case.output_at :], input[case.input_at :]
    shard = slice(case.rank * case.shard_bytes, (case.rank + 1) * case.shard_bytes)
    if not in_place:
        whole_output, whole_input = output[: case.output_bytes], input[: case.input_bytes]
    elif case.kind is Kind.ALL_GATHER:
        whole_output, whole_input = output[: case.nbytes], output[shard]
    elif case.kind is Kind.REDUCE_SCATTER:
        whole_output, whole_input = input[shard], input[: case.nbytes]
    else:
        whole_output = whole_input = output[: case.nbytes]
    return Tensors(whole_output.view(case.dtype), whole_input.view(case.dtype))


def library_call(kind: Kind, output: torch.Tensor, input: torch.Tensor, **options: Any) -> Callable[[], Any]:
    """Return a call of torch.distributed, with ``group`` and what else is given."""
    match kind:
        case Kind.ALL_GATHER:
            return partial(all_gather, output, input, **options)
        case Kind.ALL_TO_ALL:
            return partial(dist.all_to_all_single, output, input, **options)
        case Kind.REDUCE_SCATTER:
            return partial(reduce_scatter, output, input, **options)
        case Kind.ALL_REDUCE:
            return partial(dist.all_reduce, output, **options)
    return partial(dist.broadcast, output, group_src=ROOT, **options)


class ReadyCall(Way):
    """A candidate bound to a case.

    Args:
        candidate: how to call it.
        case: what to do.
        implementation: whose ``name`` the candidate has.
        calls: operations in a sample; a graph to be timed holds that many.

    Raises:
        Exception: whatever the library raises for buffers that it does not take.

    Attributes:
        pairs: the tensors of a call; several of a list.
    """

    def __init__(self, candidate: Entrant, case: Case, implementation: Implementation, calls: int = 1) -> None:
        self.candidate, self.variant, self.case, self.calls = candidate, candidate.variant, case, calls
        self.label, self.as_graph = str(candidate), candidate.launch == "graph"
        self._implementation = implementation
        self._one_variant = in_one_call(candidate.variant)
        one = dataclasses.replace(candidate, variant=self._one_variant)
        self._parts = case.parts
        self.pairs = tuple(implementation.tensors(part, one) for part in self._parts)
        self._allocates_output = self.tensors.output is None
        assert not (case.sizes and self._allocates_output), "what allocates its outputs takes no lists"

    @property
    def implementation(self) -> str:
        return self.candidate.implementation

    @property
    def in_place(self) -> bool:
        return self.candidate.in_place

    @property
    def repeatable(self) -> bool:
        """True if a second run on the same input gives the same output: the first one has not overwritten the input."""
        if self.in_place:
            return self.case.kind in (Kind.ALL_GATHER, Kind.BROADCAST)
        return self.tensors.keeps_input

    @property
    def tensors(self) -> Tensors:
        """The tensors that a run reads and writes; the first ones of a list."""
        return self.pairs[0]

    @property
    def _takes_list(self) -> bool:
        return bool(self.case.sizes) and not is_separate(self.candidate.variant)

    def start(self) -> Callable[[], None]:
        """Begin one run on the current stream; call what comes back to wait for its end (needed on a CPU only)."""
        if self.graphs:
            self.graphs[-1].replay()
            return nothing_to_wait_for
        return self._call()

    def _call(self) -> Callable[[], None]:
        start, variant = self._implementation.start, self._one_variant
        if self._takes_list:
            outputs = [pair.output for pair in self.pairs if pair.output is not None]
            lists = TensorLists(self._parts, self.pairs, outputs, [pair.input for pair in self.pairs])
            return self._implementation.start_list(lists, variant)
        # On a CPU each call is waited for before the next one begins; on a device the stream does that.
        for part, pair in zip(self._parts[:-1], self.pairs[:-1], strict=True):
            start(part, pair, variant)()
        return start(self._parts[-1], self.pairs[-1], variant)

    def _bound(self) -> Callable[[], object]:
        """Return the quickest way to make the call on a device, where the stream waits for its end."""
        implementation = self._implementation
        if self._takes_list or not isinstance(implementation, Binds):
            return self.run
        pairs = zip(self._parts, self.pairs, strict=True)
        calls = [implementation.bind(part, pair, self._one_variant) for part, pair in pairs]
        return calls[0] if len(calls) == 1 else partial(_all, calls)

    def run(self) -> None:
        """Make one run from beginning to end."""
        self.start()()

    def run_again(self) -> None:
        """Make two runs back to back, where that can be."""
        for _ in range(2 if self.repeatable else 1):
            self.run()

    def settle(self) -> None:
        """Note what was chosen, after a first call (and the capture, if there is one), where that is the question."""
        chosen = self._implementation.chosen() or self._one_variant
        self.variant = separately(chosen) if is_separate(self.candidate.variant) else chosen

    def capture(self) -> None:
        """Go over to graphs: one with all calls of a sample, to time, and one with a single call, to check.

        The call must have been made once before, outside of a capture.
        """
        # The single call comes last, so that an output that the library allocates is that graph's.
        self.graphs = tuple(captured(lambda: self._call()(), calls) for calls in sorted({self.calls, 1}, reverse=True))

    def job(self, hide_launch_us: float = 0.0) -> Job:
        """Return the job that samples ``calls`` operations."""
        if len(self.graphs) > 1:
            return Job(self.graphs[0].replay, calls=self.calls, hide_launch_us=hide_launch_us)
        # On a CPU a call has to be waited for.
        run = self.run if self.graphs or self.case.device.type == "cpu" else self._bound()
        ahead = 0 if hide_launch_us or self.graphs else CALLS_AHEAD
        return Job(run, repeats=self.calls, calls=self.calls, ahead=ahead, hide_launch_us=hide_launch_us)

    def fill(self, seed: int) -> None:
        """Poison the output and put fresh random bytes, the same for the same seed, into the input."""
        for pair in self.pairs:
            if pair.output is not None:
                poison(pair.output)
        if self._allocates_output and not self.graphs:
            # Leave poison where the allocator will look first, now that the last output has gone back to it.
            self.tensors.output = None
            poison(torch.empty(self.case.output_bytes, dtype=torch.uint8, device=self.case.device))
        # Behind all poison: in place, an input is a part of an output.
        for part, pair in zip(self._parts, self.pairs, strict=True):
            fill_input(part, pair.input, seed)

    def error(self, seed: int) -> str | None:
        """Say what is wrong with the output after a run on the input of ``seed``; None if nothing is."""
        left = self._implementation.leaves_own_part
        for number, (part, pair) in enumerate(zip(self._parts, self.pairs, strict=True)):
            if pair.output is None:
                return "there is no output"
            wrong = output_error(part, pair.output, seed, own_part_left=left)
            if wrong is not None:
                return f"number {number} in the list: {wrong}" if self.case.sizes else wrong
        return None


def captured(run: Callable[[], None], calls: int) -> torch.cuda.CUDAGraph:
    """Capture a graph of ``calls`` runs, captured on the current stream, which must not be the legacy default one.

    Raises:
        UserWarning: nothing was captured, which would be timed as a call that takes no time.
    """
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache, 50 ms for each of some hundred
    # captures. Other threads (a library's watchdog) may go on calling the driver while this one captures.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(calls):
            run()
    except BaseException:
        # The stream must leave the capture, which is invalid by now, or empty.
        with contextlib.suppress(RuntimeError, UserWarning), warnings.catch_warnings(action="error"):
            graph.capture_end()
        raise
    with warnings.catch_warnings(action="error", category=UserWarning):  # PyTorch's "The CUDA Graph is empty"
        graph.capture_end()
    return graph


def candidates_of(
    implementation: Implementation,
    kind: Kind,
    *,
    only: tuple[str, ...] = (),
    launches: tuple[str, ...] = (),
    listed: bool = False,
) -> list[Entrant]:
    """Return every way in which an implementation can run a collective.

    Args:
        implementation: whose variants and launches.
        kind: which collective.
        only: variants to keep, where the implementation has any; empty keeps all.
        launches: launches to keep; empty keeps all.
        listed: calls with lists of tensors; none where the implementation takes one tensor a call.
    """
    only = only if implementation.name in (DMA, SM) else ()
    find = implementation.list_variants if listed else implementation.variants
    return [
        Entrant(implementation.name, variant, in_place, launch)
        for in_place in (False, True)
        for variant in _kept(find(kind, in_place), only)
        for launch in implementation.launches
        if not launches or launch in launches
    ]


def _kept(found: tuple[str, ...], only: tuple[str, ...]) -> tuple[str, ...]:
    if not only:
        return found
    return tuple(name for name in only if name in found)


COALESCED = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
"""Collectives that torch hands over as one operation, ``all_gather_into_tensor_coalesced`` and so on."""


def separately(variant: str) -> str:
    """Return the name of a variant that takes the tensors of a list in a call each.

    >>> separately(""), separately("window")
    ('separate', 'window+separate')
    """
    return f"{variant}+{SEPARATE}" if variant else SEPARATE


def is_separate(variant: str) -> bool:
    """Tell if a variant is one that :func:`separately` names."""
    return variant.rpartition("+")[2] == SEPARATE


def in_one_call(variant: str) -> str:
    """Return the variant that each call of ``separately(variant)`` is.

    >>> in_one_call("separate"), in_one_call("window+separate"), in_one_call("b2b")
    ('', 'window', 'b2b')
    """
    return variant.rpartition("+")[0] if is_separate(variant) else variant


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


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
