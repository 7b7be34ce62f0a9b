"""A case of the study of fused operators, and the tensors and unfused ways that cases are made of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from sidelane.session import Communicator
from sidelane_lab.studies.fused.rows import OWN

NCCL, SYMM_MEM = "unfused_nccl", "symm_mem"
GROUP, OURS = (NCCL, "process group"), (OWN, "sidelane")
"""The implementation that the rows of a collective name, and the collective's own name."""

AS_CALLED = 'method="auto"'
"""The schedule of a call that leaves the way to the operator."""

Run = Callable[[], torch.Tensor]
Step = Callable[[torch.Tensor], torch.Tensor]
Move = tuple[torch.Tensor, Step]
"""A collective: what it reads, and what makes its result of that."""


@dataclasses.dataclass(frozen=True, slots=True)
class AutoCall:
    """An operator as a user calls it.

    Attributes:
        run: the call.
        sizes: the sizes by which it chooses (``ops.explain``).
        without: ways that such a call does not have.
    """

    run: Run
    sizes: tuple[int, ...]
    without: tuple[str, ...] = ()


@dataclasses.dataclass
class OperatorCase:
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
        read_bytes: bytes of tables or weights that a call reads, where memory decides; None where it does not.
    """

    op: str
    shape: str
    refill: Callable[[int], None]
    expected: Run
    compute: Mapping[str, Callable[[], object]]
    collective: Mapping[str, Callable[[], object]]
    unfused: Mapping[tuple[str, str], Run]
    fused: Mapping[str, Run]
    auto: Mapping[str, AutoCall]
    read_bytes: int | None = None


def reduced_case(op: str, shape: str, products: Mapping[str, Step], moves: Mapping[tuple[str, str], Move], *,
                 unfused: Mapping[tuple[str, str], Run], **others: Any) -> OperatorCase:  # fmt: skip
    """Make a case of products whose results a collective takes.

    Args:
        op: its name.
        shape: in words.
        products: by name; each returns the tensor that it was given to write into, or one of its own.
        moves: by implementation and name.
        unfused: further ways.
        others: the rest of an :class:`OperatorCase`.
    """
    made = {
        (implementation, f"{name}, {moved}"): functools.partial(_behind, functools.partial(product, source), move)
        for name, product in products.items()
        for (implementation, moved), (source, move) in moves.items()
    }
    first = next(iter(moves.values()))[0]
    compute = {name: functools.partial(product, first) for name, product in products.items()}
    return OperatorCase(op, shape, compute=compute, collective=_alone(moves), unfused={**made, **unfused}, **others)


def gathered_case(op: str, shape: str, products: Mapping[str, Step], moves: Mapping[tuple[str, str], Move],
                  received: torch.Tensor, *, unfused: Mapping[tuple[str, str], Run], **others: Any,
                  ) -> OperatorCase:  # fmt: skip
    """Make a case of products that take the result of a collective, ``received`` where they run alone.

    The other arguments are those of :func:`reduced_case`.
    """
    made = {
        (implementation, f"{moved}, {name}"): functools.partial(_behind, functools.partial(move, source), product)
        for name, product in products.items()
        for (implementation, moved), (source, move) in moves.items()
    }
    compute = {name: functools.partial(product, received) for name, product in products.items()}
    collective = others.pop("collective", None) or _alone(moves)
    return OperatorCase(op, shape, compute=compute, collective=collective, unfused={**made, **unfused}, **others)


def _behind(first: Run, second: Step) -> torch.Tensor:
    return second(first())


def _alone(moves: Mapping[tuple[str, str], Move]) -> dict[str, Run]:
    return {name: functools.partial(move, source) for (_, name), (source, move) in moves.items()}


def dtype_of(comm: Communicator) -> torch.dtype:
    """Return the dtype of all tensors."""
    return torch.float32 if comm.device.type == "cpu" else torch.bfloat16


def ordinary(comm: Communicator, *size: int) -> torch.Tensor:
    """Make zeros in ordinary memory."""
    return torch.zeros(*size, dtype=dtype_of(comm), device=comm.device)


def symmetric(comm: Communicator, *size: int) -> torch.Tensor:
    """Make a tensor in symmetric memory."""
    return comm.empty(*size, dtype=dtype_of(comm))


def fill(comm: Communicator, tensor: torch.Tensor, seed: int) -> None:
    """Put in values that another rank does not have."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + comm.rank)
    tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cpu"))


def summed(wide: torch.Tensor) -> torch.Tensor:
    """Add a tensor up over the ranks, in place."""
    dist.all_reduce(wide)
    return wide


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
        """The tensor that is added up. Collective the first time, where all ranks agree on what went wrong."""
        if self._input is None:
            import torch.distributed._symmetric_memory as symm_mem

            made = symm_mem.empty(self._like.numel(), dtype=self._like.dtype, device=self._like.device)
            symm_mem.rendezvous(made, group_name(self._comm))  # type: ignore[arg-type]
            self._input = made.view(self._like.shape)
        return self._input

    def __call__(self) -> torch.Tensor:
        """Return the sum, in memory of its own."""
        flat = self.input.view(-1)
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(flat, "sum", group_name(self._comm))
        return found.view(self._like.shape)


def group_name(comm: Communicator) -> str:
    """Return the name of the group that the study measures in, known to PyTorch's symmetric memory."""
    from sidelane_lab.baselines.baselines_symm_mem import known_to_symmetric_memory

    assert dist.group.WORLD is not None
    return known_to_symmetric_memory(dist.group.WORLD.group_name, comm.device)
