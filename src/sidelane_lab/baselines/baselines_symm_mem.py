"""Baselines on NVIDIA GPUs: the collectives of PyTorch's symmetric memory, ``torch.ops.symm_mem``, CUDA backend.

How each gets its best configuration: every input lies in symmetric memory, at the beginning of one allocation that all
ranks have exchanged beforehand, so that no operator copies it into a workspace first; outputs are given, where an
operator takes one. Nothing else can be set: all kernels use up to 24 blocks, whatever the size.

| collective | variant | operator | place | what it does |
|---|---|---|---|---|
| all_gather | (none) | ``_low_contention_all_gather`` | out | pulls by copies, between two barrier kernels |
| all_reduce | ``one_shot`` | ``one_shot_all_reduce_out`` | out | a kernel: every rank reads every input whole |
| | ``one_shot_copy`` | ``one_shot_all_reduce_copy_out`` | in | the same, behind a copy into symmetric memory |
| | ``two_shot`` | ``two_shot_all_reduce_`` | in | a kernel: reduces its own part, pushes it to all |
| | ``two_shot_out`` | ``two_shot_all_reduce_out`` | both | a kernel: reduces its own part, then all pull |
| reduce_scatter | ``direct`` | ``reduce_scatter_out`` | both | a kernel: reads its own part of every input |
| | ``low_contention`` | ``_low_contention_reduce_scatter`` | out | pulls by copies into a buffer, ``torch.sum`` |

- *Outputs.* The low-contention operators allocate theirs. They run on a stream of their own, ordered behind the current
  one and before it again by ``wait_tensor``; they can be captured.
- *Inputs.* ``two_shot_all_reduce_out`` writes its rank's part of the sum into its input, also out of place. Torch
  declares the same of ``reduce_scatter_out``. A second run on the same input would be another sum.
- *In place* only ``two_shot_all_reduce_`` is meant to be. The others are right too, since no peer reads any more what a
  rank overwrites: ``reduce_scatter_out`` its own part of its input, which peers never read; ``two_shot_all_reduce_out``
  the peers' parts of its input, which nobody reads after the first shot; ``one_shot_all_reduce_copy_out`` ordinary
  memory. The study checks it.
- *Limits.* Kernels take bfloat16 and float32, 1-d and contiguous. They move 16 bytes at a time where offsets and sizes
  allow it, as all of the study's do. ``two_shot_all_reduce_out`` and ``reduce_scatter_out`` know 2, 4 and 8 ranks. What
  an operator refuses, all ranks refuse before anything is launched, and the row says so.
- *Sums.* Kernels add in the type of the tensors, rank 0 first; ``torch.sum`` rounds once. The study's inputs are whole
  numbers from -7 to 7, whose sums are exact in bfloat16 for up to 36 ranks: outputs are compared byte for byte.

Left out: an all_to_all and a broadcast, which torch has for the NVSHMEM and NCCL backends only (``all_to_all_vdev``,
``nvshmem_all_to_all``), and ``multimem_*``, which need NVLink multicast (results/notes/performance.md, *Who is
compared*).
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane_lab.baselines.candidate import Entrant, Implementation, Tensors, nothing_to_wait_for, views
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Meter


class SymmetricMemoryOperators(Implementation):
    """PyTorch's operators on symmetric memory.

    Args:
        device: of this rank.
        meter: ranks agree through it before each step that is collective.
        group: whose ranks; None for the default group.
    """

    name = "symm_mem"
    launches: tuple[str, ...] = ("eager", "graph")

    def __init__(self, device: torch.device, meter: Meter, group: dist.ProcessGroup | None = None) -> None:
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None
        self.device = device
        self._meter = meter
        self._group_name = chosen.group_name
        self._ordinary: torch.Tensor | None = None
        self._symmetric: torch.Tensor | None = None
        self._misplaced: str | None = None

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return tuple(variant for (of, variant), found in OPERATORS.items() if of is kind and in_place in found.places)

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        ordinary = torch.empty(0, dtype=torch.uint8, device=self.device)
        symmetric, handle = ordinary, None

        def allocate() -> None:
            nonlocal ordinary, symmetric
            ordinary = torch.empty(output_bytes, dtype=torch.uint8, device=self.device)
            symmetric = symm_mem.empty(input_bytes, dtype=torch.uint8, device=self.device)

        def exchange() -> None:
            nonlocal handle
            handle = _rendezvous(symmetric, self._group_name)

        def placed() -> str | None:
            # Kernels count from the beginning of each rank's allocation, which a pool may have put elsewhere.
            assert handle is not None
            behind = symmetric.data_ptr() - handle.buffer_ptrs[handle.rank]
            return f"its memory begins {behind} bytes behind the allocation" if behind else None

        for step in (allocate, exchange):
            error = self._meter.attempt(step)
            if error is not None:
                raise UnavailableError(f"PyTorch's symmetric memory: {error}")
        self._ordinary, self._symmetric = ordinary, symmetric
        self._misplaced = self._meter.attempt(placed)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        assert self._ordinary is not None, "reserve comes first"
        assert self._symmetric is not None
        operator = OPERATORS[case.kind, candidate.variant]
        if operator.allocates:
            return Tensors(None, self._symmetric[: case.input_bytes].view(case.dtype))
        if operator.stages:
            mine = views(case, True, self._ordinary, self._ordinary)
            return Staged(mine.output, mine.input, staging=self._symmetric[: case.input_bytes].view(case.dtype))
        output = self._symmetric if candidate.in_place else self._ordinary
        return dataclasses.replace(
            views(case, candidate.in_place, output, self._symmetric), keeps_input=operator.keeps_input
        )

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        self.bind(case, tensors, variant)()
        return nothing_to_wait_for

    def bind(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], object]:
        operator = OPERATORS[case.kind, variant]
        # Not earlier: here a refusal becomes the row's note, on all ranks alike, since all have the same torch.
        call = getattr(torch.ops.symm_mem, operator.name, None)
        if call is None:
            raise UnavailableError(f"this PyTorch has no torch.ops.symm_mem.{operator.name} (has {torch.__version__})")
        if not operator.allocates and self._misplaced is not None:
            raise UnavailableError(f"PyTorch's symmetric memory: {self._misplaced}")
        output, input, group = tensors.output, tensors.input, self._group_name
        wait = torch.ops._c10d_functional.wait_tensor

        def gather() -> None:
            tensors.output = wait(call(input, group))

        def scatter() -> None:
            tensors.output = wait(call(input, "sum", group))

        match operator.name:
            case "_low_contention_all_gather":
                return gather
            case "_low_contention_reduce_scatter":
                return scatter
            case "one_shot_all_reduce_copy_out":
                assert isinstance(tensors, Staged)
                return partial(call, tensors.staging, input, "sum", group, output)
            case "two_shot_all_reduce_":
                return partial(call, input, "sum", group)
            case "reduce_scatter_out":
                return partial(call, input, group, False, output)
        return partial(call, input, "sum", group, output)

    def close(self) -> None:
        self._ordinary = self._symmetric = None


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """An operator of ``torch.ops.symm_mem``.

    Attributes:
        name: of the operator.
        places: False for out of place, True for in place.
        allocates: it returns its output. These copy; the others are kernels.
        stages: it reads ordinary memory, and copies it into symmetric memory itself.
        keeps_input: out of place, the input is what it was.
    """

    name: str
    places: tuple[bool, ...]
    allocates: bool = False
    stages: bool = False
    keeps_input: bool = True


@dataclasses.dataclass(slots=True)
class Staged(Tensors):
    """Tensors in ordinary memory, and symmetric memory of the input's size."""

    staging: torch.Tensor = dataclasses.field(kw_only=True)


BOTH, OUT_OF_PLACE, IN_PLACE = (False, True), (False,), (True,)

OPERATORS: dict[tuple[Kind, str], Operator] = {
    (Kind.ALL_GATHER, ""): Operator("_low_contention_all_gather", OUT_OF_PLACE, allocates=True),
    (Kind.ALL_REDUCE, "one_shot"): Operator("one_shot_all_reduce_out", OUT_OF_PLACE),
    (Kind.ALL_REDUCE, "one_shot_copy"): Operator("one_shot_all_reduce_copy_out", IN_PLACE, stages=True),
    (Kind.ALL_REDUCE, "two_shot"): Operator("two_shot_all_reduce_", IN_PLACE),
    (Kind.ALL_REDUCE, "two_shot_out"): Operator("two_shot_all_reduce_out", BOTH, keeps_input=False),
    (Kind.REDUCE_SCATTER, "direct"): Operator("reduce_scatter_out", BOTH, keeps_input=False),
    (Kind.REDUCE_SCATTER, "low_contention"): Operator("_low_contention_reduce_scatter", OUT_OF_PLACE, allocates=True),
}
"""By collective and variant."""


@functools.cache
def known_to_symmetric_memory(group_name: str, device: torch.device) -> str:
    """The name of a group, once its members have shared memory. Collective the first time."""
    import torch.distributed._symmetric_memory as symm_mem

    _rendezvous(symm_mem.empty(16, dtype=torch.uint8, device=device), group_name)
    return group_name


def _rendezvous(tensor: torch.Tensor, group_name: Any) -> Any:
    """Map everyone's memory, so that operators find it mapped. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    try:
        return symm_mem.rendezvous(tensor, group_name)
    except RuntimeError as error:
        # Older versions must be told of a group first; newer ones know them all, and warn of being told.
        if "no group info" not in str(error):
            raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symm_mem.enable_symm_mem_for_group(group_name)
    return symm_mem.rendezvous(tensor, group_name)
