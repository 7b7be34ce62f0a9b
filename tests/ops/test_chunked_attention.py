"""Attention over split sequences in chunks of heads: the same bits as without chunks, forward and backward."""

from __future__ import annotations

import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import long
from on_ranks import on_ranks
from sweeps import communicator
from torch import Tensor

from sidelane import Communicator, ops
from sidelane.choice.fused import FusedTime
from sidelane.errors import MismatchError, PeerError
from sidelane.ops import attention
from sidelane.ops.chunked_attention import head_chunks
from sidelane.ops.operator import tables_of
from sidelane.program.resharding import even_parts

pytest.importorskip("triton")

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def drawn(comm: Communicator, seed: int, batch: int, length: int, heads: tuple[int, int], size: int, dtype: Any) -> Any:
    """q, k, v and the gradient of the result, of this rank's positions."""
    generator = torch.Generator().manual_seed(100 * seed + comm.rank)
    own = even_parts(length, comm.world_size)[comm.rank]
    counts = heads[0], heads[1], heads[1], heads[0]
    found = [torch.randn(batch, own, count, size, generator=generator, device="cpu") for count in counts]
    return [tensor.to(dtype).to(comm.device) for tensor in found]


def step(comm: Communicator, given: Any, needs: tuple[bool, ...] = (True,) * 3, **options: Any) -> list[Tensor]:
    """The result, and the gradients of those of q, k and v that need them."""
    *inputs, grad = (tensor.detach().clone() for tensor in given)
    for tensor, needed in zip(inputs, needs, strict=True):
        tensor.requires_grad_(needed)
    result = ops.sequence_parallel_attention(comm, *inputs, **options)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return [result.detach(), *(torch.autograd.grad(result, wanted, grad) if wanted else ())]


def same(found: list[Tensor], right: list[Tensor], where: object, *, exact: bool = False) -> None:
    """Compare bit for bit, or closely: PyTorch's attention differs in the last place with the heads of a call."""
    assert len(found) == len(right)
    for number, (one, other) in enumerate(zip(found, right, strict=True)):
        if exact:
            assert torch.equal(one, other), (where, number, (one - other).abs().max())
        else:
            norm, most = torch.linalg.vector_norm(other.double()), {2: 1e-2, 4: 1e-5, 8: 1e-13}[one.itemsize]
            assert torch.linalg.vector_norm((one - other).double()) <= most * norm + 1e-9, (where, number)


def mixed(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """In place of attention: products of other positions, whose gradients are exact, head by head."""
    sharing, size = query.shape[1] // key.shape[1], value.shape[-1]
    key, value = (tensor.repeat_interleave(sharing, 1).flip(2) for tensor in (key, value))
    return query[..., :size] * key[..., :size] + value * 2


@on_ranks(2, long(3), 4, long(8), calls=16)
@on_ranks(gpu=True, calls=40, timeout_s=170)
def test_the_same_bits_as_without_chunks(group: dist.ProcessGroup, calls: int) -> None:
    """Random shapes back to back: groups of heads that ranks do not divide, uneven positions, values of other sizes."""
    with communicator(group) as comm:
        draw, n = random.Random(comm.world_size), comm.world_size
        for call in range(calls):
            sharing, groups = draw.choice((1, 1, 2)), 2 * n + draw.choice((0, 1, n))
            shape = (
                draw.choice((1, 2)),
                2 * n + draw.choice((0, 1, 5, 30)),
                (sharing * groups, groups),
                draw.choice((4, 8)),
            )
            given = drawn(comm, call, *shape, draw.choice(DTYPES))
            if draw.random() < 0.3:
                given[2] = given[2][..., :3].contiguous()
                given[3] = given[3][..., :3].contiguous()
            needs = draw.choice(((True,) * 3, (True,) * 3, (False,) * 3, (False, True, False)))
            options = {"is_causal": draw.random() < 0.5, "sequence_length": shape[1]}
            count, exact = draw.randint(2, groups // n), draw.random() < 0.6
            with pytest.MonkeyPatch.context() as patch:
                if exact:
                    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", mixed)
                right = step(comm, given, needs, chunks=1, **options)
                found = step(comm, given, needs, chunks=count, **options)
            same(found, right, (shape, given[0].dtype, needs, options, count), exact=exact)


@on_ranks(1, 2, gpu=True)
def test_layers_of_one_shape(group: dist.ProcessGroup) -> None:
    """Layers in a row keep what their backward passes need, whose places others have used; strided inputs."""
    with communicator(group) as comm:
        n = comm.world_size
        q, k, v, grad = drawn(comm, 3, 2, 5 * n, (4 * n, 2 * n), 8, torch.float32)
        found = []
        for chunks in (1, 2):
            inputs = [tensor.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for tensor in (q, k, v)]
            x = inputs[0]
            for _ in range(3):
                x = x + ops.sequence_parallel_attention(comm, x, *inputs[1:], is_causal=True, chunks=min(chunks, 2))
            x.backward(grad, retain_graph=True)
            x.backward(grad)
            found.append([x.detach(), *(tensor.grad for tensor in inputs)])
        same(found[1], found[0], "three layers")


@on_ranks(gpu=True, replays=6, timeout_s=170)
def test_chunks_in_graphs(group: dist.ProcessGroup, replays: int) -> None:
    """Forward and backward captured and replayed with new numbers, and eager calls between replays."""
    with communicator(group) as comm:
        n = comm.world_size
        draw = functools.partial(
            drawn, comm, batch=1, length=512 * n, heads=(8 * n, 4 * n), size=128, dtype=torch.bfloat16
        )
        given = draw(0)
        inputs = [tensor.clone().requires_grad_() for tensor in given[:3]]

        def run(chunks: int) -> list[Tensor]:
            result = ops.sequence_parallel_attention(comm, *inputs, is_causal=True, chunks=chunks)
            return [result.detach(), *torch.autograd.grad(result, inputs, given[3])]

        run(2), run(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = run(2)
        for turn in range(replays):
            with torch.no_grad():
                for place, tensor in zip((*inputs, given[3]), draw(turn + 1), strict=True):
                    place.copy_(tensor)
            if turn % 3 < 2:
                graph.replay()
                found = captured
            else:
                found = run(2)
            same([tensor.clone() for tensor in found], run(1), turn)


@on_ranks(2)
def test_a_checkpoint_computes_again_in_the_backward_pass(group: dist.ProcessGroup) -> None:
    from torch.utils.checkpoint import checkpoint

    with communicator(group) as comm:
        q, k, v, grad = drawn(comm, 4, 1, 8, (4, 4), 8, torch.float32)
        found = []
        for chunks in (1, 2):
            x = q.clone().requires_grad_()

            def layer(x: Tensor, chunks: int = chunks) -> Tensor:
                return x + ops.sequence_parallel_attention(comm, x, k, v, chunks=chunks)

            for _ in range(2):
                y = x
                for _ in range(2):
                    y = checkpoint(layer, y, use_reentrant=False)
                y.backward(grad)
            found.append([y.detach(), x.grad])
        same(found[1], found[0], "checkpoints")


@on_ranks(2)
def test_auto_takes_what_was_measured(group: dist.ProcessGroup) -> None:
    """One chunk without a measurement; as many as were fastest at a shape like this one; never more than there are."""
    with communicator(group) as comm:
        given = drawn(comm, 5, 1, 12, (4, 4), 8, torch.float32)
        made = attention.attend_in_chunks
        with mock.patch.object(attention, "attend_in_chunks", side_effect=made) as called:
            right = step(comm, given)
            called.assert_not_called()
            name = "sequence_parallel_attention, gradients"
            times = {"unfused": 9.0, "split/2": 8.0, "split/9": 7.0}
            comm.cache[tables_of] = {"a test": (FusedTime(name, 2, False, (1, 12, 4, 4, 8), 4, times),)}
            for key in [key for key in comm.cache if isinstance(key, tuple) and key[0] == attention.NAME]:
                del comm.cache[key]
            same(step(comm, given), right, "measured")
            with torch.no_grad():
                ops.sequence_parallel_attention(comm, *given[:3])  # nothing was measured without gradients
            assert [call.args[1] for call in called.call_args_list] == [2]


@on_ranks(2)
def test_what_is_refused_on_one_rank_is_told_to_the_others(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        given = drawn(comm, 6, 1, 8, (5, 5), 8, torch.float32)
        for wrong in (0, 3, True, "many", 1.5):
            is_wrong = comm.rank == 1
            with pytest.raises((ValueError, PeerError, MismatchError)) as caught:
                step(comm, given, chunks=wrong if is_wrong else 2)
                comm.synchronize()
            assert "chunks of the 2 heads of k and v of a rank (value=" in str(caught.value)
            assert "allowed=auto, 1..2)" in str(caught.value)
        with pytest.raises(RuntimeError, match="once_differentiable|differentiated twice|twice"):
            inputs = [tensor.clone().requires_grad_() for tensor in given[:3]]
            result = ops.sequence_parallel_attention(comm, *inputs, chunks=2)
            (first,) = torch.autograd.grad(result.sum(), inputs[:1], create_graph=True)
            first.sum().backward()


@on_ranks(2, 3)
def test_exchanges_of_slices(group: dist.ProcessGroup) -> None:
    """An input that is a slice of the scattered dimension, and an output of the gathered one, in both directions."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        batch, length, groups, width = 2, 2 * n + 1, 9, 3
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(batch, length, groups, width, generator=generator)
        own = whole.tensor_split(n, 1)[rank].contiguous()
        for chunk in (slice(0, n), slice(2, 9), slice(5, 9)):
            right = whole[:, :, chunk].tensor_split(n, 2)[rank]
            came = torch.empty(right.shape)
            comm.all_to_all(came, own[:, :, chunk], scatter_dim=2, gather_dim=1)
            assert torch.equal(came, right)
            back = torch.zeros_like(own)
            comm.all_to_all([back[:, :, chunk]], [came], scatter_dim=1, gather_dim=2)
            assert torch.equal(back[:, :, chunk], own[:, :, chunk])
            left = [*range(chunk.start), *range(chunk.stop, groups)]
            assert not back[:, :, left].any()
        with pytest.raises(ValueError, match="must be contiguous"):
            strided = own.transpose(2, 3).contiguous().transpose(2, 3)
            comm.all_to_all(torch.empty(whole.tensor_split(n, 2)[rank].shape), strided, scatter_dim=2, gather_dim=1)


def test_a_rank_has_as_many_groups_as_without_chunks() -> None:
    for groups, n, count in ((20, 2, 4), (11, 2, 3), (17, 4, 4), (9, 8, 1), (40, 3, 13)):
        chunks = head_chunks(groups, n, count)
        assert [chunks[0].start, chunks[-1].stop] == [0, groups] and len(chunks) == count
        parts = [even_parts(chunk.stop - chunk.start, n) for chunk in chunks]
        assert all(min(part) for part in parts)
        assert tuple(map(sum, zip(*parts, strict=True))) == even_parts(groups, n)
