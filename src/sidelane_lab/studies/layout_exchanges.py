"""Ways to make an exchange of tensors with a layout, each with tensors that are filled and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.ways import Job, Way

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sidelane.session import Communicator

    Run = Callable[[], list[Tensor]]

Shape = tuple[int, int, int, int]
"""Batch, positions and heads of all ranks, and the size of a head."""

THERE, BACK, CONTIGUOUS = LAYOUTS = "there", "back", "contiguous"
SYMMETRIC, ORDINARY = MEMORIES = "symmetric", "ordinary"

EACH, GROUPED, TOGETHER = LIBRARY = "each", "grouped", "together"
"""The library's ways: a call for each tensor; these in a group of NCCL's; one call for a buffer with all tensors."""

ITEM_BYTES = 2
"""Bytes of an element, which is a bfloat16."""

PRIME = 32749
"""Largest prime of 15 bits: patterns are numbers below it, so that no bit pattern is that of a poisoned output."""

MOST_CALLS, SAMPLE_US = 20, 2000.0
BYTES_PER_US = 300e3
MOST_CPU_CALLS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutCase:
    """Tensors of one exchange.

    Attributes:
        shape: of all ranks; positions and heads are multiples of the number of ranks.
        tensors: number of tensors.
        rank, world_size, device: of this process.
    """

    shape: Shape
    tensors: int
    rank: int
    world_size: int
    device: torch.device

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def row_bytes(self) -> int:
        return self.shape[2] // self.world_size * self.shape[3] * ITEM_BYTES

    @property
    def leaving_bytes(self) -> int:
        """Bytes that leave a GPU."""
        own = math.prod(self.shape) // self.world_size * ITEM_BYTES
        return self.tensors * own // self.world_size * (self.world_size - 1)

    def shape_of(self, layout: str) -> Shape:
        """Shape of a rank's tensor behind an exchange."""
        batch, positions, heads, size = self.shape
        n = self.world_size
        return (batch, positions, heads // n, size) if layout == THERE else (batch, positions // n, heads, size)

    def pattern(self, seed: int, number: int, rank: int, layout: str) -> Tensor:
        """Return the contents of a tensor of a rank that has some heads (``there``) or some positions (otherwise)."""
        import torch

        batch, positions, heads, size = self.shape_of(layout)
        first = (0, rank * heads) if layout == THERE else (rank * positions, 0)
        steps = (7919, 131, 31, 7)
        value = torch.full((1, 1, 1, 1), 1013 * seed + 577 * number, dtype=torch.int32, device=self.device)
        for dim, (begin, length) in enumerate(zip((0, *first, 0), (batch, positions, heads, size), strict=True)):
            places = torch.arange(begin, begin + length, dtype=torch.int32, device=self.device)
            shape = [1, 1, 1, 1]
            shape[dim] = length
            value = value + (places * steps[dim]).view(shape)
        return (value % PRIME).to(torch.int16).view(torch.bfloat16)

    def sent(self, seed: int, number: int, layout: str) -> Tensor:
        """Return what a tensor of this rank holds before an exchange."""
        return self.pattern(seed, number, self.rank, THERE if layout == BACK else BACK)

    def right(self, seed: int, number: int, layout: str) -> Tensor:
        """Return what it holds behind one."""
        import torch

        if layout != CONTIGUOUS:
            return self.pattern(seed, number, self.rank, layout)
        everyone = (self.pattern(seed, number, rank, BACK) for rank in range(self.world_size))
        parts = [tensor.flatten().tensor_split(self.world_size)[self.rank] for tensor in everyone]
        return torch.cat(parts).view(self.shape_of(BACK))


class LayoutExchange(Way):
    """One way to make an exchange, with its tensors.

    Args:
        case: tensors.
        key: layout, implementation, memory and variant, as in ``layouts.LayoutRow``.
        given: tensors that are sent.
        run: makes one exchange on the current stream, and returns the results.
        said: returns the variant of the last call; empty where the key has it.
        launch: eager or graph.
    """

    def __init__(
        self,
        case: LayoutCase,
        key: tuple[str, ...],
        given: Sequence[Tensor],
        run: Run,
        said: Callable[[], str],
        launch: str,
    ) -> None:
        self.case, self.label, self.as_graph = case, ", ".join(key), launch != LAUNCHES[0]
        self.layout, self.implementation, _, self.variant = key
        self._given, self._run, self._said, self._calls = given, run, said, calls_of(case)
        self._results: list[Tensor] = []
        self._thread = ThreadPoolExecutor(1) if case.device.type == "cpu" else None

    def run(self) -> None:
        """Make one exchange; a graph makes all of a sample."""
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._results = self._run()

    def start(self) -> Callable[[], object]:
        """Begin one; the result waits for the end on a CPU."""
        from sidelane_lab.baselines.candidate import nothing_to_wait_for

        if self._thread is None:
            self.run()
            return nothing_to_wait_for
        return self._thread.submit(self.run).result

    def fill(self, seed: int) -> None:
        """Put in fresh inputs and poison outputs."""
        import torch

        for tensor in self._results:
            tensor.view(torch.int16).fill_(-1)
        for number, tensor in enumerate(self._given):
            tensor.copy_(self.case.sent(seed, number, self.layout))

    def error(self, seed: int) -> str | None:
        """Say what is wrong with the outputs; None if nothing is."""
        import torch

        if not self._results:
            return "there is no output"
        for number, tensor in enumerate(self._results):
            right = self.case.right(seed, number, self.layout)
            if not torch.equal(tensor.reshape(right.shape).view(torch.int16), right.view(torch.int16)):
                return f"tensor {number} of {self.label} is wrong"
        return None

    def settle(self) -> None:
        self.variant = self._said() or self.variant

    def capture(self) -> None:
        from sidelane_lab.baselines.candidate import captured

        self.graphs = (captured(self.run, self._calls),)

    def job(self) -> Job:
        """Return the job of a sample."""
        return Job(self.run, 1 if self.as_graph else self._calls, self._calls)

    def close(self) -> None:
        """Let go of the thread and the graph."""
        super().close()
        if self._thread is not None:
            self._thread.shutdown()


def permuted(tensor: Tensor, layout: str, n: int) -> Tensor:
    """Return a view of a tensor before an exchange with the rank that each part goes to in front."""
    batch, positions, heads, size = tensor.shape
    if layout == THERE:
        return tensor.view(batch, positions, n, heads // n, size).permute(2, 0, 1, 3, 4)
    if layout == BACK:
        return tensor.view(batch, n, positions // n, heads, size).transpose(0, 1)
    return tensor.view(n, -1)


def merged(parts: Tensor, layout: str, shape: Shape) -> Tensor:
    """Return the tensor of parts that came from each rank, [n, ...]; a view where they lie so."""
    if layout == THERE:
        return parts.permute(1, 0, 2, 3, 4).reshape(shape)
    if layout == BACK:
        return parts.permute(1, 2, 0, 3, 4).reshape(shape)
    return parts.view(shape)


def library_run(case: LayoutCase, layout: str, variant: str, given: Sequence[Tensor]) -> Run:
    """Return the library's exchange of tensors in ordinary memory."""
    import torch
    import torch.distributed as dist

    from sidelane_lab.baselines.candidate import coalesced

    n, shape = case.world_size, case.shape_of(layout)

    def each() -> list[Tensor]:
        sent = [permuted(tensor, layout, n).contiguous() for tensor in given]
        came = [torch.empty_like(part) for part in sent]
        with coalesced(None, case.device) if variant == GROUPED else contextlib.nullcontext():
            for output, part in zip(came, sent, strict=True):
                dist.all_to_all_single(output, part)
        return [merged(output, layout, shape) for output in came]

    def together() -> list[Tensor]:
        views = [permuted(tensor, layout, n) for tensor in given]
        sent = views[0].new_empty(n, len(views), *views[0].shape[1:])
        torch.stack(views, 1, out=sent)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        return [merged(came[:, number], layout, shape) for number in range(len(views))]

    return together if variant == TOGETHER else each


class LayoutExchanges:
    """Ways to make the exchanges of a case. Collective.

    Args:
        comm: communicator of Sidelane's.
        case: tensors.
    """

    def __init__(self, comm: Communicator, case: LayoutCase) -> None:
        self._comm, self._case = comm, case
        self._tensors: dict[tuple[str, str, bool], list[Tensor]] = {}

    def ways(self, layouts: Sequence[str], beside: str) -> dict[tuple[str, ...], Callable[[str], LayoutExchange]]:
        """Return what makes each way of some layouts for a launch; ``beside``: what Sidelane's calls are told of."""
        library = "gloo" if self._case.device.type == "cpu" else "nccl"
        found: dict[tuple[str, ...], Callable[[str], LayoutExchange]] = {}
        for layout in layouts:
            for variant in self._variants(layout):
                key: tuple[str, ...] = (layout, library, ORDINARY, variant)
                found[key] = functools.partial(self._of_library, key)
            for memory in MEMORIES:
                key = (layout, "auto", memory, "")
                found[key] = functools.partial(self._own, key, beside)
        return found

    def _variants(self, layout: str) -> list[str]:
        """Return the library's ways; parts that lie side by side need no buffer for all, and Gloo has no groups."""
        left_out = {GROUPED} if self._case.device.type == "cpu" else set()
        left_out |= {TOGETHER} if layout == CONTIGUOUS else set()
        return [one for one in LIBRARY if one == EACH or (self._case.tensors > 1 and one not in left_out)]

    def _given(self, layout: str, memory: str, is_output: bool = False) -> list[Tensor]:
        """Return tensors for one side of an exchange; all ways of a kind of memory share them."""
        import torch

        has_heads = (layout == THERE) is is_output if layout != CONTIGUOUS else False
        key = memory, THERE if has_heads else BACK, is_output
        if key not in self._tensors:
            shape = self._case.shape_of(key[1])

            def make() -> Tensor:
                if memory == SYMMETRIC:
                    return self._comm.empty(*shape, dtype=torch.bfloat16)
                return torch.empty(shape, dtype=torch.bfloat16, device=self._case.device)

            self._tensors[key] = [make() for _ in range(self._case.tensors)]
        return self._tensors[key]

    def _of_library(self, key: tuple[str, ...], launch: str) -> LayoutExchange:
        layout, _, memory, variant = key
        given = self._given(layout, memory)
        run = library_run(self._case, layout, variant, given)
        return LayoutExchange(self._case, key, given, run, str, launch)

    def _own(self, key: tuple[str, ...], beside: str, launch: str) -> LayoutExchange:
        layout, _, memory, _ = key
        given, output = self._given(layout, memory), self._given(layout, memory, is_output=True)
        dims = {THERE: {"scatter_dim": 2, "gather_dim": 1}, BACK: {"scatter_dim": 1, "gather_dim": 2}}.get(layout, {})
        options: dict[str, Any] = {**dims, "beside": beside}
        pair = (output, given) if dims else tuple([tensor.view(-1) for tensor in one] for one in (output, given))

        def run() -> list[Tensor]:
            self._comm.all_to_all(*pair, **options)
            return output

        def said() -> str:
            choice = self._comm.last_choice()
            return "" if choice is None else choice.candidate.variant

        return LayoutExchange(self._case, key, given, run, said, launch)


def calls_of(case: LayoutCase) -> int:
    """Return the exchanges of a sample: as many as take about two milliseconds, 20 at most."""
    if case.device.type == "cpu":
        return MOST_CPU_CALLS
    return max(1, min(MOST_CALLS, round(SAMPLE_US / (30.0 + case.leaving_bytes / BYTES_PER_US))))
