"""Collectives of a group of a server by Sidelane, and the server's own way for what Sidelane does not take.

The choice between the two depends on what all ranks know alike: whether the communicator could be made, dtypes, shapes
and layouts. All ranks therefore make the same calls of the same library in the same order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
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

_MOST_FUSED_RANKS, _MOST_BYTES_THROUGH_HOST = 8, 64 << 10  # larger ones were not timed (results/notes/no-peers.md)

_SUSPENDED = "suspended"

Norms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ServerGroup:
    """Collectives of one group of a server; a method returns None, with nothing done, for what Sidelane does not take.

    vLLM and SGLang both ask an object with ``disabled``, ``should_custom_ar``, ``custom_all_reduce`` and ``capture``
    whether it makes an all-reduce. This object takes the place of theirs.

    Args:
        group: process group of the ranks, by which they meet.
        device: device of all tensors.
        batch_invariant: the bits of a row must not depend on the rows beside it. Sums never do, and
            :meth:`all_reduce_rms_norm` is then left to the server, which rounds the sum first.

    Attributes:
        comm: communicator; None while there is none.
        reason: reason why there is none; empty while there is one.
        counts: numbers of calls that Sidelane has made, by method; those of a graph once, when it was captured.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device | str | int, *, batch_invariant: bool = False
    ) -> None:
        self._group, self._batch_invariant = group, batch_invariant
        self._device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
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

    @property
    def disabled(self) -> bool:
        """Truth of: all calls are the server's."""
        return self.comm is None

    def takes(self, *tensors: torch.Tensor, dtypes: Sequence[torch.dtype] | None = SUMMED) -> bool:
        """Return whether calls on tensors of such devices, layouts and dtypes (None: any) are made; ranks agree."""
        return self.comm is not None and all(
            tensor.device == self.comm.device
            and tensor.numel() > 0
            and tensor.is_contiguous()
            and (dtypes is None or tensor.dtype in dtypes)
            for tensor in tensors
        )

    should_custom_ar = takes

    def capture(self) -> AbstractContextManager[None]:
        """Return what stands around the warm-up and the capture of CUDA graphs: nothing is registered afterwards."""
        return contextlib.nullcontext()

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the sum of everyone's ``input``, of any shape, in ``output`` (it may be ``input``) or a new tensor."""
        if not self.takes(input):
            return None
        found = torch.empty_like(input) if output is None else output
        self._counted("all_reduce").all_reduce(input, output=found)
        return found

    custom_all_reduce = all_reduce

    def all_gather(
        self, input: torch.Tensor, output: torch.Tensor | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """Return everyone's rows, [n, ...] or those of rank i [sizes[i], ...], in ``output`` or a new tensor.

        Uneven rows are one batch of broadcasts. ``sizes`` are the same on all ranks.
        """
        if self.comm is None or input.device != self.comm.device or not input.dim():
            return None
        sizes = list(sizes or [input.shape[0]] * self.comm.world_size)
        if not sum(sizes) or 0 in input.shape[1:]:
            return None
        comm = self._counted("all_gather")
        if output is None:
            output = input.new_empty((sum(sizes), *input.shape[1:]))
        if len(set(sizes)) == 1:
            comm.all_gather(output, input.contiguous())
            return output
        parts = output.split(sizes)
        parts[comm.rank].copy_(input)
        with comm.batch() as batch:
            for root, part in enumerate(parts):
                if part.numel():
                    batch.broadcast(part, root=root)
        return output

    def reduce_scatter(
        self, input: torch.Tensor, output: torch.Tensor | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """Return this rank's rows of the sum of everyone's ``input``, in ``output`` or a new tensor.

        ``input`` is [world_size * n, ...] or [sum(sizes), ...]. Uneven parts are copied to parts of one size.
        """
        if not self.takes(input) or (sizes is None and input.shape[0] % self._group.size()):
            return None
        sizes = list(sizes or [input.shape[0] // self._group.size()] * self._group.size())
        comm, most = self._counted("reduce_scatter"), max(sizes)
        if min(sizes) == most:
            found = input.new_empty((most, *input.shape[1:])) if output is None else output
            comm.reduce_scatter(found, input)
            return found
        padded = input.new_empty((comm.world_size, most, *input.shape[1:]))
        for place, part in zip(padded, input.split(sizes), strict=True):
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
            self.fuses(x.nbytes)
            and self.takes(x, weight, dtypes=SUMMED[:3])
            and x.dim() == 2
            and x.dtype == weight.dtype
            and x.shape[0] <= MOST_TOKENS
            and x.shape[1] * x.itemsize % 4 == 0
            and x.shape[1] * x.itemsize <= MOST_ROW_BYTES
            and is_worth_it(self.comm, x)
        )

    def all_reduce_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, **tensors: Any
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ``rms_norm(total) * weight`` and ``total = sum of everyone's x + residual``, both [tokens, hidden].

        A capture takes shapes that a call has had before it; others are the server's there. ``x`` stays as it is.
        ``residual`` is the same on all ranks. ``tensors`` are further ones of :func:`sidelane.ops.all_reduce_rms_norm`.
        """
        if self.comm is None or not self.normalises(x, weight):
            return None
        kind = power_of_two(x.shape[0]), x.shape[1], x.dtype, residual is None, *sorted(tensors)
        if is_captured(self.comm) and kind not in self._prepared:
            return None
        self._prepared.add(kind)
        return all_reduce_rms_norm(self._counted("all_reduce_rms_norm"), x, residual, weight, eps=eps, **tensors)

    def fuses(self, nbytes: int = 0) -> bool:
        """Return whether :meth:`all_reduce_rms_norm` takes sums of so many bytes: kernels run here, bits may differ.

        Through host memory it takes those of two ranks that were timed in a step.
        """
        return (
            self.comm is not None
            and not self._batch_invariant
            and self.comm.world_size <= (2 if self.comm.backend.peers.through_host else _MOST_FUSED_RANKS)
            and (nbytes <= _MOST_BYTES_THROUGH_HOST or not self.comm.backend.peers.through_host)
            and (self.comm.device.type == "cuda" or INTERPRETED)
        )

    def suspend(self) -> str:
        """Release the memory of the communicator, with all ranks; return why it stays, or an empty text.

        Graphs contain the addresses of its memory, so that it stays once a call has been captured.
        """
        if self.comm is None:
            return "" if self.reason == _SUSPENDED else self.reason
        if self._is_captured:
            return f"{format_bytes(self.memory_bytes())} stay: captured graphs contain addresses of this memory"
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
        use = None if self.comm is None else self.comm.memory()
        return 0 if use is None else use.reserved + use.own

    def close(self) -> None:
        """Release the communicator. Not a collective."""
        if self.comm is not None:
            self.comm.close()
            self.comm, self.reason = None, "closed"

    def _counted(self, call: str) -> Communicator:
        """Count a call, which may be captured, and return the communicator for it."""
        assert self.comm is not None
        self.counts[call] += 1
        self._is_captured = self._is_captured or is_captured(self.comm)
        return self.comm


_libraries: list[torch.library.Library] = []


@functools.cache
def norm_operator(server: str, look: Callable[[str], tuple[ServerGroup | None, Callable[..., Norms]]]) -> Any:
    """Return the all-reduce with the norm behind it as an operator of torch, which compilers see whole.

    The operator ``(x, residual, weight, eps, group, scale)`` returns ``rms_norm(total) * weight``; ``total``, the sum
    of everyone's ``x`` and ``residual`` (None for none); and the first one divided by ``scale`` as float8_e4m3fn, or
    an empty tensor without a scale.

    Args:
        server: name of the server.
        look: function from a name to its group, and to the server's own ``(x, residual, weight, eps, scale)``.
    """

    def normalise(x: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, group: str, scale: Any) -> Norms:
        served, theirs = look(group)
        rows = x.reshape(-1, x.shape[-1])
        quantized = norm_shapes(x, scale)[2]
        given = {} if scale is None else {"quantized": quantized.view(rows.shape), "scale": scale.view(1)}
        added = None if residual is None else residual.reshape(rows.shape)
        found = None if served is None else served.all_reduce_rms_norm(rows, added, weight, eps, **given)
        if found is None:
            return theirs(x, residual, weight, eps, scale)
        return found[0].view(x.shape), found[1].view(x.shape), quantized

    library, name = torch.library.Library(f"sidelane_{server}", "DEF"), "all_reduce_rms_norm"
    given = "Tensor x, Tensor? residual, Tensor weight, float eps, str group, Tensor? scale"
    library.define(f"{name}({given}) -> (Tensor, Tensor, Tensor)")
    library.impl(name, normalise, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sidelane_{server}::{name}", norm_shapes, lib=library)
    _libraries.append(library)  # it defines the operator as long as it lives
    return getattr(torch.ops, f"sidelane_{server}").all_reduce_rms_norm.default


def norm_shapes(x: torch.Tensor, *rest: Any) -> Norms:
    """Return tensors of the shapes and dtypes that the operator returns for its arguments."""
    quantized = x.new_empty(0) if rest[-1] is None else torch.empty_like(x, dtype=torch.float8_e4m3fn)
    return torch.empty_like(x), torch.empty_like(x), quantized
