"""sequence_parallel_attention: attention over a sequence whose positions lie on several ranks (Ulysses); and reshard,
the exchange of sequence parallelism as a function with gradients. Both are whole under ``torch.compile``.

Equivalent: gather q, k and v of all positions, ``torch.nn.functional.scaled_dot_product_attention``, and keep the own
positions. Here every rank computes all positions of some heads (Jacobs et al., "DeepSpeed Ulysses", 2023)::

    [B, S / N, H, D]  --exchange of q, k and v-->  [B, S, H / N, D]  --attention, exchange-->  [B, S / N, H, D]

B: batch, S: positions of all ranks, N: ranks, H: heads of q, K: heads of k and v, D: size of a head.

A *group* is a head of k and v with the H / K heads of q that read it. The exchange moves groups, so that they stay
whole. Example of 3 ranks, H = 8 and K = 2: two groups do not go to three ranks, so each head of k and v is sent twice;
four groups of two heads go to the ranks as 2, 1 and 1.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional

from sidelane.errors import UnavailableError
from sidelane.ops import library
from sidelane.ops.handle import is_captured, reporting_refusals
from sidelane.session import Communicator

NAME = "sequence_parallel_attention"

_POSITIONS, _HEADS = 1, 2
"""Dimensions of q, k and v."""

_NOT_TAKEN = ("softcap", "sliding_window", "position_bias", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k")
"""Options of transformers' attention functions that ask for another attention."""


def sequence_parallel_attention(
    comm: Communicator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sequence_length: int | None = None,
) -> Tensor:
    """Return this rank's positions of the attention over the positions of all ranks. Collective.

    Two exchanges forward and two backward; q, k and v travel in one. It has gradients and is whole under
    ``torch.compile``, for which the communicator needs a number (``library.number_of(comm)``). The caller embeds
    positions (rotary, say) before, with the numbers that the positions have in the whole sequence: see
    :func:`sidelane.ops.sequence_positions`.

    Args:
        comm: communicator of the ranks.
        q: queries of this rank's positions, [B, S / N, H, D], of any dtype that the attention of PyTorch takes. H is N
            or more, a multiple of K, and need not be a multiple of N.
        k: keys, [B, S / N, K, D]. Where N does not divide K, heads of k and v are sent more than once if the rank with
            most heads of q has fewer of them then.
        v: values, [B, S / N, K, any size].
        is_causal: a position attends to itself and the ones before it only.
        scale: factor of the products; None for 1 / sqrt(D).
        dropout_p: probability of dropping a weight, drawn by each rank's own generator.
        sequence_length: S, split as ``torch.tensor_split`` does; None: all ranks have as many positions.

    Returns:
        Tensor [B, S / N, H, size of v's heads].

    Raises:
        ValueError: shapes do not fit; nothing has moved, and the peers raise PeerError with the reason.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with _reporting(comm, NAME):
        check_attention(comm, q, k, v, sequence_length)
        if scale is not None and not isinstance(scale, numbers.Real | torch.SymFloat | torch.SymInt):
            raise TypeError(f"{NAME}: scale (value={scale!r}, allowed=a number, or None)")
        if q.shape[_HEADS] < comm.world_size:
            raise ValueError(f"{NAME}: heads of q (value={q.shape[_HEADS]}, allowed={comm.world_size} and more)")
    n, positions, heads = comm.world_size, q.shape[_POSITIONS], q.shape[_HEADS]
    length = n * positions if sequence_length is None else sequence_length
    repeats = repeats_of(heads, k.shape[_HEADS], n)
    if repeats > 1:
        k, v = (tensor.repeat_interleave(repeats, _HEADS) for tensor in (k, v))
    number, groups = library.number_of(comm), k.shape[_HEADS]
    sharing = heads // groups
    given = [q.reshape(*q.shape[:_HEADS], groups, sharing * q.shape[-1]), k, v]
    there = torch.ops.sidelane.reshard(number, given, _HEADS, _POSITIONS, [length] * 3)
    queries = there[0].reshape(*there[0].shape[:_HEADS], sharing * there[0].shape[_HEADS], q.shape[-1])
    query, key, value = (tensor.transpose(_POSITIONS, _HEADS) for tensor in (queries, *there[1:]))
    found = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=sharing > 1
    )
    rows = found.transpose(_POSITIONS, _HEADS)
    rows = rows.reshape(*rows.shape[:_HEADS], rows.shape[_HEADS] // sharing, sharing * v.shape[-1])
    (back,) = torch.ops.sidelane.reshard(number, [rows], _POSITIONS, _HEADS, [groups])
    result: Tensor = back.reshape(*q.shape[:-1], v.shape[-1])
    return result


def register_attention(comm: Communicator, name: str = "sidelane", *, sequence_length: int | None = None) -> None:
    """Make attention over the positions of all ranks known to Hugging Face's transformers by a name.

    ::

        sidelane.ops.register_attention(comm)
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sidelane")
        own = sidelane.ops.sequence_positions(length, comm.world_size, comm.rank).to(ids.device)
        logits = model(ids[:, own], position_ids=own[None], use_cache=False).logits  # of this rank's positions

    The caller gives each rank its part of the tokens with their numbers in the whole sequence as ``position_ids``, and
    labels that were shifted before they were split. No mask and no cache: sequences of one length, in training or in a
    forward pass. A padding mask that leaves tokens out is a ValueError; its values are read, so that the host waits for
    the device. Where it is compiled or captured the device asserts instead that nothing is left out.

    Args:
        comm: communicator of the ranks, open for as long as the model is used.
        name: value of ``attn_implementation``.
        sequence_length: number of positions of all ranks where it is no multiple of N. A model's call may give it as
            well, as ``sequence_length=``.

    Raises:
        UnavailableError: transformers is older than 4.53, or not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UnavailableError(f"register_attention needs transformers, 4.53 or newer: {error}") from error

    library.number_of(comm)
    of_all = sequence_length

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sequence_length: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        asked = [(option, options.get(option)) for option in _NOT_TAKEN]
        refused = [option for option, value in asked if isinstance(value, Tensor) or value]  # whatever a tensor holds
        refused += ["a mask"] if attention_mask is not None else []
        if refused:
            error = ValueError(
                f"{NAME}: attention is causal or has no mask, and takes no such options (value={refused})"
            )
            if not torch.compiler.is_compiling():
                comm.refuse(NAME, error)
            raise error
        q, k, v = (tensor.transpose(_POSITIONS, _HEADS) for tensor in (query, key, value))
        given: dict[str, Any] = {
            "is_causal": getattr(module, "is_causal", True) if is_causal is None else is_causal,
            "scale": scaling,
            "sequence_length": of_all if sequence_length is None else sequence_length,
        }
        return sequence_parallel_attention(comm, q, k, v, dropout_p=dropout, **given), None

    def mask(*places: object, attention_mask: Tensor | None = None, **options: object) -> None:
        if attention_mask is None:
            return
        if torch.compiler.is_compiling() or is_captured(comm):
            torch._assert_async(attention_mask.all(), "attention over several ranks takes no padding mask")
        elif not bool(attention_mask.all()):
            error = ValueError(
                f"{name}: attention_mask (value={int((~attention_mask.bool()).sum())} positions left out, allowed=none)"
            )
            comm.refuse(name, error)
            raise error

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


def _reporting(comm: Communicator, name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if torch.compiler.is_compiling() else reporting_refusals(comm, name)


def sequence_positions(length: int, world_size: int, rank: int) -> Tensor:
    """Return the numbers of a rank's positions in the whole sequence, int64[positions], in ascending order.

    Args:
        length: number of positions of all ranks.
        world_size: number of ranks, N. They have parts as ``torch.tensor_split`` makes them.
        rank: number of the rank.

    >>> [sequence_positions(10, 3, rank).tolist() for rank in range(3)]
    [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"sequence_positions: rank (value={rank}, allowed=0..{world_size - 1})")
    return torch.arange(length).tensor_split(world_size)[rank]


def repeats_of(heads: int, kv_heads: int, world_size: int) -> int:
    """Return how often each head of k and v is sent: the fewest times with which the busiest rank has fewest heads.

    >>> [repeats_of(32, 8, n) for n in (2, 3, 8, 16)], repeats_of(8, 2, 3)
    ([1, 1, 1, 2], 2)
    """
    sharing = heads // kv_heads
    able = [each for each in range(1, sharing + 1) if sharing % each == 0 and kv_heads * each >= world_size]
    return min(able, key=lambda each: -(-kv_heads * each // world_size) * (sharing // each))


def check_attention(comm: Communicator, q: Tensor, k: Tensor, v: Tensor, length: int | None) -> None:
    """Refuse tensors that are no q, k and v of this rank's positions. Raises ValueError."""
    for what, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{NAME}: dimensions of {what} (value={tensor.dim()}, allowed=4: [B, S / N, H, D])")
        if not tensor.is_floating_point() or tensor.device != comm.device:
            given, allowed = f"{tensor.dtype} on {tensor.device}", f"a floating dtype on {comm.device}"
            raise ValueError(f"{NAME}: {what} (value={given}, allowed={allowed})")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{NAME}: dtype of {what} (value={tensor.dtype}, allowed={q.dtype}, q's)")
    batch, positions, heads, size = q.shape
    if k.shape[:2] != q.shape[:2] or v.shape[:3] != k.shape[:3] or k.shape[3] != size:
        raise ValueError(
            f"{NAME}: shapes of k and v (value={list(k.shape)}, {list(v.shape)}, "
            f"allowed=[{batch}, {positions}, K, {size}]); q has {list(q.shape)}"
        )
    if not heads:
        raise ValueError(f"{NAME}: heads of q (value=0, allowed=1 and more)")
    if not k.shape[2] or heads % k.shape[2]:
        raise ValueError(f"{NAME}: heads of k and v (value={k.shape[2]}, allowed=a divisor of q's {heads})")
    if length is not None:
        own = (length + comm.world_size - 1 - comm.rank) // comm.world_size
        if positions != own:
            raise ValueError(
                f"{NAME}: positions of rank {comm.rank} (value={positions}, allowed={own} of sequence_length={length})"
            )


@overload
def reshard(
    comm: Communicator, tensors: Tensor, *, scatter_dim: int, gather_dim: int, gather_length: int | None = None
) -> Tensor: ...
@overload
def reshard(
    comm: Communicator,
    tensors: Sequence[Tensor],
    *,
    scatter_dim: int,
    gather_dim: int,
    gather_length: int | None = None,
) -> list[Tensor]: ...
def reshard(
    comm: Communicator,
    tensors: Tensor | Sequence[Tensor],
    *,
    scatter_dim: int,
    gather_dim: int,
    gather_length: int | None = None,
) -> Tensor | list[Tensor]:
    """Return tensors that are split along ``scatter_dim``, put together along ``gather_dim``.

    See ``Communicator.all_to_all`` with these arguments; lengths are split as ``torch.tensor_split`` does. The gradient
    goes the way back, by one exchange for all tensors. Under ``torch.compile`` the communicator must have a number
    already, from an earlier call or from ``library.number_of(comm)``.

    Args:
        comm: communicator of the ranks.
        tensors: a tensor, or several (q, k and v) that have the same dimensions, of any dtypes.
        scatter_dim: dimension of which every rank gets a part.
        gather_dim: dimension of which every rank has a part.
        gather_length: its length in the result; None: all ranks have parts of one length.

    Returns:
        New tensors, as many as were given.

    Raises:
        ValueError: dimensions do not fit; nothing has moved, and the peers raise PeerError with the reason.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    dims = given[0].dim() if given else 0
    with _reporting(comm, "reshard"):
        _check_dims(given, dims, scatter_dim, gather_dim, gather_length)
    scatter, gather = (dim % max(1, dims) for dim in (scatter_dim, gather_dim))
    n = comm.world_size
    lengths = [n * tensor.shape[gather] if gather_length is None else gather_length for tensor in given]
    found: list[Tensor] = torch.ops.sidelane.reshard(library.number_of(comm), given, scatter, gather, lengths)
    return found[0] if isinstance(tensors, Tensor) else found


def _check_dims(given: list[Tensor], dims: int, scatter_dim: int, gather_dim: int, gather_length: int | None) -> None:
    if any(tensor.dim() != dims for tensor in given):
        shapes = [list(tensor.shape) for tensor in given]
        raise ValueError(f"reshard: tensors must have the same number of dimensions (value={shapes})")
    for name, dim in (("scatter_dim", scatter_dim), ("gather_dim", gather_dim)):
        if given and not -dims <= dim < dims:
            raise ValueError(f"reshard: {name} (value={dim}, allowed={-dims}..{dims - 1})")
    if gather_length is not None and gather_length < 0:
        raise ValueError(f"reshard: gather_length (value={gather_length}, allowed=0 and more)")
