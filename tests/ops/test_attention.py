"""Attention over sequences whose positions lie on several ranks, by CPU ranks and on GPUs, against one rank's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from on_ranks import on_ranks
from sweeps import communicator
from torch import Tensor

from sidelane import Communicator, ops
from sidelane.errors import MismatchError, PeerError
from sidelane.ops import library, register_attention, sequence_parallel_attention, sequence_positions
from sidelane.ops.attention import repeats_of

pytest.importorskip("triton")

TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest norm of a difference of a rank over the norm of what is right on all, by dtype."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attention of all ranks: batch, positions, heads of q, heads of k and v, and their size."""

    batch: int
    positions: int
    heads: int
    kv_heads: int
    size: int
    is_causal: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32

    def whole(self, seed: int) -> list[Tensor]:
        """q, k, v of all positions, and the gradient of the result, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        counts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        drawn = [
            torch.randn(self.batch, self.positions, count, self.size, generator=generator, device="cpu")
            for count in counts
        ]
        return [tensor.to(self.dtype).to(torch.get_default_device()) for tensor in drawn]

    def right(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The result, and the gradients of q, k and v, in float64 on one rank."""
        *inputs, grad = (tensor.double() for tensor in given)
        q, k, v = (tensor.requires_grad_() for tensor in inputs)
        sharing = self.heads // self.kv_heads
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        key, value = (tensor.repeat_interleave(sharing, 1) for tensor in (key, value))
        products = query @ key.transpose(-1, -2) * (self.size**-0.5 if self.scale is None else self.scale)
        if self.is_causal:
            later = torch.ones(self.positions, self.positions, dtype=torch.bool).triu(1)
            products = products.masked_fill(later, -torch.inf)
        result = (products.softmax(-1) @ value).transpose(1, 2)
        return [result.detach(), *torch.autograd.grad(result, (q, k, v), grad)]


def is_close(found: Tensor, right: Tensor, own: Tensor) -> bool:
    """Compare a rank's positions with those of the whole, whose norm counts: some positions have gradients of zero."""
    norm = torch.linalg.vector_norm
    return bool(norm(found.double() - right[:, own]) <= TOLERANCES[found.dtype] * norm(right))


Attend = Callable[..., Tensor]


def check(
    comm: Communicator, attend: Attend, shape: Shape, seed: int, is_strided: bool = False, **options: Any
) -> None:
    """Compare a rank's part of the result and of the gradients with the whole attention."""
    whole = shape.whole(seed)
    own = sequence_positions(shape.positions, comm.world_size, comm.rank)
    q, k, v, grad = (tensor[:, own].contiguous() for tensor in whole)
    if is_strided:
        q, k, v, grad = (tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (q, k, v, grad))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    found = attend(
        comm, q, k, v, is_causal=shape.is_causal, scale=shape.scale, sequence_length=shape.positions, **options
    )
    found.backward(grad)
    names = "result", "q", "k", "v"
    results = found.detach(), q.grad, k.grad, v.grad
    for name, result, right in zip(names, results, shape.right(whole), strict=True):
        assert result.dtype == shape.dtype, name
        assert is_close(result, right, own), (name, shape, comm.rank)


ULYSSES = (
    Shape(2, 8, 4, 4, 16),
    Shape(1, 13, 5, 5, 8, is_causal=True),
    Shape(2, 9, 8, 4, 8, is_causal=True, scale=0.3),
    Shape(1, 17, 12, 2, 8),  # k and v are sent several times
    Shape(1, 11, 6, 3, 4, is_causal=True, dtype=torch.float64),
    Shape(2, 16, 8, 8, 16, is_causal=True, dtype=torch.bfloat16),
    Shape(1, 3, 8, 4, 8, is_causal=True),  # some ranks have no positions
)


@on_ranks(1, long(2), long(3), 4, compiled=False)
@on_ranks(long(2), compiled=True)
@on_ranks(gpu=True, compiled=False, timeout_s=170)
@on_ranks(gpu=True, compiled=True, timeout_s=170)
def test_ulysses(group: dist.ProcessGroup, compiled: bool) -> None:
    """Shapes one after the other, three times each, with other numbers."""
    run = sequence_parallel_attention
    with communicator(group) as comm:
        library.number_of(comm)
        for number, shape in enumerate(ULYSSES[:: 3 if compiled else 1]):
            torch._dynamo.reset()
            attend = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
            for turn in range(3):
                check(comm, attend, shape, 10 * number + turn, is_strided=turn == 1)


@on_ranks(2)
def test_compiled_code_takes_any_length(group: dist.ProcessGroup) -> None:
    """Compiled code is made for two lengths at most, then for any, whatever else the communicator keeps meanwhile."""
    from torch._dynamo.utils import counters

    with communicator(group) as comm:
        library.number_of(comm)
        torch._dynamo.reset()
        before = counters["stats"]["unique_graphs"]
        compiled = torch.compile(sequence_parallel_attention, backend="aot_eager", fullgraph=True)
        for seed, positions in enumerate((8, 11, 14, 23, 38)):
            check(comm, compiled, Shape(1, positions, 4, 2, 8, is_causal=True), seed)
            comm.cache[seed] = None
        assert counters["stats"]["unique_graphs"] - before <= 3


@on_ranks(3, gpu=True)
def test_parts_of_one_length(group: dist.ProcessGroup) -> None:
    """Without a length all ranks have as many positions; values may have heads of another size, and no gradients."""
    with communicator(group) as comm, torch.no_grad():
        shape = Shape(2, 3 * comm.world_size, 8, 4, 8)
        whole = shape.whole(1)[:3]
        whole[2] = whole[2][..., :6]
        own = [tensor.tensor_split(comm.world_size, 1)[comm.rank] for tensor in whole]
        found = sequence_parallel_attention(comm, *own)
        query, key, value = (tensor.transpose(1, 2) for tensor in whole)
        right = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(found, right.tensor_split(comm.world_size, 1)[comm.rank])


@on_ranks(2, gpu=True)
def test_what_is_refused_on_one_rank_is_told_to_the_others(group: dist.ProcessGroup) -> None:
    """Mistakes of the last rank alone are told to the others; then a call goes well."""
    texts = []
    with communicator(group) as comm:
        q, k = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8)
        few = torch.randn(1, 3, 1, 8)
        wrong: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
            ((q[0], k, k), {}),
            ((q, k.double(), k), {}),
            ((q, k[:, :2], k), {}),
            ((q, q[:, :, :3], q[:, :, :3]), {}),
            ((q, k, k), {"sequence_length": 3 * comm.world_size + 4}),
            ((q, k, k), {"scale": "half"}),
            ((few, few, few), {}),
        ]
        for tensors, options in wrong:
            is_wrong = comm.rank == comm.world_size - 1
            with pytest.raises((ValueError, TypeError, PeerError, MismatchError)) as caught:
                sequence_parallel_attention(
                    comm, *(tensors if is_wrong else (q, k, k)), **(options if is_wrong else {})
                )
            texts.append(str(caught.value))
        assert sequence_parallel_attention(comm, q, k, k).shape == q.shape
    words = (
        "dimensions of q (value=3, allowed=4",
        "dtype of k (value=torch.float64, allowed=torch.float32",
        "shapes of k and v (value=[1, 2, 2, 8], [1, 3, 2, 8], allowed=[1, 3, K, 8]",
        "heads of k and v (value=3, allowed=a divisor of q's 4)",
        f"positions of rank {comm.world_size - 1} (value=3, allowed=",
        "scale (value='half'",
        "heads of q (value=1, allowed=",
    )
    assert len(texts) == len(words)
    assert all(word in text for text, word in zip(texts, words, strict=True)), texts


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@on_ranks(2, length=9)
@on_ranks(long(3), length=10)
@on_ranks(gpu=True, length=13)
def test_a_model_of_transformers(group: dist.ProcessGroup, length: int) -> None:
    """A Llama of transformers whose ranks have parts of the tokens: equal logits and gradients to a whole one's."""
    import transformers

    with communicator(group) as comm:
        register_attention(comm, sequence_length=length)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        models = []
        for implementation in ("eager", "sidelane"):
            torch.manual_seed(3)
            models.append(
                transformers.LlamaForCausalLM._from_config(copy.copy(config), attn_implementation=implementation)
            )
        whole, split = models
        ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(4), device="cpu")
        ids = ids.to(torch.get_default_device())
        own = sequence_positions(length, comm.world_size, comm.rank)
        right = whole(ids, use_cache=False).logits
        found = split(ids[:, own], position_ids=own[None].expand(2, -1), use_cache=False).logits
        torch.testing.assert_close(found, right[:, own], atol=1e-4, rtol=1e-4)
        right.square().sum().backward()
        found.square().sum().backward()
        for (name, parameter), other in zip(whole.named_parameters(), split.parameters(), strict=True):
            total = other.grad.clone()
            comm.all_reduce(total)
            torch.testing.assert_close(
                total, parameter.grad, atol=1e-3, rtol=1e-3, msg=lambda text, name=name: name + text
            )
        mask = torch.ones(2, len(own), dtype=torch.int64)
        asked: dict[str, Any] = {"position_ids": own[None].expand(2, -1), "use_cache": False, "attention_mask": mask}
        with torch.no_grad():
            torch.testing.assert_close(split(ids[:, own], **asked).logits, found)
            is_last = comm.rank == comm.world_size - 1
            mask[1, -1] = 0 if is_last else 1
            with pytest.raises(
                ValueError if is_last else PeerError, match="attention_mask .value=1 positions left out"
            ):
                split(ids[:, own], **asked)
                comm.synchronize()


SHAPES = (
    Shape(1, 4096, 8, 2, 128, is_causal=True, dtype=torch.bfloat16),
    Shape(2, 1021, 8, 8, 64, is_causal=True, dtype=torch.float16),
    Shape(1, 2048, 8, 8, 128, dtype=torch.bfloat16),
)


@on_ranks(gpu=True, replays=4, timeout_s=170)
def test_forward_and_backward_in_graphs(group: dist.ProcessGroup, replays: int) -> None:
    """Forward and backward eager, captured and replayed, with fresh numbers each time."""
    with communicator(group) as comm:
        for shape in SHAPES:
            own = ops.sequence_positions(shape.positions, comm.world_size, comm.rank)
            q, k, v, grad = (tensor[:, own].clone() for tensor in shape.whole(0))
            for tensor in (q, k, v):
                tensor.requires_grad_()
            step = functools.partial(_step, comm, shape, q, k, v, grad)
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                results = step()
            for turn in range(replays):
                whole = shape.whole(turn + 1)
                with torch.no_grad():
                    for tensor, part in zip((q, k, v, grad), whole, strict=True):
                        tensor.copy_(part[:, own])
                if turn % 2:
                    found = step()
                else:
                    graph.replay()
                    found = results
                for name, one, right in zip(("result", *"qkv"), found, shape.right(whole), strict=True):
                    assert is_close(one, right, own), (shape, name, turn)


def _step(
    comm: Communicator,
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the result, and the gradients of q, k and v."""
    options: dict[str, Any] = {"is_causal": shape.is_causal, "sequence_length": shape.positions}
    found = ops.sequence_parallel_attention(comm, q, k, v, **options)
    return [found.detach(), *torch.autograd.grad(found, (q, k, v), grad)]


def test_every_position_belongs_to_one_rank() -> None:
    for length, n in ((0, 2), (13, 4), (3, 4), (64, 8)):
        parts = [sequence_positions(length, n, rank).tolist() for rank in range(n)]
        assert list(itertools.chain(*parts)) == list(range(length))


@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(40, 40, 3), (32, 8, 3), (8, 2, 5), (12, 1, 8), (40, 10, 4)])
def test_the_busiest_rank_has_the_fewest_heads(heads: int, kv_heads: int, n: int) -> None:
    most = {
        repeats: -(-kv_heads * repeats // n) * (heads // kv_heads // repeats)
        for repeats in range(1, heads // kv_heads + 1)
        if heads // kv_heads % repeats == 0 and kv_heads * repeats >= n
    }
    assert repeats_of(heads, kv_heads, n) == min(most, key=lambda repeats: (most[repeats], repeats))
