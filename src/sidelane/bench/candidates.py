"""What a study can run: every implementation of a collective behind one interface.

An :class:`Implementation` owns one pair of buffers that serves all sizes. A :class:`Candidate` names one way to call
it. :class:`Prepared` is a candidate bound to a :class:`Case`: it can be filled, run, timed and checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from sidelane.bench.measure import Job
from sidelane.bench.reference import ROOT, Case, fill_input, output_error, poison
from sidelane.choice.candidate import DMA, GRAPH, SM, everything, find
from sidelane.collectives import Communicator
from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind

# PyTorch 2.13 renamed both and warns of the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a collective, by the names of the result file."""

    implementation: str
    variant: str = ""
    in_place: bool = False
    launch: str = "eager"

    @property
    def prelaunch(self) -> bool:
        return self.variant.endswith("+prelaunch")

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

    def tensors(self, case: Case, candidate: Candidate) -> Tensors:
        """Views of the buffers for one case, of its dtype."""
        ...

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        """Call the library on the current stream; what comes back waits for the end on a CPU, and does nothing else."""
        ...

    def close(self) -> None:
        """Release what was made. Not called after a failure."""
        ...


def nothing_to_wait_for() -> None:
    """What ``start`` returns where the stream keeps the order."""


def views(case: Case, in_place: bool, output: torch.Tensor, input: torch.Tensor) -> Tensors:
    """Views of two byte buffers for one case; in place as torch.distributed defines it for each collective."""
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


class Dma:
    """Sidelane's own collectives, on symmetric tensors."""

    name = "dma"

    def __init__(self, communicator: Communicator, *, with_auto: bool = False) -> None:
        self.launches: tuple[str, ...] = ("eager",) if communicator.device.type == "cpu" else ("eager", "graph")
        self._communicator = communicator
        self._auto = ("auto",) if with_auto else ()
        self._output: torch.Tensor | None = None
        self._input: torch.Tensor | None = None

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        if kind is Kind.BROADCAST and not in_place:
            return ()
        return self._auto + _names(kind, self._communicator, DMA)

    @property
    def communicator(self) -> Communicator:
        """Whose collectives these are."""
        return self._communicator

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        have = [0 if buffer is None else buffer.nbytes for buffer in (self._output, self._input)]
        if have[0] >= output_bytes and have[1] >= input_bytes:
            return  # asked before, by an implementation that shares them
        self._output = self._communicator.empty(output_bytes, dtype=torch.uint8)
        self._input = self._communicator.empty(input_bytes, dtype=torch.uint8)

    def tensors(self, case: Case, candidate: Candidate) -> Tensors:
        assert self._output is not None, "reserve comes first"
        assert self._input is not None
        return views(case, candidate.in_place, self._output, self._input)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        communicator, output, input = self._communicator, tensors.output, tensors.input
        assert output is not None
        # On a CPU a synchronous call would return when the collective has ended, and nothing could run next to it.
        on_cpu = case.device.type == "cpu"
        match case.kind:
            case Kind.ALL_GATHER:
                work = communicator.all_gather(output, input, variant=variant, async_op=on_cpu)
            case Kind.ALL_TO_ALL:
                work = communicator.all_to_all(output, input, variant=variant, async_op=on_cpu)
            case Kind.REDUCE_SCATTER:
                work = communicator.reduce_scatter(output, input, variant=variant, async_op=on_cpu)
            case Kind.ALL_REDUCE:
                work = communicator.all_reduce(input, output=output, variant=variant, async_op=on_cpu)
            case _:
                work = communicator.broadcast(output, root=ROOT, variant=variant, async_op=on_cpu)
        return nothing_to_wait_for if work is None else work.wait

    def close(self) -> None:
        self._communicator.close()


class Kernels:
    """Sidelane's collectives that kernels run, with the communicator and the buffers of :class:`Dma`.

    Raises:
        UnavailableError: this machine does not have them.
    """

    name = SM

    def __init__(self, dma: Dma) -> None:
        if SM not in dma.communicator.abilities.implementations:
            raise UnavailableError("this device or this installation has no kernels for collectives")
        self.launches = dma.launches
        self._dma = dma

    @property
    def communicator(self) -> Communicator:
        """Whose collectives these are."""
        return self._dma.communicator

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return _names(kind, self._dma.communicator, SM)

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        self._dma.reserve(output_bytes, input_bytes)

    def tensors(self, case: Case, candidate: Candidate) -> Tensors:
        return self._dma.tensors(case, candidate)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        return self._dma.start(case, tensors, variant)

    def close(self) -> None:
        self._dma.close()


class Auto(Kernels):
    """Sidelane's own choice among its collectives. Its rows name what it chose as their variant."""

    name = "auto"

    def __init__(self, dma: Dma) -> None:
        self.launches = dma.launches
        self._dma = dma

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ("auto",) if self._dma.variants(kind, in_place) else ()

    def chosen(self) -> str:
        """What the last call was run as."""
        choice = self._dma.communicator.last_choice()
        assert choice is not None, "a call comes first"
        return choice.candidate.name


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

    def __init__(self, candidate: Candidate, case: Case, implementation: Implementation, calls: int = 1) -> None:
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
        return self._implementation.start(self.case, self._tensors, self.candidate.variant)

    def run(self) -> None:
        """One run from beginning to end."""
        self.start()()

    def settle(self) -> None:
        """Note what was chosen, after a first call (and the capture, if there is one), where that is the question."""
        if isinstance(self._implementation, Auto):
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
        return Job(self.run, repeats=self.calls, calls=self.calls, hide_launch_us=hide_launch_us)

    def _captured(self, calls: int) -> torch.cuda.CUDAGraph:
        return captured(lambda: self._implementation.start(self.case, self._tensors, self.candidate.variant)(), calls)

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
        return "there is no output" if output is None else output_error(self.case, output, seed)

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
    implementation: Implementation, kind: Kind, *, only: tuple[str, ...] = (), launches: tuple[str, ...] = ()
) -> list[Candidate]:
    """Every way in which an implementation can run a collective.

    Args:
        implementation: whose variants and launches.
        kind: which collective.
        only: variants to keep, where the implementation has any; empty keeps all. ``b2b+prelaunch`` keeps that.
        launches: launches to keep; empty keeps all.
    """
    return [
        Candidate(implementation.name, variant, in_place, launch)
        for in_place in (False, True)
        for variant in _kept(implementation.variants(kind, in_place), only if implementation.name in (DMA, SM) else ())
        for launch in implementation.launches
        if (not launches or launch in launches) and not (launch == "graph" and _only_eager(kind, variant))
    ]


def _names(kind: Kind, communicator: Communicator, implementation: str) -> tuple[str, ...]:
    found = everything(kind, communicator.abilities)
    return tuple(candidate.name for candidate in found if candidate.implementation == implementation)


def _only_eager(kind: Kind, variant: str) -> bool:
    """True for what differs from another variant only in how an eager call is launched."""
    found = find(kind, variant)
    return variant.endswith("+prelaunch") or (found is not None and found.launch == GRAPH)


def _kept(found: tuple[str, ...], only: tuple[str, ...]) -> tuple[str, ...]:
    if not only:
        return found
    return tuple(name for name in only if name.removesuffix("+prelaunch") in found)
