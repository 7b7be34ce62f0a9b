"""The buffer of DeepEP: dispatch and combine of experts' tokens, with kernels of ``token_rows`` and ``experts``.

Rows travel straight to their places, as those of ``ops.dispatch_tokens`` and ``ops.combine_tokens`` do: nothing passes
through a buffer of fixed size. Rows arrive in the order of the ranks and of their tokens, always the same.

Legend: N ranks; T tokens of a rank, which may differ between ranks; H elements of a token; k experts of a token; X
experts of all ranks, the first X / N of them on rank 0; R tokens that arrive; M bound of T with low latency.

This file is long for its signatures, which are DeepEP's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sidelane.deep_ep.settings import DeepEpConfig, EventOverlap, check_kind, record_event, refuse_set
from sidelane.deep_ep.tokens import (
    DispatchHandle,
    LowLatencyHandle,
    TokenLayout,
    bring_back,
    combine_slots,
    count_tokens,
    dispatch_to_slots,
    exchange_layout,
    send_tokens,
)
from sidelane.errors import UnavailableError
from sidelane.ops.handle import FLOAT8S, FLOATS, INTERPRETED, check_tensor, compare_shapes, reporting_refusals
from sidelane.ops.operands import in_rows
from sidelane.ops.rows import MOST_TERMS, row_widths
from sidelane.session import Communicator

INDICES = torch.int32, torch.int64


class DeepEpBuffer:
    """Dispatch and combine of experts' tokens between the GPUs of one node. Collective, as its calls but layouts.

    Calls wait for ``previous_event`` before they read their tensors (None: for the current stream). With
    ``async_finish`` the current stream does not wait for the end of the call, which is among the results. ``others``
    are DeepEP's other arguments: ``allocate_on_comm_stream`` and ``return_recv_hook`` have no effect, since either
    stream may use results, and the hook does nothing; for the rest only None, False and 0 are allowed.

    Args:
        group: process group of the ranks, of any backend, by which they meet; all of them on one node.
        num_nvl_bytes: bytes that the caller sets aside: no effect, since symmetric memory follows the calls.
        num_rdma_bytes: with ``low_latency_mode`` the same; otherwise 0.
        low_latency_mode: no effect but on the attribute: both forms of the calls are always there.
        enable_shrink: False.
        device: device of all tensors; None for the current GPU, or else the CPU.
        no_effect: DeepEP's other arguments, such as ``num_qps_per_rank`` and ``explicitly_destroy``.

    Attributes:
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode: the arguments.
        rank: number of this rank in the group.
        group_size: number of its ranks.
        comm: communicator of the calls; ``comm.memory()`` has the bytes that they take.

    Raises:
        ValueError: an argument is not allowed.
        UnavailableError: CPU ranks without ``TRITON_INTERPRET=1``; or see :class:`sidelane.Communicator`.
        MismatchError, PeerError: see :class:`sidelane.Communicator`.
    """

    num_sms = 128
    """Largest number of compute units of a dispatch or a combine without a :class:`DeepEpConfig`."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        *,
        enable_shrink: bool = False,
        device: torch.device | str | int | None = None,
        **no_effect: object,
    ) -> None:
        refuse_set("Buffer", enable_shrink=enable_shrink)
        if num_rdma_bytes and not low_latency_mode:
            problem = "num_rdma_bytes without low_latency_mode, which only several nodes need"
            raise ValueError(f"Buffer: {problem} (value={num_rdma_bytes}, allowed=0)")
        self.comm = Communicator(group, device=device)
        on_gpu = self.comm.device.type == "cuda"
        if not on_gpu and not INTERPRETED:
            self.comm.close()
            problem = "CPU ranks run kernels by Triton's interpreter: set TRITON_INTERPRET=1 in the environment"
            raise UnavailableError(f"Buffer: {problem} before triton is imported")
        self.group, self.rank, self.group_size = group, self.comm.rank, self.comm.world_size
        self.num_nvl_bytes, self.num_rdma_bytes, self.low_latency_mode = num_nvl_bytes, num_rdma_bytes, low_latency_mode
        self._stream = torch.cuda.Stream(self.comm.device) if on_gpu else None

    def destroy(self) -> None:
        """Release the memory once this rank's calls have ended. Idempotent, and no collective."""
        self.comm.close()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the largest number of compute units of calls without a :class:`DeepEpConfig`, the same on all ranks."""
        DeepEpBuffer.num_sms = DeepEpConfig(new_num_sms).num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event after all work of the current stream, for ``previous_event``."""
        return EventOverlap(record_event())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> DeepEpConfig:
        """Return the settings of a dispatch or a combine that has none, for any number of ranks."""
        return DeepEpConfig(DeepEpBuffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of symmetric memory of low-latency calls in bfloat16 and in float8; nothing is for RDMA."""
        return num_ranks * num_max_dispatch_tokens_per_rank * (2 * hidden + row_widths(hidden)[1])

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: flags count calls, so that no call takes those of another one for its own."""

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        **others: object,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Count the tokens of this rank for each rank and each expert. Not a collective.

        Args:
            topk_idx: experts of each token, all different, [T, k], int64 or int32; -1 for none.
            num_experts: X, a multiple of N.
            previous_event: see the class.
            async_finish: see the class.
            others: see the class.

        Returns:
            Tokens for each rank, int32[N]; None; tokens for each expert, int32[X]; whether a token goes to a rank,
            bool[T, N]; the end of the call, with an event if the call is asynchronous.

        Raises:
            ValueError, TypeError: an argument is wrong.
        """
        name = "get_dispatch_layout"
        refuse_set(name, **others)
        topk_idx = self._check_experts(name, topk_idx, num_experts)
        layout, event = self._run(
            lambda: count_tokens(topk_idx, num_experts, self.group_size), (topk_idx,), async_finish, previous_event
        )
        return layout[0], None, *layout[1:], event

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: DispatchHandle | None = None,
        *,
        num_tokens_per_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: DeepEpConfig | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        **others: object,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]:
        """Send each token once to every rank that has one of its experts.

        Without a handle the host waits for the numbers of tokens. With one it does not, and a graph can capture the
        call.

        Args:
            x: tokens, [T, H], float32, float16 or bfloat16; or in float8 with H an even number, and their scales,
                float32 or int32[T, S].
            handle: handle of an earlier dispatch with the same experts; the next five are then left out.
            num_tokens_per_rank: result of :meth:`get_dispatch_layout`, as the next two.
            is_token_in_rank: see there.
            num_tokens_per_expert: see there.
            topk_idx: experts of each token, [T, k], int64 or int32; -1 for none.
            topk_weights: their gates, float32[T, k].
            expert_alignment: number to whose multiples the returned numbers are rounded up.
            config: settings; None for :attr:`num_sms`.
            previous_event: see the class.
            async_finish: see the class.
            others: see the class.

        Returns:
            Tokens that arrive, [R, H], in the order of ranks and tokens, or a pair with their scales, [R, S]; their
            experts among those of this rank, int64[R, k], -1 for those of other ranks; their gates, 0 for those;
            numbers of tokens of the experts of this rank; the handle; the end of the call. With ``handle`` all but the
            first and the last are None.

        Raises:
            ValueError, TypeError: an argument is wrong; nothing has been moved.
            UnavailableError: a call without a handle, or a new shape, inside of a capture.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        name, comm, n = "dispatch", self.comm, self.group_size
        with reporting_refusals(comm, name):
            refuse_set(name, **others)
            values, beside = self._check_tokens(name, x)
            (tokens, columns), dtype = values.shape, values.dtype
            units, layout = _units(name, config), (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
            if handle is None:
                counted, routed = self._check_layout(name, tokens, layout, topk_idx, topk_weights)
                if expert_alignment < 1:
                    raise ValueError(f"{name}: expert_alignment (value={expert_alignment}, allowed=1..)")
            else:
                check_kind(name, "handle", handle, DispatchHandle)
                refuse_set(name, topk_idx=topk_idx, topk_weights=topk_weights)
                if tokens != len(handle.returned):
                    raise ValueError(f"{name}: tokens of the handle (value={tokens}, allowed={len(handle.returned)})")
        alike = columns, dtype, units, [part.shape[1] for part in beside]

        def send(handle: DispatchHandle, more: list[Tensor]) -> tuple[Any, list[Tensor]]:
            found, words = send_tokens(comm, values.contiguous() if beside else values, beside + more, handle, units)
            return (found, words[0]) if beside else found, words[len(beside) :]

        if handle is not None:
            compare_shapes(comm, f"{name} by a handle", str(alike))
            given = handle
            (found, _), event = self._run(lambda: send(given, []), (x, handle), async_finish, previous_event)
            return found, None, None, None, None, event
        experts, k = len(counted[1]), routed[0].shape[1]
        compare_shapes(comm, name, str((*alike, experts, k)))

        def route() -> tuple[Any, Tensor, Tensor, list[int], DispatchHandle]:
            made, numbers = exchange_layout(comm, counted)
            found, (expert, gates) = send(made, [routed[0].int(), routed[1]])
            expert = expert.long() - self.rank * (experts // n)
            is_here = (expert >= 0) & (expert < experts // n)
            return found, torch.where(is_here, expert, -1), torch.where(is_here, gates, 0.0), numbers, made

        (found, expert, gates, numbers, made), event = self._run(
            route, (x, counted, routed), async_finish, previous_event
        )
        aligned = [-(-number // expert_alignment) * expert_alignment for number in numbers]
        return found, expert, gates, aligned, made, event

    def combine(
        self,
        x: Tensor,
        handle: DispatchHandle,
        topk_weights: Tensor | None = None,
        *,
        config: DeepEpConfig | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        **others: object,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Bring a row back for each token that arrived, and sum those of a token over the ranks.

        Args:
            x: rows in the order in which their tokens arrived, [R, H], float32, float16 or bfloat16.
            handle: handle of the dispatch.
            topk_weights: numbers that are summed in the same way, float32[R, k]; None for none.
            config: settings; None for :attr:`num_sms`.
            previous_event: see the class.
            async_finish: see the class.
            others: see the class.

        Returns:
            Sums, [T, H], float32 in the order of the other ranks and then this one, rounded once, zeros where a token
            went to no rank; sums of ``topk_weights``, [T, k], or None; the end of the call.

        Raises the same errors as :meth:`dispatch`.
        """
        name, comm = "combine", self.comm
        with reporting_refusals(comm, name):
            refuse_set(name, **others)
            check_kind(name, "handle", handle, DispatchHandle)
            units, parts = _units(name, config), [check_tensor(name, "x", x, comm.device, FLOATS, (2,))]
            if topk_weights is not None:
                parts.append(check_tensor(name, "topk_weights", topk_weights, comm.device, (torch.float32,), (2,)))
            if any(len(part) != handle.received for part in parts):
                text = f"value={[len(part) for part in parts]}, allowed={handle.received}"
                raise ValueError(f"{name}: rows of x and topk_weights ({text})")
        compare_shapes(comm, name, str((x.dtype, units, [part.shape[1] for part in parts])))

        sums, event = self._run(
            lambda: [bring_back(comm, in_rows(part), handle, units) for part in parts],
            *((parts, handle), async_finish, previous_event),
        )
        return sums[0], sums[1] if len(sums) > 1 else None, event

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool = True,
        async_finish: bool = False,
        **others: object,
    ) -> tuple[Any, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None]]:
        """Send tokens to the slots of their experts, without the host. The first call of a shape makes its resources,
        and a graph may capture later ones.

        Args:
            x: tokens, [T, H]; bfloat16, float16 or float32.
            topk_idx: experts of each token, all different, [T, k], int64 or int32; -1 for none.
            num_max_dispatch_tokens_per_rank: M, bound of T, the same on all ranks.
            num_experts: X, a multiple of N.
            use_fp8: send in float8_e4m3fn with a scale for each 128 elements, with H an even number.
            async_finish: see the class.
            others: see the class.

        Returns:
            Rows of each expert of this rank, [X / N, N * M, H], of which the first ones are set, or with ``use_fp8`` a
            pair with scales, float32[X / N, N * M, H / 128], whose columns are contiguous; numbers of rows that are
            set, int32[X / N]; the handle; the end of the call; the hook.

        Raises the same errors as :meth:`dispatch`.
        """
        name, comm, most = "low_latency_dispatch", self.comm, num_max_dispatch_tokens_per_rank
        with reporting_refusals(comm, name):
            refuse_set(name, **others)
            x = in_rows(check_tensor(name, "x", x, comm.device, FLOATS, (2,)))
            topk_idx = self._check_experts(name, topk_idx, num_experts)
            if not len(topk_idx) == len(x) <= most or most < 1:
                text = f"value={len(x)}, {len(topk_idx)}, allowed=0..{most}"
                raise ValueError(f"{name}: equal numbers of tokens of x and topk_idx ({text})")
            if use_fp8 and x.shape[1] % 2:
                raise ValueError(f"{name}: columns of x in float8 (value={x.shape[1]}, allowed=multiples of 2)")
        compare_shapes(comm, name, str((most, num_experts, use_fp8, x.dtype, x.shape[1], topk_idx.shape[1])))

        found, event = self._run(
            lambda: dispatch_to_slots(comm, x, topk_idx, most, num_experts // self.group_size, use_fp8),
            *((x, topk_idx), async_finish),
        )
        return *found, event, lambda: None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        *,
        async_finish: bool = False,
        out: Tensor | None = None,
        **others: object,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        """Return the sum of each token's results times their gates. Each rank first sums those of its own experts.

        Args:
            x: results in the slots of the dispatch, [X / N, N * M, H]; slots without a row are not read.
            topk_idx: the same as in the dispatch.
            topk_weights: gates, [T, k].
            handle: handle of the dispatch.
            out: tensor for the result, contiguous; None makes one.
            async_finish: see the class.
            others: see the class.

        Returns:
            Sums, [T, H], of x's dtype; float32 within a rank and between the ranks, rounded after both; the end of the
            call; the hook.

        Raises the same errors as :meth:`dispatch`.
        """
        name, comm = "low_latency_combine", self.comm
        with reporting_refusals(comm, name):
            refuse_set(name, **others)
            check_kind(name, "handle", handle, LowLatencyHandle)
            x = check_tensor(name, "x", x, comm.device, FLOATS, (3,)).contiguous()
            gates = check_tensor(name, "topk_weights", topk_weights, comm.device, FLOATS, (2,))
            (rows, k), most, (tokens, given) = handle.results.shape, handle.most_tokens, gates.shape
            if x.shape[:2] != (handle.experts, rows) or given != k or not tokens == len(topk_idx) <= most:
                text = f"value={tuple(x.shape)}, {tuple(gates.shape)}, {len(topk_idx)}, "
                text += f"allowed={(handle.experts, rows)}, (0..{most}, {k}), 0..{most}"
                raise ValueError(f"{name}: shapes of x and topk_weights, tokens of topk_idx ({text})")
            shape = tokens, x.shape[2]
            out = x.new_empty(shape) if out is None else check_tensor(name, "out", out, comm.device, (x.dtype,), (2,))
            if out.shape != shape or not out.is_contiguous():
                raise ValueError(f"{name}: shape of out (value={tuple(out.shape)}, allowed={shape}, contiguous)")
        compare_shapes(comm, name, str((most, handle.experts, x.dtype, x.shape[2], k)))
        found, event = self._run(
            lambda: combine_slots(comm, x.flatten(0, 1), gates, handle, out), (x, gates, out, handle), async_finish
        )
        return found, event, lambda: None

    def _check_experts(self, name: str, topk_idx: object, experts: int) -> Tensor:
        found = check_tensor(name, "topk_idx", topk_idx, self.comm.device, INDICES, (2,))
        if experts < 1 or experts % self.group_size:
            raise ValueError(f"{name}: num_experts (value={experts}, allowed=multiples of {self.group_size})")
        if not 1 <= found.shape[1] <= MOST_TERMS:
            raise ValueError(f"{name}: experts of a token (value={found.shape[1]}, allowed=1..{MOST_TERMS})")
        return found

    def _check_tokens(self, name: str, x: object) -> tuple[Tensor, list[Tensor]]:
        """Return tokens, and the scales beside them if there are any."""
        device = self.comm.device
        if not isinstance(x, tuple):
            return check_tensor(name, "x", x, device, FLOATS, (2,)), []
        values = check_tensor(name, "values of x", x[0], device, FLOAT8S, (2,))
        scales = check_tensor(name, "scales of x", x[-1], device, (torch.float32, torch.int32), (2,))
        if len(x) != 2 or len(scales) != len(values) or not scales.shape[1] or values.shape[1] % 2:
            problem = "shapes of values and scales, of which values have an even number of columns"
            text = f"value={tuple(values.shape)}, {tuple(scales.shape)}, allowed=[T, H], [T, S]"
            raise ValueError(f"{name}: {problem} ({text})")
        return values, [scales]

    def _check_layout(
        self, name: str, tokens: int, layout: tuple[object, ...], topk_idx: object, topk_weights: object
    ) -> tuple[TokenLayout, tuple[Tensor, Tensor]]:
        """Return the layout, and the experts of tokens with their gates."""
        (per_rank, per_expert, is_in_rank), device, n = layout, self.comm.device, self.group_size
        ranks = check_tensor(name, "num_tokens_per_rank", per_rank, device, INDICES, (1,))
        experts = check_tensor(name, "num_tokens_per_expert", per_expert, device, INDICES, (1,))
        mask = check_tensor(name, "is_token_in_rank", is_in_rank, device, (torch.bool,), (2,))
        chosen = self._check_experts(name, topk_idx, len(experts))
        gates = check_tensor(name, "topk_weights", topk_weights, device, (torch.float32,), (2,))
        shapes, k = [tuple(part.shape) for part in (ranks, mask, chosen, gates)], chosen.shape[1]
        if shapes != (allowed := [(n,), (tokens, n), (tokens, k), (tokens, k)]):
            what = "num_tokens_per_rank, is_token_in_rank, topk_idx and topk_weights"
            raise ValueError(f"{name}: shapes of {what} (value={shapes}, allowed={allowed})")
        return (ranks, experts, mask), (chosen, gates)

    def _run(
        self, run: Callable[[], Any], used: Sequence[object], is_async: bool, previous: EventOverlap | None = None
    ) -> tuple[Any, EventOverlap]:
        """Run a call on the current stream; or if it is asynchronous on the stream of this buffer, behind the event
        ``previous`` or the current stream, with the event of its end. ``used``: its tensors.
        """
        if self._stream is None or not is_async:
            if previous is not None:
                previous.current_stream_wait()
            return run(), EventOverlap()
        current = torch.cuda.current_stream(self.comm.device)
        if previous is None or previous.event is None:
            self._stream.wait_stream(current)
        else:
            self._stream.wait_event(previous.event)
        with torch.cuda.stream(self._stream):
            found = run()
        for stream, tensors in ((self._stream, used), (current, found)):
            for tensor in tree_leaves(tensors):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(stream)
        return found, EventOverlap(self._stream.record_event())


def _units(name: str, config: DeepEpConfig | None) -> int:
    """Return the largest number of compute units of a call. Raises TypeError."""
    if config is not None:
        check_kind(name, "config", config, DeepEpConfig)
    return DeepEpBuffer.num_sms if config is None else config.num_sms
