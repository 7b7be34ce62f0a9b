"""Cases of fused operators among virtual nodes; see ``fused_ops``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from fused_embeddings import autograd, check_gradients, pool
from fused_ops import DTYPES, Draws, check_close
from ranks import shared_memory

from sidelane import Config
from sidelane.errors import MismatchError, PeerError, UnavailableError
from sidelane.integrations.nodes.scale_out import scale_out
from sidelane.ops import EmbeddingBagAllToAll
from sidelane.ops.scale_out import ScaleOut, embedding_all_to_all, embedding_all_to_all_backward, words


@contextlib.contextmanager
def on_nodes(
    group: dist.ProcessGroup,
    layout: Sequence[int],
    *,
    timeout_s: float = 60,
) -> Iterator[ScaleOut]:
    """Ranks of a group that stand where ``layout`` says."""
    world = [9] * dist.get_world_size()
    for rank, node in zip(dist.get_process_group_ranks(group), layout, strict=True):
        world[rank] = node
    config = Config(timeout_s=timeout_s, virtual_nodes=tuple(world))
    device = torch.get_default_device()
    with scale_out(group, device=device, config=config) as ranks:
        yield ranks


@contextlib.contextmanager
def slices_by_bytes() -> Iterator[None]:
    """Let :func:`set_slice_bytes` hold until the end of the block."""
    before = words.SLICE_BYTES
    try:
        yield
    finally:
        words.SLICE_BYTES = before


def set_slice_bytes(draws: Draws, batch: int, dim: int, dtype: torch.dtype, ranks: int) -> None:
    """Let slices have a sample of a table, all samples of one or of two, or those of all tables."""
    of_a_table = -(-batch // ranks) * dim * dtype.itemsize
    words.SLICE_BYTES = (draws.sizes.choice((1, of_a_table, 2 * of_a_table, 1 << 20)),) * 2


def forward_back_to_back(group: dist.ProcessGroup, layout: Sequence[int], calls: int) -> int:
    """Uneven tables and batches, empty bags, all modes and dtypes; slices of several tables, of which the last one has
    fewer; a small ring is full and wraps around.
    """
    with on_nodes(group, layout) as ranks, slices_by_bytes():
        n, rank, device = ranks.world_size, ranks.rank, ranks.device
        draws = Draws(len(layout) + calls, rank)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dtype in DTYPES:
            dim, batch = draws.sizes.choice((1, 5, 8)), draws.sizes.randrange(n, 3 * n)
            counts = [draws.sizes.randrange(1, 4) for _ in range(n)]
            set_slice_bytes(draws, batch, dim, dtype, n)
            tables = [[draws.normal(draws.sizes.randrange(1, 30), dim).to(dtype) for _ in range(k)] for k in counts]
            own = [table.to(device) for table in tables[rank]]
            samples = [batch // n + (peer < batch % n) for peer in range(n)]
            mine = slice(sum(samples[:rank]), sum(samples[: rank + 1]))
            for _ in range(calls):
                kind = draws.sizes.choice(("sum", "mean", "weighted"))
                index, cut = draws.sizes.choice((torch.int32, torch.int64)), draws.sizes.choice((None, 1, 2))
                of_all = [table for some in tables for table in some for _ in range(batch)]
                lengths = [draws.sizes.choice((0, 1, 4, 11)) for _ in of_all]
                bags = [
                    [draws.sizes.randrange(len(table)) for _ in range(length)]
                    for table, length in zip(of_all, lengths, strict=True)
                ]
                factors = [draws.normal(len(bag)).to(dtype) for bag in bags]
                pooled = [
                    pool(table, bag, factor if kind == "weighted" else None, mean=kind == "mean")
                    for table, bag, factor in zip(of_all, bags, factors, strict=True)
                ]
                wide = torch.stack(pooled).view(sum(counts), batch, dim).transpose(0, 1).reshape(batch, -1)
                first, last = sum(counts[:rank]) * batch, sum(counts[: rank + 1]) * batch
                indices = torch.tensor([row for bag in bags[first:last] for row in bag], dtype=index)
                offsets = torch.tensor([0, *lengths[first:last]]).cumsum(0).to(index)
                weights = torch.cat(factors[first:last]).to(device) if kind == "weighted" else None
                draws.late()
                result = embedding_all_to_all(
                    *(ranks, own, indices.to(device), offsets.to(device)),
                    mode="mean" if kind == "mean" else "sum",
                    per_sample_weights=weights,
                    slice_bags=cut,
                )
                kept.append((result.clone(), wide[mine]))
        ranks.synchronize()
        for number, (result, expected) in enumerate(kept):
            assert result.shape == expected.shape, number
            check_close(result, expected, number)
    return len(kept)


def large(group: dist.ProcessGroup, layout: Sequence[int], calls: int) -> int:
    """Sizes of a model's, many calls; against PyTorch's own bags."""
    with on_nodes(group, layout) as ranks:
        n, rank, dim, batch, count, pooling = ranks.world_size, ranks.rank, 92, 1024, 16, 70
        generator = torch.Generator("cpu").manual_seed(5)
        tables = torch.randn(n, count, 500, dim, generator=generator, device="cpu").to(ranks.device)
        index = torch.randint(0, 500, (n, count, batch * pooling), generator=generator, device="cpu").to(ranks.device)
        offsets = torch.arange(count * batch + 1, device=ranks.device) * pooling
        own = list(tables[rank].clone().unbind())
        mine = slice(rank * batch // n, (rank + 1) * batch // n)
        results = []
        for call in range(calls):
            shifted = (index[rank] + call) % 500
            results.append(embedding_all_to_all(ranks, own, shifted.reshape(-1), offsets, slice_bags=64).clone())
        ranks.synchronize()
        for call, result in enumerate(results):
            columns = [
                torch.nn.functional.embedding_bag(
                    (index[owner, number].view(batch, pooling)[mine] + call) % 500, tables[owner, number], mode="sum"
                )
                for owner in range(n)
                for number in range(count)
            ]
            torch.testing.assert_close(result, torch.cat(columns, 1), rtol=1e-4, atol=1e-3)
    return len(results)


def unlike(group: dist.ProcessGroup, layout: Sequence[int], what: str) -> str:
    """Arguments that differ between nodes."""
    with on_nodes(group, layout) as ranks:
        other = ranks.rank == 1
        table = torch.ones(4, 3 if other and what == "dim" else 2)
        batch = 8 + (other and what == "batch")
        options = {"mode": "mean"} if other and what == "mode" else {}
        try:
            if what == "counts":
                sent = [1 + other] * ranks.world_size
                given, sizes = torch.ones(sum(sent)), {"output_split_sizes": sent, "input_split_sizes": sent}
                ranks.all_to_all(torch.empty_like(given), given, **sizes)
            embedding_all_to_all(ranks, [table], torch.zeros(batch).long(), torch.arange(batch + 1), **options)
        except (MismatchError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def backward_back_to_back(group: dist.ProcessGroup, layout: Sequence[int], calls: int) -> int:
    """Check gradients of tables on ranks of several nodes."""
    with on_nodes(group, layout) as ranks, torch.device("cpu"):
        draws = Draws(len(layout), ranks.rank)
        return check_gradients(ranks, embedding_all_to_all_backward, draws, ranks.world_size, 3, calls)


def layers(group: dist.ProcessGroup, layout: Sequence[int]) -> int:
    """A step of training of the layer, eager and compiled whole, against autograd in float64."""
    with on_nodes(group, layout) as ranks:
        n, rank, dim, batch = ranks.world_size, ranks.rank, 4, 2 * ranks.world_size + 1
        layer = EmbeddingBagAllToAll(ranks, [5] * (1 + rank % 2), dim)
        tables = len(layer.tables)
        offsets = torch.arange(tables * batch + 1) * 3
        indices = torch.arange(3 * tables * batch) * 2 % 5
        for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            layer.zero_grad()
            result = run(indices, offsets)
            (result * 2).sum().backward()
            leaves = [table.detach() for table in layer.tables]
            grad = torch.full((batch, tables * dim), 2.0, dtype=torch.float64)
            for table, expected in zip(
                layer.tables, autograd(leaves, indices, offsets, "sum", None, grad), strict=True
            ):
                assert table.grad is not None
                check_close(table.grad, expected, "layer")
            assert result.shape == (batch // n + (rank < batch % n), layer.table_count * dim)
    return layer.table_count


def small(ranks: ScaleOut) -> torch.Tensor:
    """A call that is right."""
    table = torch.arange(8.0).view(4, 2) + 10 * ranks.rank
    batch = 2 * ranks.world_size
    return embedding_all_to_all(ranks, [table], torch.arange(batch) % 4, torch.arange(batch + 1))


def backward(ranks: ScaleOut) -> torch.Tensor:
    """An unfused call that is right."""
    n, batch = ranks.world_size, 2 * ranks.world_size
    grad, bags = torch.arange(4.0 * n).view(2, 2 * n), (torch.arange(batch) % 4, torch.arange(batch + 1))
    (found,), _ = embedding_all_to_all_backward(ranks, grad, [torch.ones(4, 2)], *bags)
    return found


def fails(
    group: dist.ProcessGroup, layout: Sequence[int], culprit: int, how: str, is_fused: bool = True
) -> tuple[tuple[int, ...], str]:
    """A rank dies in a call, does not come, is refused or leaves; every other one names it, and nothing is left."""
    call = small if is_fused else backward
    before = left_behind()
    found: PeerError | None = None
    on_gpus = torch.get_default_device().type == "cuda"  # where groups of NCCL take a while to be made
    timeout_s = (15 if on_gpus else 5) if how == "late" else 30
    try:
        with on_nodes(group, layout, timeout_s=timeout_s) as ranks:
            first = call(ranks).clone()
            ranks.synchronize()
            if ranks.rank == culprit:
                if how == "dies":
                    os._exit(7)
                elif how == "leaves":
                    raise KeyError("of its own")
                elif how == "refused":
                    embedding_all_to_all(ranks, [], torch.arange(4), torch.arange(5))
                time.sleep(2 * timeout_s)
            second = call(ranks)
            ranks.synchronize()
            assert second.equal(first)
    except PeerError as error:
        found = error
    except (KeyError, TypeError) as error:
        return (), f"{type(error).__name__}: {error}"
    assert found is not None
    found.__traceback__ = None  # its frames hold what was made
    until = time.monotonic() + 5
    while (after := left_behind()) != before and time.monotonic() < until:
        time.sleep(0.05)
    assert after == before, (before, after)
    return found.ranks, f"{type(found).__name__}: {found}"


def cannot_be_made(group: dist.ProcessGroup, layout: Sequence[int], culprit: int, part: str) -> str:
    """A rank fails to make its part of what all need: all ranks raise, and nothing is left."""
    before = left_behind()
    there = importlib.import_module("sidelane.integrations.nodes.scale_out")
    names = {"near": "Communicator", "carrier": "make_other", "connections": "GroupTransport.warm_up"}
    owner, _, name = names[part].rpartition(".")

    def fail(*args: object, **options: object) -> None:
        if part != "connections":
            raise UnavailableError(f"no {part} here")

    text = "nothing"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == culprit:
            patch.setattr(getattr(there, owner) if owner else there, name, fail)
        try:
            with on_nodes(group, layout, timeout_s=3):
                pass
        except (PeerError, UnavailableError) as error:
            text = f"{type(error).__name__}: {error}"
    until = time.monotonic() + 5
    while (after := left_behind()) != before and time.monotonic() < until:
        time.sleep(0.05)
    assert after == before, (before, after)
    return text


def left_behind() -> tuple[int, int]:
    """Threads of Sidelane and open sockets of Python in this process; those of Gloo are C++'s."""
    threads = sum(thread.name.startswith("sidelane-") for thread in threading.enumerate())
    return threads, sum(type(one) is socket.socket and one.fileno() >= 0 for one in gc.get_objects())


def closes(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
    """Many of them, one after the other: nothing is left."""
    found = []
    for _ in range(3):
        with on_nodes(group, layout) as ranks:
            small(ranks)
        del ranks
        dist.barrier(group)
        found.append((*left_behind(), len(shared_memory())))
    assert found[0] == found[-1], found


def copied(group: dist.ProcessGroup, layout: Sequence[int]) -> str:
    """A forked copy of a rank can neither call nor end what its parent has; the parent goes on."""
    with on_nodes(group, layout) as ranks:
        first = small(ranks).clone()
        reads, writes = os.pipe()
        copy = os.fork()
        if copy == 0:
            try:
                small(ranks)
                told = "it made a call"
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            ranks.close()
            os.write(writes, told.encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as file:
            told = file.read()
        os.waitpid(copy, 0)
        for _ in range(2):
            assert small(ranks).equal(first)
    return told


def refused_in_a_capture(group: dist.ProcessGroup, layout: Sequence[int]) -> str:
    """A rank calls inside of a capture, which is refused before the launch; the calls of all ranks go on behind it."""
    there = importlib.import_module("sidelane.ops.scale_out.ranks")
    text = ""
    with on_nodes(group, layout, timeout_s=10) as ranks:
        batch = 4 * ranks.world_size
        tables, indices = [torch.ones(4, 8) * (ranks.rank + 1)], torch.arange(batch) % 4
        first = embedding_all_to_all(ranks, tables, indices, torch.arange(batch + 1)).clone()
        if ranks.rank == 0:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(UnavailableError) as refused:
                patch.setattr(there, "is_captured", lambda comm: True)
                embedding_all_to_all(ranks, tables, indices, torch.arange(batch + 1))
            text = str(refused.value)
        for _ in range(2):
            assert embedding_all_to_all(ranks, tables, indices, torch.arange(batch + 1)).equal(first)
    return text
