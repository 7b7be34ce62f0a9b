"""Calls of each kind on tensors that a test places, held to what they must give: the same on CPU processes and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from expected import any_bytes, close, numbers, reduced, same_bytes

from sidelane import Communicator

REDUCING = ("reduce_scatter", "all_reduce")


class CheckedCall:
    """A call whose inputs all ranks draw alike.

    Args:
        comm: communicator that makes it.
        kind: name of its method.
        size: elements of a part.
        dtype: of both tensors.
        make: gives a tensor for ``"output"`` or ``"input"`` and a number of elements.
        seed: of the inputs.
        root: of what has one.
        in_place: one of the tensors lies in the other, where the kind has such a form.
    """

    def __init__(
        self,
        comm: Communicator,
        kind: str,
        size: int,
        dtype: torch.dtype,
        make: Callable[[str, int], torch.Tensor],
        *,
        seed: int,
        root: int = 0,
        in_place: bool = False,
    ) -> None:
        n, own = comm.world_size, slice(comm.rank * size, (comm.rank + 1) * size)
        self.comm, self.kind, self.root, self._own = comm, kind, root, own
        given = size * n if kind in ("all_to_all", "reduce_scatter", "scatter") else size
        came = size * n if kind in ("all_gather", "all_to_all", "gather") else size
        fill = numbers if kind in REDUCING else any_bytes
        self._given = [fill(seed, peer, given, dtype) for peer in range(n)]
        if kind == "broadcast" or (in_place and kind == "all_reduce"):
            self.output = self.input = make("output", came)
        elif in_place and kind == "all_gather":
            self.output = make("output", came)
            self.input = self.output[own]
        elif in_place and kind == "reduce_scatter":
            self.input = make("input", given)
            self.output = self.input[own]
        else:
            self.output, self.input = make("output", came), make("input", given)

    def run(self, **options: Any) -> None:
        """Make the call with fresh bytes everywhere, and compare what it gives."""
        comm, rank, root, output, input = self.comm, self.comm.rank, self.root, self.output, self.input
        output.view(torch.uint8).fill_(0xA5)
        input.copy_(self._given[rank])
        match self.kind:
            case "broadcast":
                comm.broadcast(output, root=root, **options)
            case "scatter":
                comm.scatter(output, input if rank == root else None, root=root, **options)
            case "gather":
                comm.gather(output if rank == root else None, input, root=root, **options)
            case "all_reduce":
                comm.all_reduce(input, output=None if output is input else output, **options)
            case _:
                getattr(comm, self.kind)(output, input, **options)
        if self.kind == "gather" and rank != root:
            assert output.view(torch.uint8).eq(0xA5).all(), "nothing comes"
            return
        right = self._expected()
        assert (close if self.kind in REDUCING else same_bytes)(output, right), (self.kind, len(output), options)

    def _expected(self) -> torch.Tensor:
        given, own = self._given, self._own
        match self.kind:
            case "all_gather" | "gather":
                return torch.cat(given)
            case "all_to_all":
                return torch.cat([each[own] for each in given])
            case "broadcast":
                return given[self.root]
            case "scatter":
                return given[self.root][own]
            case "reduce_scatter":
                return reduced([each[own] for each in given], "sum")
        return reduced(given, "sum")
