"""Attention over sequences whose positions lie on several ranks, between real processes, against one rank's."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import types
from typing import Any

import attention_cases
import pytest
import torch
from marks import long
from ranks import RankPool
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from sidelane.errors import ProgramError
from sidelane.ops import ring, sequence_positions
from sidelane.ops.attention import repeats_of
from sidelane.ops.ring import part_of
from sidelane.program.ir import Program, Queue, Wait
from sidelane.program.rotation import rotation_program
from sidelane.program.transform import freeze
from sidelane.program.verify import verify

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


@pytest.mark.parametrize("n", [1, long(2), long(3), 4])
def test_ulysses(pool: RankPool, n: int) -> None:
    pool.run(attention_cases.ulysses, n, False)


@pytest.mark.long
def test_ulysses_compiled(pool: RankPool) -> None:
    pool.run(attention_cases.ulysses, 2, True)


@pytest.mark.parametrize("n", [1, long(2), 3, long(4)])
def test_ring(pool: RankPool, n: int) -> None:
    pool.run(attention_cases.ring, n, False)


@pytest.mark.parametrize("both_change", [False, True])
def test_ranks_with_different_known_shapes_are_told(pool: RankPool, both_change: bool) -> None:
    texts = pool.run(attention_cases.shapes_that_differ, 3, both_change)
    assert all("ranks made different calls" in text and "length=18" in text for text in texts), texts
    kinds = {text.partition(":")[0] for text in texts}
    assert kinds == ({"MismatchError"} if both_change else {"MismatchError", "PeerError"})


def test_rings_of_many_shapes_hold_memory_of_a_few(pool: RankPool) -> None:
    pool.run(attention_cases.many_shapes, 2, 20)


@pytest.mark.parametrize("name", ["sequence_parallel_attention", "ring_attention"])
def test_compiled_code_takes_any_length(pool: RankPool, name: str) -> None:
    pool.run(attention_cases.lengths_that_change, 2, name, 3)


@pytest.mark.long
def test_ring_compiled(pool: RankPool) -> None:
    pool.run(attention_cases.ring, 2, True)


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_kernels_of_gpus_are_given_what_they_take(monkeypatch: pytest.MonkeyPatch, kernel: SDPBackend) -> None:
    monkeypatch.setattr(ring, "kernel_for", lambda *_: SDPBackend(kernel.value))  # another object of the same value
    is_cudnn = kernel == SDPBackend.CUDNN_ATTENTION
    heads = 8 if is_cudnn else 2  # torch's shapes for cuDNN know no shared heads
    with torch.device("meta"), Operations() as operations:
        query, grad = torch.empty(2, 2, 8, 5, 16, dtype=torch.bfloat16)
        key, value = torch.empty(2, 2, heads, 7, 16, dtype=torch.bfloat16)
        result, logarithms = ring.attend(query, key, value, False, 0.25)
        assert result.shape == query.shape and logarithms.shape == (2, 8, 5)
        found = ring.gradients(grad, query, result, logarithms, key, value, is_causal=False, scale=0.25)
    assert [one.shape for one in found] == [query.shape, key.shape, value.shape]
    name = f"_scaled_dot_product_{'cudnn' if is_cudnn else 'flash'}_attention"
    assert {name, f"{name}_backward"} <= operations.names


class Operations(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("size", "chosen", "kernel"),
    [
        (128, SDPBackend.CUDNN_ATTENTION, SDPBackend.CUDNN_ATTENTION),
        (136, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
        (128, SDPBackend.FLASH_ATTENTION, SDPBackend.FLASH_ATTENTION),
        (128, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION),
        (12, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    ],
    ids=str,
)
def test_blocks_on_gpus_are_computed_by_what_pytorch_would_choose(
    monkeypatch: pytest.MonkeyPatch, size: int, chosen: SDPBackend, kernel: SDPBackend
) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: chosen.value)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    tensor: Any = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 2, 5, size))
    assert ring.kernel_for(tensor, tensor, tensor, False, 1.0) == kernel


@pytest.mark.parametrize("turn", [1, 2, -1])
@pytest.mark.parametrize("coming", [(8, 8, 8), (0, 24, 8), (0, 0, 0)])
def test_a_rotation_is_proved(turn: int, coming: tuple[int, ...]) -> None:
    program = rotation_program(turn, coming, 32)
    verify(program)
    verify(freeze(program))
    assert not any(coming) or not set(without_waits(program).queues) & set(program.queues)


def test_a_rotation_into_an_inbox_that_is_read_is_refused() -> None:
    with pytest.raises(ProgramError, match="race on came"):
        verify(without_waits(rotation_program(1, (8, 8, 8), 32)))


def without_waits(program: Program) -> Program:
    """The program of ranks that wait for nothing but the end of what comes."""
    queues = []
    for queue in program.queues:
        first = next((command for command in queue.commands if isinstance(command, Wait)), None)
        queues.append(Queue(queue.rank, queue.engine, tuple(one for one in queue.commands if one is not first)))
    return dataclasses.replace(program, queues=tuple(queues))


@pytest.mark.parametrize("order", ["plain", "zigzag"])
@pytest.mark.parametrize(("length", "n"), [(16, 4), (13, 3), (3, 4), (0, 2)])
def test_parts_are_the_pairs_that_the_mask_leaves(order: str, length: int, n: int) -> None:
    positions = [sequence_positions(length, n, rank, order=order).tolist() for rank in range(n)]
    for rank, source in itertools.product(range(n), repeat=2):
        part = part_of(order, True, length, n, rank, source)
        found = {
            (query, key)
            for at, query in enumerate(positions[rank])
            for place, key in enumerate(positions[source][: part.count])
            if at >= part.first and (place <= at or not part.is_causal)
        }
        assert found == {(query, key) for query in positions[rank] for key in positions[source] if key <= query}


def test_parts_of_one_length(pool: RankPool) -> None:
    pool.run(attention_cases.even_parts, 3)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("n", "length", "ring_order"), [(2, 8, None), long(3, 10, None), (2, 9, "zigzag")])
def test_a_model_of_transformers(pool: RankPool, n: int, length: int, ring_order: str | None) -> None:
    pool.run(attention_cases.in_a_model, n, length, ring_order)


REFUSALS = (
    "dimensions of q (value=3, allowed=4",
    "dtype of k (value=torch.float64, allowed=torch.float32",
    "shapes of k and v (value=[1, 2, 2, 8], [1, 3, 2, 8], allowed=[1, 3, K, 8]",
    "heads of k and v (value=3, allowed=a divisor of q's 4)",
)


@pytest.mark.parametrize(
    ("attend", "last"),
    [
        ("sequence_parallel_attention", "heads of q (value=1, allowed=2 and more)"),
        ("ring_attention", "order (value='spiral', allowed=plain, zigzag)"),
    ],
)
def test_what_is_refused_on_one_rank_is_told_to_the_others(pool: RankPool, attend: str, last: str) -> None:
    words = (*REFUSALS, "positions of rank 1 (value=3, allowed=5 of sequence_length=10 in", "scale (value='half'", last)
    for texts in pool.run(attention_cases.refused, 2, attend):
        for text, word in zip(texts, words, strict=True):
            assert word in text


def test_every_position_belongs_to_one_rank() -> None:
    for length, n, order in ((0, 2, "plain"), (13, 4, "plain"), (13, 4, "zigzag"), (3, 4, "zigzag"), (64, 8, "zigzag")):
        parts = [sequence_positions(length, n, rank, order=order).tolist() for rank in range(n)]
        assert sorted(itertools.chain(*parts)) == list(range(length))
        assert all(part == sorted(part) for part in parts)
    with pytest.raises(ValueError, match=r"order \(value='spiral', allowed=plain, zigzag\)"):
        sequence_positions(4, 2, 0, order="spiral")


@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(40, 40, 3), (32, 8, 3), (8, 2, 5), (12, 1, 8), (40, 10, 4)])
def test_the_busiest_rank_has_the_fewest_heads(heads: int, kv_heads: int, n: int) -> None:
    most = {
        repeats: -(-kv_heads * repeats // n) * (heads // kv_heads // repeats)
        for repeats in range(1, heads // kv_heads + 1)
        if heads // kv_heads % repeats == 0 and kv_heads * repeats >= n
    }
    assert repeats_of(heads, kv_heads, n) == min(most, key=lambda repeats: (most[repeats], repeats))
