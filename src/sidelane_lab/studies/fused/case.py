"""What a case of the study of fused operators is, and the tensors that all of them are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist

from sidelane.session import Communicator

NCCL, SYMM_MEM = "unfused_nccl", "symm_mem"
AS_CALLED = 'method="auto"'
"""The schedule of a call that leaves the way to the operator."""

Run = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Auto:
    """An operator as a user calls it.

    Attributes:
        run: the call.
        sizes: by which it chooses (``ops.explain``).
        without: ways that such a call does not have.
        experts: of a rank.
    """

    run: Run
    sizes: tuple[int, ...]
    without: tuple[str, ...] = ()
    experts: int = 1


@dataclasses.dataclass
class Case:
    """An operator at one shape, on this rank.

    Attributes:
        op: its name.
        shape: in words.
        refill: gives inputs new values, from a seed that is alike on all ranks.
        expected: the result in float64, by the process group; of what was run last.
        compute: the computation alone, in every way that is there.
        collective: the collective alone, likewise.
        unfused: by implementation, and what it is made of.
        fused: by schedule.
        auto: by words.
        read_bytes: that a call reads of tables or weights, where memory decides; None where it does not.
    """

    op: str
    shape: str
    refill: Callable[[int], None]
    expected: Run
    compute: dict[str, Callable[[], object]]
    collective: dict[str, Callable[[], object]]
    unfused: dict[tuple[str, str], Run]
    fused: dict[str, Run]
    auto: dict[str, Auto]
    read_bytes: int | None = None


def dtype_of(comm: Communicator) -> torch.dtype:
    """Of all tensors."""
    return torch.float32 if comm.device.type == "cpu" else torch.bfloat16


def ordinary(comm: Communicator, *size: int) -> torch.Tensor:
    """Zeros in ordinary memory."""
    return torch.zeros(*size, dtype=dtype_of(comm), device=comm.device)


def fill(comm: Communicator, tensor: torch.Tensor, seed: int) -> None:
    """Values that another rank does not have."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + comm.rank)
    tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cpu"))


class OneShot:
    """PyTorch's own all-reduce for few bytes, ``one_shot_all_reduce`` on its symmetric memory. GPUs only.

    Args:
        comm: the ranks, those of the default group.
        like: shape of what is added up.
    """

    def __init__(self, comm: Communicator, like: torch.Tensor) -> None:
        self._comm, self._like = comm, like
        self._input: torch.Tensor | None = None

    @property
    def is_made(self) -> bool:
        """Its memory is there."""
        return self._input is not None

    @property
    def input(self) -> torch.Tensor:
        """What is added up. Collective the first time, which happens where all ranks agree on what went wrong."""
        if self._input is None:
            import torch.distributed._symmetric_memory as symm_mem

            made = symm_mem.empty(self._like.numel(), dtype=self._like.dtype, device=self._like.device)
            symm_mem.rendezvous(made, group_name(self._comm))  # type: ignore[arg-type]
            self._input = made.view(self._like.shape)
        return self._input

    def __call__(self) -> torch.Tensor:
        """The sum, in memory of its own."""
        flat = self.input.view(-1)
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(flat, "sum", group_name(self._comm))
        return found.view(self._like.shape)


def group_name(comm: Communicator) -> str:
    """The name of the group that the study measures in, known to PyTorch's symmetric memory."""
    from sidelane_lab.baselines.baselines_symm_mem import known_to_symmetric_memory

    assert dist.group.WORLD is not None
    return known_to_symmetric_memory(dist.group.WORLD.group_name, comm.device)
