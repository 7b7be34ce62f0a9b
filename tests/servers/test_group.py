"""The object that serves vLLM and SGLang, between ranks and without a server: each call against its reference."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cpu_calls import outcome
from expected import in_rank_order, numbers, same_bytes
from fused_ops import check_close
from on_ranks import on_ranks
from ranks import crew
from torch.nn import functional

from sidelane import config
from sidelane.config import Config
from sidelane.program.collective import ReduceOp
from sidelane.servers import group as servers_group
from sidelane.servers import setting
from sidelane.servers.group import SUMMED, ServerGroup

SHAPES = (1, 7), (5, 3), (64, 257)


@contextlib.contextmanager
def made(group: dist.ProcessGroup, **options: Any) -> Iterator[ServerGroup]:
    with config.override(Config(timeout_s=60)):
        served = ServerGroup(group, torch.get_default_device(), **options)
    try:
        yield served
    finally:
        served.close()


def everyones(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers of every rank, which all ranks know."""
    seed = sum(shape)
    return [numbers(seed, rank, torch.Size(shape).numel(), dtype).view(shape) for rank in range(group.size())]


@on_ranks(2, 3, gpu=True)
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_even_calls(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Sums, gathers, broadcasts and reduce-scatters, in new tensors, in given ones and in place."""
    n, rank = group.size(), group.rank()
    with made(group) as served, torch.inference_mode():
        assert not served.disabled and served.reason == ""
        for rows, width in (*SHAPES, *SHAPES):
            everyone = everyones(group, (rows, width), dtype)
            mine, total = everyone[rank].clone(), in_rank_order(everyone, ReduceOp.SUM)
            for found in (served.custom_all_reduce(mine), served.all_reduce(mine, torch.empty_like(mine))):
                assert found is not None and same_bytes(found, total) and same_bytes(mine, everyone[rank])
            placed = mine.clone()
            assert served.all_reduce(placed, placed) is placed and same_bytes(placed, total)
            gathered = served.all_gather(mine)
            assert gathered is not None and same_bytes(gathered, torch.cat(everyone))
            parts = everyones(group, (n * rows, width), dtype)
            scattered = served.reduce_scatter(parts[rank].clone())
            assert scattered is not None
            assert same_bytes(scattered, in_rank_order(parts, ReduceOp.SUM)[rank * rows : (rank + 1) * rows])
            sent = mine.clone()
            assert served.broadcast(sent, n - 1) is sent and same_bytes(sent, everyone[n - 1])


@on_ranks(2, 3, gpu=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_uneven_calls(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Ranks with rows of their own number, among them none."""
    n, rank = group.size(), group.rank()
    with made(group) as served:
        for first, width in ((3, 5), (0, 64), (17, 130)):
            sizes = [first, *range(1, n)]
            everyone = [numbers(first, each, rows * width, dtype).view(rows, width) for each, rows in enumerate(sizes)]
            for output in (None, torch.empty(sum(sizes), width, dtype=dtype)):
                found = served.all_gather(everyone[rank], output, sizes)
                assert found is not None and same_bytes(found, torch.cat(everyone))
            whole = everyones(group, (sum(sizes), width), dtype)
            total = in_rank_order(whole, ReduceOp.SUM).split(sizes)[rank]
            for output in (None, torch.empty(sizes[rank], width, dtype=dtype)):
                found = served.reduce_scatter(whole[rank].clone(), output, sizes)
                assert found is not None and same_bytes(found, total)


@on_ranks(2)
def test_what_is_not_taken_is_theirs(group: dist.ProcessGroup) -> None:
    """Dtypes, layouts and empty tensors that Sidelane does not take cost no call, and the order stays that of all."""
    with made(group) as served:
        double, strided = torch.ones(3, dtype=torch.float64), torch.ones(4, 6).t()
        for _ in range(3):
            for tensor in (double, strided, torch.empty(0, 5), torch.ones(3, dtype=torch.uint8)):
                assert not served.should_custom_ar(tensor) and served.custom_all_reduce(tensor) is None
                assert served.reduce_scatter(tensor) is None and served.reduce_scatter(tensor, sizes=[1, 2]) is None
            assert served.all_gather(torch.empty(0, 5), sizes=[0, 0]) is None
            assert served.all_gather(torch.tensor(1.0)) is None and served.reduce_scatter(torch.ones(3)) is None
            assert served.comm is not None and served.comm.last_choice() is None, "no call was made"
        with served.capture():
            total = served.custom_all_reduce(torch.full((4,), float(group.rank() + 1)))
        assert total is not None and total.tolist() == [3.0] * 4
        gathered = served.all_gather(strided)  # its copy is contiguous
        assert gathered is not None and same_bytes(gathered, torch.ones(12, 4))
    assert served.disabled and served.custom_all_reduce(torch.ones(4)) is None


@on_ranks(2)
def test_without_a_communicator_everything_is_theirs(group: dist.ProcessGroup) -> None:
    served = ServerGroup(group, "meta")
    assert "device (value=meta" in served.reason and served.comm is None and served.disabled
    tensor = torch.ones(3)
    assert not served.should_custom_ar(tensor) and served.custom_all_reduce(tensor) is None
    assert served.all_gather(tensor) is served.broadcast(tensor, 0) is served.reduce_scatter(tensor) is None
    assert served.all_gather(tensor, sizes=[3, 2]) is None and not served.normalises(tensor, tensor)
    assert served.suspend() == served.resume() == served.reason and served.memory_bytes() == 0


@on_ranks(2, 3, gpu=True)
def test_bits_of_a_row_in_batches_of_1_to_64(group: dist.ProcessGroup) -> None:
    """In batch-invariant mode sums stay Sidelane's, and norms, which are rounded otherwise, are the server's."""
    hidden, rank = 96, group.rank()
    everyone = everyones(group, (64, hidden), torch.bfloat16)
    mine, total = everyone[rank].clone(), in_rank_order(everyone, ReduceOp.SUM)
    with made(group, batch_invariant=True) as served:
        for batch in range(1, 65):
            found = served.custom_all_reduce(mine[:batch])
            assert found is not None and same_bytes(found, total[:batch]), batch
            parts = served.reduce_scatter(mine[:batch], sizes=[batch, *[0] * (group.size() - 1)])
            assert parts is not None and same_bytes(parts, total[: batch if rank == 0 else 0]), batch
        assert served.all_reduce_rms_norm(mine, mine, mine[0], 1e-6) is None


@on_ranks(2, interpreted=True)
@on_ranks(gpu=True)
def test_norms(group: dist.ProcessGroup) -> None:
    hidden = 264
    everyone = everyones(group, (3, hidden), torch.bfloat16)
    residual, weight = numbers(5, 0, 3 * hidden, torch.bfloat16).view(3, hidden), torch.ones(hidden).bfloat16()
    with made(group) as served:
        for added in (residual, None):
            found = served.all_reduce_rms_norm(everyone[group.rank()].clone(), added, weight, 1e-6)
            assert found is not None
            total = torch.stack([each.float() for each in everyone]).sum(0) + (0 if added is None else added.float())
            check_close(found[1], total.bfloat16(), "the sum")
            check_close(found[0], functional.rms_norm(total, (hidden,), weight.float(), 1e-6).bfloat16(), "the norm")
        calls = served.comm.last_choice() if served.comm is not None else None
        for x, gain in (
            (torch.ones(513, hidden).bfloat16(), weight),
            (torch.ones(3, hidden).bfloat16(), weight.float()),
            (torch.ones(3, 3).bfloat16(), torch.ones(3).bfloat16()),
            (torch.ones(2, 3, hidden).bfloat16(), weight),
        ):
            assert not served.normalises(x, gain) and served.all_reduce_rms_norm(x, None, gain, 1e-6) is None
        assert served.comm is not None and served.comm.last_choice() is calls, "no further call was made"
        with mock.patch.object(servers_group, "is_captured", return_value=True):
            for rows, with_residual in ((3, True), (4, False), (5, True)):  # 3 and 4 have one preparation, 5 has none
                x = torch.ones(rows, hidden).bfloat16()
                found = served.all_reduce_rms_norm(x, x if with_residual else None, weight, 1e-6)
                assert (found is not None) is (rows < 5)
            assert "captured graphs contain addresses" in served.suspend()


@on_ranks(2, gpu=True)
def test_suspend_and_resume(group: dist.ProcessGroup) -> None:
    with made(group) as served:
        for _ in range(3):
            before = served.custom_all_reduce(torch.full((1000,), 2.0))
            assert before is not None and before.tolist() == [2.0 * group.size()] * 1000
            assert served.memory_bytes() > 0
            assert served.suspend() == "" and served.memory_bytes() == 0
            assert served.custom_all_reduce(torch.ones(3)) is None and served.suspend() == ""
            assert served.resume() == "" and served.resume() == ""
        assert served.custom_all_reduce(torch.ones(3)) is not None


@on_ranks(gpu=True)
def test_captured_calls_keep_the_memory(group: dist.ProcessGroup) -> None:
    """Calls in the warm-up and in the capture; the graph still runs after a suspend, which says what stays."""
    with made(group) as served:
        tensor, graph = torch.ones(8, 64), torch.cuda.CUDAGraph()
        with served.capture():
            served.custom_all_reduce(tensor)
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                found = served.custom_all_reduce(tensor)
        assert found is not None
        assert "captured graphs contain addresses" in served.suspend() and served.resume() == ""
        for value in (1.0, 3.0):
            tensor.fill_(value)
            graph.replay()
            assert torch.equal(found, torch.full_like(found, value * group.size()))


@on_ranks(gpu=True)
def test_a_norm_of_a_new_shape_in_a_capture_is_the_servers(group: dist.ProcessGroup) -> None:
    """The capture goes on without it, and so does the communicator."""
    with made(group) as served:
        x, weight, graph = torch.ones(4, 512).bfloat16(), torch.ones(512).bfloat16(), torch.cuda.CUDAGraph()
        served.custom_all_reduce(x)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            assert served.all_reduce_rms_norm(x, x, weight, 1e-6) is None
            found = served.custom_all_reduce(x)
        graph.replay()
        assert found is not None and torch.equal(found, torch.full_like(found, group.size()))
        assert served.all_reduce_rms_norm(x, x, weight, 1e-6) is not None


def dies(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...], str]:
    with made(group) as served:
        served.custom_all_reduce(torch.ones(4))
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome(lambda: [served.custom_all_reduce(torch.ones(4)) for _ in range(2)])


def test_a_dead_worker_is_named() -> None:
    with crew(2) as ranks:
        name, at_fault, text = ranks.run(dies, 2, dying=(1,))[0]
    assert (name, at_fault) == ("PeerError", (1,)) and "rank 1" in text


def test_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that names no plug-ins gets none, though it loads all that are installed."""
    monkeypatch.delenv("SIDELANE_SERVERS", raising=False)
    for value, asked in ((None, False), ("", False), ("other", False), ("sidelanes", False), ("a, sidelane", True)):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_PLUGINS", value)
        assert setting.is_named("VLLM_PLUGINS") is asked, value
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv("SIDELANE_SERVERS", "1")
    assert setting.is_named("VLLM_PLUGINS")
    monkeypatch.setenv("SIDELANE_SERVERS", "yes")
    with pytest.raises(ValueError, match=r"SIDELANE_SERVERS: not a switch \(value='yes', allowed='0' or '1'\)"):
        setting.is_named("VLLM_PLUGINS")


def test_versions_that_do_not_fit() -> None:
    fits = "0.22.0", "0.33.0"
    for version in ("0.22.0", "0.26.1", "0.33.0", "0.33.7+cpu"):
        assert setting.misfit("vllm", version, "cuda", fits) == setting.misfit("vllm", version, "cpu", fits) == ""
    for version in ("0.21.9", "0.34.0", "1.0.0", "0.1.dev9"):
        found = setting.misfit("vllm", version, "cuda", fits)
        assert found == f"vllm {version} does not fit (allowed=0.22.0..0.33.0)"
    assert setting.misfit("vllm", "0.33.0", "xpu", fits) == "its platform does not fit (value=xpu, allowed=cuda, cpu)"


def test_entry_points_import_no_server() -> None:
    """vLLM and SGLang load them in every process; without being asked they import and change nothing."""
    program = (
        "import sys; from sidelane.servers import sglang, vllm; sglang.register(); vllm.register();"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'sglang')])"
    )
    lists = "SIDELANE_SERVERS", "SGLANG_PLUGINS", "VLLM_PLUGINS"
    bare = {name: value for name, value in os.environ.items() if name not in lists}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=bare, check=True)
    assert found.stdout.strip() == "[]", found.stdout
