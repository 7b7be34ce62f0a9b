"""What a study can run: every implementation of a collective behind one interface.

An :class:`Implementation` owns one pair of buffers that serves all sizes. A :class:`Entrant` names one way to call
it. :class:`Prepared` is a candidate bound to a :class:`Case`: it can be filled, run, timed and checked. Calls with
lists of tensors are at the end; Sidelane's own implementations are in ``roster.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from sidelane.choice.candidate import DMA, SM
from sidelane.program.collective import Kind
from sidelane.program.variant import Variant
from sidelane_lab.baselines.reference import ROOT, Case, fill_input, output_error, poison
from sidelane_lab.harness.measure import Job
from sidelane_lab.harness.rows import SEPARATE

# PyTorch 2.13 renamed both and warns of the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CTAS = "ctas"
"""A variant of the library's kernels that are held to a number of workgroups: ``ctas8``."""

CALLS_AHEAD = 2
"""Eager calls that a sample makes in front of the clock: see ``measure.Job``."""

HIDDEN_LAUNCH_US = 100.0
"""What takes as long is timed without its launches, as graphs are: behind a spin of the device that takes that long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entrant:
    """One way to run a collective, by the names of the result file."""

    implementation: str
    variant: str = ""
    in_place: bool = False
    launch: str = "eager"

    @property
    def prelaunch(self) -> bool:
        return Variant.of(self.variant).prelaunched

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
class Lists:
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


class Implementation(Protocol):
    """A library that can run some collectives.

    Attributes:
        name: as the result file has it.
        launches: ``eager``, and ``graph`` where its calls can be captured.
    """

    name: str
    launches: tuple[str, ...]

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        """The variants that exist; empty where it cannot do this at all."""
        ...

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        """Allocate the buffers for all cases to come. Collective."""
        ...

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        """Views of the buffers for one case, of its dtype."""
        ...

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        """Call the library on the current stream; what comes back waits for the end on a CPU, and does nothing else."""
        ...

    def close(self) -> None:
        """Release what was made. Not called after a failure."""
        ...


@runtime_checkable
class Binds(Protocol):
    """An implementation whose calls can be decided ahead of time, so that no question of a study is timed with them."""

    def bind(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], object]:
        """What calls the library as ``Implementation.start`` does, and nothing else."""
        ...


@runtime_checkable
class TakesLists(Protocol):
    """An implementation that has calls with lists of tensors."""

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        """The variants of such calls; one that ends with ``separate`` is a call for each tensor."""
        ...

    def start_list(self, lists: Lists, variant: str) -> Callable[[], None]:
        """As ``Implementation.start``, for all tensors in one call."""
        ...


@runtime_checkable
class Chooses(Protocol):
    """An implementation whose rows name what it chose as their variant."""

    def chosen(self) -> str:
        """What the last call was run as."""
        ...


@runtime_checkable
class LeavesOwnPart(Protocol):
    """An implementation of all-to-alls that leave every rank's own part in its input, and its place as it was."""

    leaves_own_part: bool


def nothing_to_wait_for() -> None:
    """What ``start`` returns where the stream keeps the order."""


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


class TwoBuffers:
    """Memory of an implementation: an output buffer and an input buffer, which serve all cases.

    Attributes:
        device: of both.
        buffers: output and input; None before they are reserved.
    """

    device: torch.device
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocate bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        self.buffers = self.memory(output_bytes), self.memory(input_bytes)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        assert self.buffers is not None, "reserve comes first"
        return views(case, candidate.in_place, *self.buffers)

    def close(self) -> None:
        self.buffers = None


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


class Prepared:
    """A candidate bound to a case.

    Args:
        candidate: how to call it.
        case: what to do.
        implementation: whose ``name`` the candidate has.
        calls: operations in a sample; a graph to be timed holds that many.

    Raises:
        Exception: whatever the library raises for buffers that it does not take.
    """

    def __init__(self, candidate: Entrant, case: Case, implementation: Implementation, calls: int = 1) -> None:
        self.candidate = candidate
        self.variant = candidate.variant
        self.case = case
        self.calls = calls
        self._implementation = implementation
        self._tensors = implementation.tensors(case, candidate)
        self._allocates_output = self._tensors.output is None
        self._one_call: torch.cuda.CUDAGraph | None = None
        self._all_calls: torch.cuda.CUDAGraph | None = None

    @property
    def implementation(self) -> str:
        return self.candidate.implementation

    @property
    def in_place(self) -> bool:
        return self.candidate.in_place

    @property
    def label(self) -> str:
        return str(self.candidate)

    @property
    def workgroups(self) -> int:
        """That the library is held to, as its variant says; 0: it has as many as it likes."""
        return int(self.variant.removeprefix(CTAS)) if self.variant.startswith(CTAS) else 0

    @property
    def repeatable(self) -> bool:
        """True if a second run on the same input gives the same output: the first one has not overwritten the input."""
        if self.in_place:
            return self.case.kind in (Kind.ALL_GATHER, Kind.BROADCAST)
        return self._tensors.keeps_input

    @property
    def tensors(self) -> Tensors:
        """Where a run reads and writes."""
        return self._tensors

    def start(self) -> Callable[[], None]:
        """Begin one run on the current stream; call what comes back to wait for its end (needed on a CPU only)."""
        if self._one_call is not None:
            self._one_call.replay()
            return nothing_to_wait_for
        return self._call()

    def _call(self) -> Callable[[], None]:
        return self._implementation.start(self.case, self._tensors, self.candidate.variant)

    def _bound(self) -> Callable[[], object]:
        """The quickest way to make the call on a device, where the stream waits for its end."""
        if isinstance(self._implementation, Binds):
            return self._implementation.bind(self.case, self._tensors, self.candidate.variant)
        return self.run

    def run(self) -> None:
        """One run from beginning to end."""
        self.start()()

    def settle(self) -> None:
        """Note what was chosen, after a first call (and the capture, if there is one), where that is the question."""
        if isinstance(self._implementation, Chooses):
            self.variant = self._implementation.chosen()

    def capture(self) -> None:
        """Go over to graphs: one with all calls of a sample, to time, and one with a single call, to check.

        The call must have been made once before, outside of a capture.
        """
        self._all_calls = self._captured(self.calls) if self.calls > 1 else None
        self._one_call = self._captured(1)  # last, so that an output that the library allocates is this graph's

    def job(self, hide_launch_us: float = 0.0) -> Job:
        """The job that samples ``calls`` operations."""
        if self._all_calls is not None:
            return Job(self._all_calls.replay, calls=self.calls, hide_launch_us=hide_launch_us)
        # On a CPU a call has to be waited for.
        run = self.run if self._one_call is not None or self.case.device.type == "cpu" else self._bound()
        ahead = 0 if hide_launch_us or self._one_call is not None else CALLS_AHEAD
        return Job(run, repeats=self.calls, calls=self.calls, ahead=ahead, hide_launch_us=hide_launch_us)

    def _captured(self, calls: int) -> torch.cuda.CUDAGraph:
        return captured(lambda: self._call()(), calls)

    def fill(self, seed: int) -> None:
        """Poison the output and put fresh random bytes, the same for the same seed, into the input."""
        if self._tensors.output is not None:
            poison(self._tensors.output)
        if self._allocates_output and self._one_call is None:
            # Leave poison where the allocator will look first, now that the last output has gone back to it.
            self._tensors.output = None
            poison(torch.empty(self.case.output_bytes, dtype=torch.uint8, device=self.case.device))
        fill_input(self.case, self._tensors.input, seed)

    def error(self, seed: int) -> str | None:
        """What is wrong with the output after a run on the input of ``seed``; None if nothing is."""
        output = self._tensors.output
        left = isinstance(self._implementation, LeavesOwnPart)
        return "there is no output" if output is None else output_error(self.case, output, seed, own_part_left=left)

    def release(self) -> None:
        """Drop the graphs and what they hold."""
        self._one_call = self._all_calls = None


def captured(run: Callable[[], None], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` runs, captured on the current stream, which must not be the legacy default one."""
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache, 50 ms for each of some hundred
    # captures. Other threads (a library's watchdog) may go on calling the driver while this one captures.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(calls):
            run()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture is invalid by now, and the stream must leave it
            graph.capture_end()
        raise
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
    """Every way in which an implementation can run a collective.

    Args:
        implementation: whose variants and launches.
        kind: which collective.
        only: variants to keep, where the implementation has any; empty keeps all. ``b2b+prelaunch`` keeps that.
        launches: launches to keep; empty keeps all.
        listed: calls with lists of tensors; none where the implementation takes one tensor a call.
    """
    only = only if implementation.name in (DMA, SM) else ()
    return [
        Entrant(implementation.name, variant, in_place, launch)
        for in_place in (False, True)
        for variant in _kept(_variants(implementation, kind, in_place, listed), only)
        for launch in implementation.launches
        if (not launches or launch in launches) and not (launch == "graph" and Variant.of(variant).prelaunched)
    ]


def _variants(implementation: Implementation, kind: Kind, in_place: bool, listed: bool) -> tuple[str, ...]:
    if not listed:
        return implementation.variants(kind, in_place)
    return implementation.list_variants(kind, in_place) if isinstance(implementation, TakesLists) else ()


def _kept(found: tuple[str, ...], only: tuple[str, ...]) -> tuple[str, ...]:
    if not only:
        return found
    return tuple(name for name in only if Variant.of(name).called in found)


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
