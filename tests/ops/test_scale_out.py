"""Fused operators among virtual nodes, by Triton's interpreter, and on two GPUs as two nodes, against float64.

There slices go over NCCL, words in pinned memory. NCCL uses sockets, as between machines. Where four ranks share two
GPUs, only bytes are checked.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from as_torchrun import run_program
from device_pool import Pool, Ranks
from fused_embeddings import autograd, check_bags, check_gradients
from fused_ops import Draws, check_close, fused
from marks import long
from on_ranks import DEVICE_TEST_S, on_ranks
from ranks import Crew, shared_memory

from sidelane import Config
from sidelane.errors import MismatchError, PeerError, UnavailableError
from sidelane.integrations.nodes.scale_out import scale_out
from sidelane.ops import EmbeddingBagAllToAll
from sidelane.ops.scale_out import ScaleOut, embedding_all_to_all, embedding_all_to_all_backward, words

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_TWO = pytest.param(fused, marks=needs_two)


SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(2, environment=SOCKETS)) as made:
        yield made


@pytest.fixture(scope="module")
def four_on_two_nodes() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(4, environment=SOCKETS)) as made:
        yield made


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


@on_ranks(2, interpreted=True, layout=(0, 1), calls=2)
@on_ranks(4, interpreted=True, layout=(0, 0, 1, 1), calls=2)
@on_ranks(long(2), interpreted=True, layout=(0, 0), calls=2)
@on_ranks(long(4), interpreted=True, layout=(0, 1, 1, 0), calls=2)
@on_ranks(long(3), interpreted=True, layout=(0, 1, 0), calls=2)
@on_ranks(gpu=ON_TWO, crew="two_nodes", layout=(0, 1), calls=10)
@on_ranks(gpu=ON_TWO, crew="four_on_two_nodes", timeout_s=150, layout=(0, 1, 0, 1), calls=2)
def test_embeddings_back_to_back(group: dist.ProcessGroup, layout: Sequence[int], calls: int) -> None:
    """Slices of several tables, of which the last one has fewer; a small ring is full and wraps around.

    Slices only where ranks share a GPU: NCCL makes no all-to-all of those.
    """
    with on_nodes(group, layout) as ranks, slices_by_bytes():
        draws = Draws(len(layout) + calls, ranks.rank)
        check_bags(
            *(ranks, embedding_all_to_all, draws, 3, calls),
            lambda: {"slice_bags": draws.sizes.choice((None, 1, 2))},
            begin=lambda *sizes: set_slice_bytes(draws, *sizes, len(layout)),
        )


@on_ranks(gpu=ON_TWO, crew="two_nodes", layout=(0, 1))
def test_many_large_calls(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
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
        for call in range(20):
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


@on_ranks(2, interpreted=True, layout=(0, 1), calls=2)
@on_ranks(long(3), interpreted=True, layout=(0, 1, 1), calls=2)
@on_ranks(long(4), interpreted=True, layout=(0, 0, 1, 1), calls=2)
@on_ranks(long(2), interpreted=True, layout=(0, 0), calls=2)
@on_ranks(gpu=ON_TWO, crew="two_nodes", layout=(0, 1), calls=10)
def test_gradients_of_embeddings(group: dist.ProcessGroup, layout: Sequence[int], calls: int) -> None:
    with on_nodes(group, layout) as ranks, torch.device("cpu"):
        draws = Draws(len(layout), ranks.rank)
        check_gradients(ranks, embedding_all_to_all_backward, draws, ranks.world_size, 3, calls)


@on_ranks(long(3), interpreted=True, layout=(0, 0, 1))
@on_ranks(gpu=ON_TWO, crew="two_nodes", layout=(0, 1))
def test_layers_are_trained_and_compiled_whole(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
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


@on_ranks(2, interpreted=True)
@pytest.mark.parametrize("what", ["mode", "batch", "dim", "counts"])
def test_arguments_that_differ_between_ranks_are_refused_on_all(group: dist.ProcessGroup, what: str) -> None:
    """An all-to-all of other counts would hang, or write beyond its output."""
    with on_nodes(group, (0, 1)) as ranks:
        other = ranks.rank == 1
        table = torch.ones(4, 3 if other and what == "dim" else 2)
        batch = 8 + (other and what == "batch")
        options = {"mode": "mean"} if other and what == "mode" else {}
        peer = 1 - ranks.rank
        if what == "counts":
            sent = [1 + other] * ranks.world_size
            given, sizes = torch.ones(sum(sent)), {"output_split_sizes": sent, "input_split_sizes": sent}
            words = rf"^all-to-all among nodes: size of the part of rank {peer} for rank {ranks.rank} \(value="
            with pytest.raises(MismatchError, match=words):
                ranks.all_to_all(torch.empty_like(given), given, **sizes)
            return
        with pytest.raises((MismatchError, PeerError), match=rf"rank {peer} has other arguments \(value="):
            embedding_all_to_all(ranks, [table], torch.zeros(batch).long(), torch.arange(batch + 1), **options)


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


def cannot_be_made(group: dist.ProcessGroup, layout: Sequence[int], culprit: int, part: str) -> str:
    """The error of a rank where one fails to make its part of what all need; nothing is left."""
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
    check_nothing_is_left_but(before)
    return text


@on_ranks(3, interpreted=True)
@pytest.mark.parametrize("part", ["near", "carrier"])
def test_what_a_rank_cannot_make_is_an_error_on_all(group: dist.ProcessGroup, part: str) -> None:
    text = cannot_be_made(group, (0, 1, 1), 2, part)
    assert text.startswith("PeerError: ") and f"rank 2: UnavailableError: no {part} here" in text, text


@on_ranks(2, interpreted=True)
def test_a_rank_that_does_not_connect_is_named(group: dist.ProcessGroup) -> None:
    """It is rank 0's far peer; the ranks that had no part in it hear of it where they meet next."""
    text = cannot_be_made(group, (0, 1), 1, "connections")
    named = "PeerTimeoutError: scale-out: rank 1 did not answer rank 0 in 3 s"
    assert group.rank() != 0 or text.startswith(named), text


def left_behind() -> tuple[int, int]:
    """Threads of Sidelane and open sockets of Python in this process; those of Gloo are C++'s."""
    threads = sum(thread.name.startswith("sidelane-") for thread in threading.enumerate())
    return threads, sum(type(one) is socket.socket and one.fileno() >= 0 for one in gc.get_objects())


def check_nothing_is_left_but(before: tuple[int, int]) -> None:
    until = time.monotonic() + 5
    while (after := left_behind()) != before and time.monotonic() < until:
        time.sleep(0.05)
    assert after == before, (before, after)


@on_ranks(3, interpreted=True)
def test_nothing_is_left_behind(group: dist.ProcessGroup) -> None:
    """Many of them, one after the other: nothing is left."""
    gc.collect()  # what tests before have left in these ranks
    found = []
    for _ in range(3):
        with on_nodes(group, (0, 1, 1)) as ranks:
            small(ranks)
        del ranks
        dist.barrier(group)
        found.append((*left_behind(), len(shared_memory())))
    assert found[0] == found[-1], found


@on_ranks(2, interpreted=True)
def test_a_forked_copy_leaves_its_parent_alone(group: dist.ProcessGroup) -> None:
    """A forked copy of a rank can neither call nor end what its parent has; the parent goes on."""
    with on_nodes(group, (0, 1)) as ranks:
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
    assert told.startswith("CommunicatorClosedError: ") and "forked copy" in told, told


@on_ranks(2, interpreted=True)
def test_a_call_that_is_refused_in_a_capture_leaves_later_calls_alone(group: dist.ProcessGroup) -> None:
    """A rank calls inside of a capture, which is refused before the launch; the calls of all ranks go on behind it."""
    there = importlib.import_module("sidelane.ops.scale_out.ranks")
    with on_nodes(group, (0, 1), timeout_s=10) as ranks:
        batch = 4 * ranks.world_size
        tables, indices = [torch.ones(4, 8) * (ranks.rank + 1)], torch.arange(batch) % 4
        first = embedding_all_to_all(ranks, tables, indices, torch.arange(batch + 1)).clone()
        if ranks.rank == 0:
            with (
                pytest.MonkeyPatch.context() as patch,
                pytest.raises(UnavailableError, match="^scale-out: calls are eager"),
            ):
                patch.setattr(there, "is_captured", lambda comm: True)
                embedding_all_to_all(ranks, tables, indices, torch.arange(batch + 1))
        for _ in range(2):
            assert embedding_all_to_all(ranks, tables, indices, torch.arange(batch + 1)).equal(first)


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
    check_nothing_is_left_but(before)
    return found.ranks, f"{type(found).__name__}: {found}"


@pytest.fixture
def own() -> Iterator[Crew]:
    """Ranks of a test that ends some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        found = Crew(4)
    yield found
    found.kill()


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("how", ["dies", long("late"), long("refused"), long("leaves")])
def test_the_rank_at_fault_is_named_by_all(own: Crew, how: str, is_fused: bool) -> None:
    """By its neighbour on the node, and by those on the other one, within the time-out."""
    culprit, words = (
        2,
        {"dies": "died", "late": "", "refused": "refused it: TypeError", "leaves": "left: KeyError"}[how],
    )
    found = own.run(fails, 4, (0, 0, 1, 1), culprit, how, is_fused, dying=(culprit,) if how == "dies" else ())
    for rank, told in enumerate(found):
        if rank != culprit:
            ranks, text = told
            assert ranks == (culprit,), (rank, told)
            assert words in text and (how != "late" or text.startswith("PeerTimeoutError")), text


@pytest.mark.parametrize("how", ["refused", long("leaves")])
def test_the_rank_at_fault_is_named_on_one_node(four: Crew, how: str) -> None:
    """Where no connection between nodes tells of it."""
    (ranks, text), _ = four.run(fails, 2, (0, 0), 1, how, False)
    assert ranks == (1,) and "rank 1: " in text and "late" not in text, text


@needs_two
@pytest.mark.device
@pytest.mark.timeout(DEVICE_TEST_S)
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("how", ["refused", "late", "dies"])
def test_the_rank_at_fault_is_named_on_gpus(how: str, is_fused: bool) -> None:
    with contextlib.closing(Pool(2, environment=SOCKETS)) as pool:
        pool.begin(fused, functools.partial(fails, layout=(0, 1), culprit=1, how=how, is_fused=is_fused))
        (ranks, text), *_ = pool.finish(120.0, but=(1,) if how == "dies" else ())
    assert ranks == (1,), text


@pytest.mark.long
def test_ways_between_nodes_are_measured(tmp_path: Path) -> None:
    """On CPU ranks the results are checked only."""
    program = Path(__file__).parents[2] / "results" / "scripts" / "between_nodes.py"
    run_program(program, tmp_path, ["rows.json"])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["way"] for row in rows} >= {"bags alone", "our kernel, process group, copy", "fused, slices of 2"}
    assert all(row["max_rel_err"] < 1e-5 for row in rows if "alone" not in row["way"])
