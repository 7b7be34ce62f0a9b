"""Collectives of a group of a server by Sidelane, and the server's own way for what Sidelane does not take.

The choice between the two depends on what all ranks know alike: whether the communicator could be made, dtypes, shapes
and layouts. All ranks therefore make the same calls of the same library in the same order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane.ops.handle import INTERPRETED, is_captured, power_of_two
from sidelane.ops.rms_norm import MOST_ROW_BYTES, MOST_TOKENS, all_reduce_rms_norm, is_worth_it
from sidelane.session import Communicator
from sidelane.sizes import format_bytes

SUMMED = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
"""Dtypes of sums between ranks."""

_NORMALISED = SUMMED[:3]
_MOST_FUSED_RANKS = 8
_SUSPENDED = "suspended"


class ServerGroup:
    """Collectives of one group of a server; a method returns None, with nothing done, for what Sidelane does not take.

    vLLM and SGLang both ask an object with ``disabled``, ``should_custom_ar``, ``custom_all_reduce`` and ``capture``
    whether it makes an all-reduce. This object takes the place of theirs, which it keeps: what Sidelane does not take
    is theirs, and so are all attributes that this class lacks.

    Args:
        group: process group of the ranks, by which they meet.
        device: device of all tensors.
        then: the server's own object; None for none.
        batch_invariant: the bits of a row must not depend on the rows beside it. Sums never do, and
            :meth:`all_reduce_rms_norm` is then left to the server, which rounds the sum first.

    Attributes:
        comm: communicator; None while it is disabled.
        reason: reason why it is disabled; empty while it is not.
        counts: numbers of calls that Sidelane has made, by method; those of a graph once, when it was captured.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str | int,
        *,
        then: Any = None,
        batch_invariant: bool = False,
    ) -> None:
        self._then, self._group = then, group
        self._device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self._batch_invariant = batch_invariant
        self._is_captured = False
        self.comm: Communicator | None = None
        self.reason = ""
        self.counts: collections.Counter[str] = collections.Counter()
        self._join()

    def _join(self) -> None:
        """Make the communicator, with all ranks; one that cannot be made is refused on all of them alike."""
        self._prepared: set[Hashable] = set()
        config = settings.current()
        if self._batch_invariant:
            config = dataclasses.replace(config, deterministic=True)
        try:
            self.comm = Communicator(self._group, device=self._device, config=config)
            self.reason = ""
        except Exception as error:  # whatever it is, the server goes on without Sidelane
            self.comm, self.reason = None, f"{type(error).__name__}: {error}"

    def __getattr__(self, name: str) -> Any:
        then = self.__dict__.get("_then")
        if name.startswith("__") or then is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(then, name)

    @property
    def disabled(self) -> bool:
        """Truth of: neither Sidelane nor the server's own object makes any call."""
        return self.comm is None and (self._then is None or bool(self._then.disabled))

    def takes(self, *tensors: torch.Tensor, dtypes: Sequence[torch.dtype] | None = SUMMED) -> bool:
        """Return whether Sidelane makes calls on such tensors: by device, dtype (None: any) and layout, not by bytes.

        Args:
            tensors: tensors of the call. Layouts must be alike on all ranks.
            dtypes: dtypes that are allowed.
        """
        return self.comm is not None and all(
            tensor.device == self.comm.device
            and tensor.numel() > 0
            and tensor.is_contiguous()
            and (dtypes is None or tensor.dtype in dtypes)
            for tensor in tensors
        )

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Return whether :meth:`custom_all_reduce` takes a tensor, by Sidelane or by the server's own object."""
        return self.takes(inp) or self._is_theirs(inp)

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """Return the sum over the ranks in a new tensor; None if neither takes it."""
        found = self.all_reduce(input)
        if found is None and self._is_theirs(input):
            found = self._then.custom_all_reduce(input)
        return found

    def _is_theirs(self, tensor: torch.Tensor) -> bool:
        return self._then is not None and not self._then.disabled and bool(self._then.should_custom_ar(tensor))

    def capture(self) -> AbstractContextManager[Any]:
        """Return what stands around the warm-up and the capture of CUDA graphs, as servers do.

        Sidelane registers nothing afterwards. Calls in the warm-up are made, so that the capture finds them ready.
        """
        return contextlib.nullcontext() if self._then is None else self._then.capture()

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the sum of everyone's ``input``.

        Args:
            input: any shape; it stays as it is, unless it is ``output``.
            output: tensor for the sum, of the same shape; None makes one.
        """
        if not self.takes(input):
            return None
        found = torch.empty_like(input) if output is None else output
        self._counted("all_reduce").all_reduce(input, output=found)
        return found

    def all_gather(self, input: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return everyone's ``input`` [n, ...], one after the other: [world_size * n, ...].

        Args:
            input: tensor of the same shape on all ranks, of at least one dimension.
            output: tensor for the result; None makes one.
        """
        if not self.takes(input, dtypes=None):
            return None
        comm = self._counted("all_gather")
        if output is None:
            output = input.new_empty((comm.world_size * input.shape[0], *input.shape[1:]))
        comm.all_gather(output, input)
        return output

    def all_gatherv(
        self, input: torch.Tensor, sizes: Sequence[int], output: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return everyone's rows, one rank after the other; rank i has ``sizes[i]`` of them. One call of broadcasts.

        Args:
            input: rows of this rank, [sizes[rank], ...].
            sizes: number of rows of each rank, the same on all ranks.
            output: tensor for the result, [sum(sizes), ...]; None makes one.
        """
        if self.comm is None or input.device != self.comm.device or not sum(sizes) or 0 in input.shape[1:]:
            return None
        if len(set(sizes)) == 1:
            return self.all_gather(input.contiguous(), output)
        comm = self._counted("all_gatherv")
        if output is None:
            output = input.new_empty((sum(sizes), *input.shape[1:]))
        parts = output.split(list(sizes))
        parts[comm.rank].copy_(input)
        with comm.batch() as batch:
            for root, part in enumerate(parts):
                if part.numel():
                    batch.broadcast(part, root=root)
        return output

    def reduce_scatter(self, input: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return this rank's part of the sum of everyone's ``input`` [world_size * n, ...]: [n, ...].

        Args:
            input: as many rows as ``world_size`` divides.
            output: tensor for the result; None makes one.
        """
        if not self.takes(input):
            return None
        comm = self._counted("reduce_scatter")
        if output is None:
            output = input.new_empty((input.shape[0] // comm.world_size, *input.shape[1:]))
        comm.reduce_scatter(output, input)
        return output

    def reduce_scatterv(
        self, input: torch.Tensor, sizes: Sequence[int], output: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return this rank's ``sizes[rank]`` rows of the sum. Uneven parts are copied to parts of the largest size.

        Args:
            input: rows [sum(sizes), ...].
            sizes: number of rows of each rank, the same on all ranks.
            output: tensor for the result; None makes one.
        """
        if not self.takes(input):
            return None
        most = max(sizes)
        if min(sizes) == most:
            return self.reduce_scatter(input, output)
        comm = self._counted("reduce_scatterv")
        padded = input.new_empty((comm.world_size, most, *input.shape[1:]))
        for place, part in zip(padded, input.split(list(sizes)), strict=True):
            place[: part.shape[0]].copy_(part)
        found = torch.empty_like(padded[0])
        comm.reduce_scatter(found, padded)
        rows = found[: sizes[comm.rank]]
        return rows if output is None else output.copy_(rows)

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor | None:
        """Replace everyone's ``tensor`` by that of the rank ``root`` of the group, and return it."""
        if not self.takes(tensor, dtypes=None):
            return None
        self._counted("broadcast").broadcast(tensor, root=root)
        return tensor

    def normalises(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether :meth:`all_reduce_rms_norm` takes a sum [tokens, hidden] and a weight [hidden]."""
        return (
            self.fuses()
            and self.takes(x, weight, dtypes=_NORMALISED)
            and x.dim() == 2
            and x.dtype == weight.dtype
            and x.shape[0] <= MOST_TOKENS
            and x.shape[1] * x.itemsize % 4 == 0
            and x.shape[1] * x.itemsize <= MOST_ROW_BYTES
            and is_worth_it(self.comm, x)
        )

    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        **tensors: Any,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ``rms_norm(total) * weight`` and ``total = sum of everyone's x + residual``, both [tokens, hidden].

        A capture takes shapes that a call has had before it; others are the server's there.

        Args:
            x: this rank's part of the sum, [tokens, hidden]; it stays as it is.
            residual: tensor [tokens, hidden], the same on all ranks; None for none.
            weight: weight of the norm, [hidden].
            eps: number added to the mean of the squares.
            tensors: ``out``, ``residual_out``, ``quantized`` and ``scale`` of ``ops.all_reduce_rms_norm``.
        """
        if not self.normalises(x, weight) or not self._is_prepared(x, residual, tensors):
            return None
        return all_reduce_rms_norm(self._counted("all_reduce_rms_norm"), x, residual, weight, eps=eps, **tensors)

    def _is_prepared(self, x: torch.Tensor, residual: torch.Tensor | None, tensors: dict[str, Any]) -> bool:
        """Return whether such a norm can run: in a capture, one outside of it has prepared it before, on all ranks."""
        assert self.comm is not None
        given = sorted(name for name, tensor in tensors.items() if tensor is not None)
        kind = power_of_two(x.shape[0]), x.shape[1], x.dtype, residual is None, *given
        if is_captured(self.comm):
            return kind in self._prepared
        self._prepared.add(kind)
        return True

    def fuses(self) -> bool:
        """Return whether :meth:`all_reduce_rms_norm` takes any tensor: kernels run here, and bits may differ."""
        comm = self.comm
        if comm is None or self._batch_invariant:
            return False
        return comm.world_size <= _MOST_FUSED_RANKS and (comm.device.type == "cuda" or INTERPRETED)

    def suspend(self) -> str:
        """Release the memory of the communicator, with all ranks; return why it stays, or an empty text.

        Graphs contain the addresses of its memory, so that it stays once a call has been captured.
        """
        if self.comm is None:
            return self.reason
        if self._is_captured:
            kept = format_bytes(self.memory_bytes())
            return f"{kept} of symmetric memory stay: captured graphs contain their addresses"
        self.comm.synchronize()
        self.comm.barrier()
        self.comm.synchronize()
        self.comm.close()
        self.comm, self.reason = None, _SUSPENDED
        return ""

    def resume(self) -> str:
        """Take the memory again that :meth:`suspend` has released, with all ranks; return why not, or an empty text."""
        if self.reason == _SUSPENDED:
            self._join()
        return self.reason

    def memory_bytes(self) -> int:
        """Return the bytes of symmetric memory that are reserved on this rank."""
        if self.comm is None:
            return 0
        use = self.comm.memory()
        return use.reserved + use.own

    def close(self) -> None:
        """Release the communicator, and the server's own object if it can be closed. Not a collective."""
        then, self._then = self._then, None
        if hasattr(then, "close"):
            then.close()
        if self.comm is not None:
            self.comm.close()
            self.comm, self.reason = None, "closed"

    def _counted(self, call: str) -> Communicator:
        """Count a call, which may be captured, and return the communicator for it."""
        assert self.comm is not None
        self.counts[call] += 1
        self._is_captured = self._is_captured or is_captured(self.comm)
        return self.comm
