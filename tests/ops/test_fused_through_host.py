"""Fused operators whose words go through host memory: between CPU ranks that believe so, and between GPUs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expected import same_bytes
from fused_ops import DTYPES, Draws, check_all
from marks import long
from on_ranks import on_ranks, own_stream

from sidelane import Communicator, Config, ops
from sidelane.choice.fused import FusedTime
from sidelane.collectives.backend_cpu import CpuBackend
from sidelane.errors import UnavailableError
from sidelane.machine.peers import PeerMemory
from sidelane.ops.gemv import GemvAllReduce
from sidelane.ops.handle import FLOAT8S, INTERPRETED
from sidelane.ops.operator import tables_of
from sidelane.ops.rms_norm import AllReduceRmsNorm, is_worth_it

Compared = list[tuple[torch.Tensor, torch.Tensor]]


@contextlib.contextmanager
def through_host(group: dist.ProcessGroup) -> Iterator[Communicator]:
    with (
        mock.patch.object(CpuBackend, "peers", PeerMemory(True, "a test")),
        Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=60, peers="host")) as comm,
    ):
        yield comm


def normalised(xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The norm and the sum, in float64."""
    total = torch.stack(xs).double().sum(0) + residual.double()
    return total / (total.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double(), total


@on_ranks(2, long(3), interpreted=True, hiddens=(2, 150))
@on_ranks(1, interpreted=True, hiddens=(34,))
@on_ranks(gpu=own_stream, timeout_s=150, hiddens=(34, 300, 4096, 8192))
def test_norms_through_host_memory(group: dist.ProcessGroup, hiddens: tuple[int, ...]) -> None:
    """All dtypes, with a residual and without, in place and not, in 8 bits with both sorts of scales, back to back."""
    with through_host(group) as comm:
        draws, compared, device = Draws(3, comm.rank), Compared(), comm.device
        most = 5 if device.type == "cpu" and comm.world_size > 1 else 16  # the interpreter takes a token after another
        for hidden, dtype, tokens in itertools.product(hiddens, DTYPES, (1, 3, most)):
            if tokens * hidden > 3000 and device.type == "cpu":
                continue
            xs = [draws.normal(tokens, hidden).to(dtype) for _ in range(comm.world_size)]
            residual, weight = draws.normal(tokens, hidden).to(dtype), draws.normal(hidden).to(dtype)
            x, before, factors = (one.to(device) for one in (xs[comm.rank], residual, weight))
            right = normalised(xs, residual, weight)
            draws.late()
            narrow = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn)
            for scale in (torch.full((), 0.25), torch.empty(tokens, 1)):
                options: dict[str, Any] = {"quantized": narrow, "scale": scale, "method": "fused"}
                found = ops.all_reduce_rms_norm(comm, x, before, factors, **options)
                compared += zip(found, right, strict=True)
                exact = (found[0].float() / scale).clamp(-448, 448)
                # The interpreter also halves what is rounded up to the next power of two.
                apart = [(narrow.float() * factor - exact).abs() for factor in ((1, 2) if INTERPRETED else (1,))]
                allowed = exact.abs() * 2**-3 + 2**-9
                assert (torch.stack(apart).amin(0) <= allowed).all(), (hidden, dtype, tokens)
            without = normalised(xs, torch.zeros_like(residual), weight)
            compared += zip(ops.all_reduce_rms_norm(comm, x, None, factors), without, strict=True)
            places = {"out": x.clone(), "residual_out": before, "method": "fused"}
            again = ops.all_reduce_rms_norm(comm, places["out"], before, factors, **places)
            assert all(map(same_bytes, again, found))
            compared += zip(again, right, strict=True)
        check_all(comm, compared)


@on_ranks(2, 3, interpreted=True, shapes=[(59, 16)])
@on_ranks(gpu=own_stream, timeout_s=150, shapes=[(59, 16), (1000, 512), (8192, 4096)])
def test_gemvs_through_host_memory(group: dist.ProcessGroup, shapes: list[tuple[int, int]]) -> None:
    with through_host(group) as comm:
        draws, compared = Draws(4, comm.rank), Compared()
        for (rows, columns), tokens, dtype in itertools.product(shapes, (1, 3), (torch.float32, torch.bfloat16)):
            for narrow in (None, FLOAT8S[0]):
                weights = [draws.normal(rows, columns).to(narrow or dtype) for _ in range(comm.world_size)]
                xs = [draws.normal(tokens, columns).to(dtype) for _ in range(comm.world_size)]
                right = torch.stack([x.double() @ w.double().T for x, w in zip(xs, weights, strict=True)]).sum(0)
                weight, x = weights[comm.rank].to(comm.device), xs[comm.rank].to(comm.device)
                for _ in range(3):
                    draws.late()
                    compared.append((ops.gemv_all_reduce(comm, weight, x, method="fused"), right))
        check_all(comm, compared)


@on_ranks(gpu=own_stream, timeout_s=150)
def test_operators_in_graphs_through_host_memory(group: dist.ProcessGroup) -> None:
    """Captured once, replayed back to back on other inputs, with eager calls in between."""
    with through_host(group) as comm:
        draws, compared, n = Draws(5, comm.rank), Compared(), comm.world_size
        x, before, weight = torch.zeros(4, 4096), torch.zeros(4, 4096), torch.ones(4096)
        matrix, vector = torch.ones(1024, 256), torch.zeros(1, 256)

        def call() -> list[torch.Tensor]:
            first, total = ops.all_reduce_rms_norm(comm, x, before, weight)
            return [first, total, ops.gemv_all_reduce(comm, matrix, vector)]

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            found = call()
        for step in range(12):
            xs, vectors = ([draws.normal(*one.shape) for _ in range(n)] for one in (x, vector))
            x.copy_(xs[comm.rank])
            before.fill_(step)
            vector.copy_(vectors[comm.rank])
            right = [*normalised(xs, torch.full((4, 4096), float(step), device="cpu"), weight.cpu())]
            right.append(torch.stack(vectors).double().sum(0).sum(1, keepdim=True).expand(1, 1024))
            graph.replay()
            compared += zip([one.clone() for one in found], right, strict=True)
            if step % 3 == 1:
                compared += zip(call(), right, strict=True)
        check_all(comm, compared)
        assert comm.submitted().peer_copies == 0
        del graph


@on_ranks(2, interpreted=True)
def test_what_auto_takes_through_host_memory(group: dist.ProcessGroup) -> None:
    """Words with flags up to some bytes; no kernel that waits for flags in host memory with all of its warps."""
    with through_host(group) as comm:
        for op, small, large in (
            ("all_reduce_rms_norm", (16, 4096), (512, 8192)),
            ("gemv_all_reduce", (8192, 4096, 1), (8192, 4096, 2)),
        ):
            assert "fused: words with flags through host memory" in ops.explain(comm, op, *small)
            assert "unfused: fused takes " in ops.explain(comm, op, *large, captured=True)
        assert "unfused: it has no kernel" in ops.explain(comm, "embedding_all_to_all", 512, 16, 70)
        sums = [torch.empty(tokens, 8192, dtype=torch.bfloat16) for tokens in (8, 9)]
        assert [is_worth_it(comm, x) for x in sums] == [True, False]
        times = FusedTime("all_reduce_rms_norm", 2, False, (20, 4096), 2, {"fused": 3.0, "unfused": 2.0})
        comm.cache[tables_of] = {"a test": (times,)}
        assert "unfused: 2 us expected" in ops.explain(comm, "all_reduce_rms_norm", 16, 4096)
        assert "fused: words with flags" in ops.explain(comm, "all_reduce_rms_norm", 1, 4096), (
            "no measured shape is near"
        )
        with pytest.raises(UnavailableError, match=r"schedule through host memory \(value=pushed"):
            ops.all_reduce_rms_norm(comm, torch.ones(1, 8), None, torch.ones(8), schedule="pushed", method="fused")


@on_ranks(2, interpreted=True)
def test_handles_through_host_memory_release_their_cells(group: dist.ProcessGroup) -> None:
    with through_host(group) as comm:
        for _ in range(3):
            for handle in (AllReduceRmsNorm(comm, 2, 8, torch.float32), GemvAllReduce(comm, 20, 1, torch.float32)):
                cells = handle.came if isinstance(handle, AllReduceRmsNorm) else handle.cells
                assert int(handle.addresses[comm.rank]) == cells.data_ptr()
                handle.close()
                with pytest.raises(RuntimeError, match="closed"):
                    handle.kernel.launch((1,))
