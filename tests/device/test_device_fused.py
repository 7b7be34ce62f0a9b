"""Fused operators on GPUs: graphs and streams. What CPU ranks do as well is in tests/ops/test_fused*.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fusion_cases
import pytest
import torch
import torch.distributed as dist
from device_context import Context
from fused_ops import fused, fused_always
from on_ranks import on_ranks
from process_groups import sidelane_group

from sidelane import Communicator, Config, ops
from sidelane.choice.fused import UNFUSED, Method
from sidelane.choice.selection import Selection
from sidelane.native import load_replays
from sidelane.ops import operator
from sidelane.session.own_kernel import RepeatedLaunch

Case = tuple[Callable[[int], object], Callable[[], list[torch.Tensor]]]
"""Changes the inputs of a step; makes the call."""
MakesCase = Callable[[Communicator], Case]


def gemv(comm: Communicator) -> Case:
    device, rank = comm.device, comm.rank
    x = torch.zeros(4, 96, device=device)
    weight = torch.randn(1000, 96, device=device, generator=torch.Generator(device).manual_seed(rank))
    return lambda step: x.fill_(step + rank), lambda: [ops.gemv_all_reduce(comm, weight, x)]


def gemv_of_one_token(comm: Communicator) -> Case:
    """Rows that are no multiple of anything, and a default tiling."""
    device, rank = comm.device, comm.rank
    x = torch.zeros(512, device=device)
    weight = torch.randn(1001, 512, device=device, generator=torch.Generator(device).manual_seed(rank))
    return lambda step: x.fill_(step + rank), lambda: [ops.gemv_all_reduce(comm, weight, x)]


def rms_norm_pushed(comm: Communicator) -> Case:
    x, residual, weight = (torch.ones(size, device=comm.device) for size in ((200, 1024), (200, 1024), (1024,)))
    ramp = torch.arange(1024, device=comm.device)

    def change(step: int) -> None:
        x.copy_((ramp * (step + comm.rank) % 17).expand(200, 1024))

    return change, lambda: list(ops.all_reduce_rms_norm(comm, x, residual, weight, schedule="pushed"))


def rms_norm(comm: Communicator) -> Case:
    x, residual, weight = (torch.ones(size, device=comm.device) for size in ((6, 512), (6, 512), (512,)))
    ramp = torch.arange(512, device=comm.device)

    def change(step: int) -> None:
        x.copy_((ramp * (step + comm.rank) % 17).expand(6, 512))

    return change, lambda: list(ops.all_reduce_rms_norm(comm, x, residual, weight))


def embedding(comm: Communicator) -> Case:
    device, batch = comm.device, 40
    tables = [torch.randn(50, 64, device=device) for _ in range(2)]
    indices = torch.zeros(4 * batch * 2, dtype=torch.int64, device=device)
    offsets = torch.arange(0, len(indices) + 1, 4, device=device)
    numbers = torch.arange(len(indices), device=device)
    return (
        lambda step: indices.copy_(numbers * (step + 3) % 50),
        lambda: [ops.embedding_all_to_all(comm, tables, indices, offsets)],
    )


def embedding_backward(comm: Communicator) -> Case:
    device, batch = comm.device, 40
    tables = [torch.randn(50, 64, device=device) for _ in range(2)]
    indices = torch.arange(4 * batch * 2, device=device) % 50
    offsets = torch.arange(0, len(indices) + 1, 4, device=device)
    samples = batch // comm.world_size + (comm.rank < batch % comm.world_size)
    grad = torch.zeros(samples, 64 * 2 * comm.world_size, device=device)
    return (
        lambda step: grad.fill_(step + comm.rank),
        lambda: ops.embedding_all_to_all_backward(comm, grad, tables, indices, offsets)[0],
    )


def gemm(comm: Communicator) -> Case:
    """Routing that changes between replays."""
    n, device = comm.world_size, comm.device
    x, weight = torch.randn(200 * n, 64, device=device), torch.randn(300, 64, device=device)
    counts = torch.zeros(n, n, dtype=torch.int64, device=device)
    numbers = torch.arange(n * n, device=device).view(n, n)

    def change(step: int) -> None:
        counts.copy_(numbers * 37 * (step + 1) % 200)

    def call() -> list[torch.Tensor]:
        result = ops.gemm_all_to_all(comm, x, weight, counts, most_rows=200 * n)
        rows = ops.all_to_all_rows(comm, x, counts, most_rows=200 * n)
        row = torch.arange(len(result), device=device)[:, None]
        return [torch.where(row < counts[:, comm.rank].sum(), part, 0) for part in (result, rows)]

    return change, call


def gemm_reduce(comm: Communicator) -> Case:
    """Both, of tiles that are not whole."""
    n, device = comm.world_size, comm.device
    x, weight = torch.zeros(150 * n, 64, device=device), torch.randn(300, 64, device=device)

    def call() -> list[torch.Tensor]:
        return [ops.gemm_reduce_scatter(comm, x, weight), ops.gemm_all_reduce(comm, x, weight)]

    return lambda step: x.fill_(step + comm.rank), call


def gather_gemm(comm: Communicator) -> Case:
    """Return a product whose tiles at the edges are not whole."""
    x, weight = torch.zeros(150, 96, device=comm.device), torch.randn(300, 96, device=comm.device)
    return lambda step: x.fill_(step + comm.rank), lambda: [ops.all_gather_gemm(comm, x, weight)]


def dispatch_gemm(comm: Communicator) -> Case:
    """Routing that changes between replays, to one expert a rank and to three; tiles that are not whole."""
    n, device = comm.world_size, comm.device
    x, weights = torch.randn(210 * n, 96, device=device), torch.randn(3, 300, 96, device=device)
    counts = torch.zeros(n, n, 3, dtype=torch.int64, device=device)
    plain, numbers = counts.sum(-1), torch.arange(n * n * 3, device=device).view(n, n, 3)

    def change(step: int) -> None:
        counts.copy_(numbers * 37 * (step + 1) % 70)
        plain.copy_(counts.sum(-1))

    def call() -> list[torch.Tensor]:
        found = [
            ops.all_to_all_gemm(comm, x, weight, given, most_rows=210 * n)
            for weight, given in ((weights[0], plain), (weights, counts))
        ]
        row = torch.arange(210 * n, device=device)[:, None]
        return [torch.where(row < plain[:, comm.rank].sum(), part, 0) for part in found]

    return change, call


def tokens_once(comm: Communicator) -> Case:
    """Routing that changes between replays: evenly, all for one expert, none at all; forward and backward."""
    n, device = comm.world_size, comm.device
    x = torch.randn(70, 264, device=device).bfloat16().requires_grad_()
    gates = torch.rand(70, 2, device=device, requires_grad=True)
    chosen = torch.zeros(70, 2, dtype=torch.int64, device=device)
    numbers = torch.arange(70, device=device)[:, None] + torch.tensor([0, n + 1], device=device)

    def change(step: int) -> None:
        chosen.copy_(numbers * (step % 4) % (3 * n) if step % 5 else torch.full_like(numbers, -1))

    def call() -> list[torch.Tensor]:
        routes = ops.route_experts(comm, chosen, gates, experts=3)
        rows = ops.dispatch_tokens(comm, x, routes)
        y = ops.combine_tokens(comm, rows.sin(), routes)
        return [routes.ends, rows.detach(), y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, gates))]

    return change, call


def counts_of_the_host(comm: Communicator) -> Case:
    """Those of the capture, by every way: a graph takes parts that were made before."""
    n, device = comm.world_size, comm.device
    counts = [[(37 * (sender * n + receiver) + 5) % 97 for receiver in range(n)] for sender in range(n)]
    came = sum(row[comm.rank] for row in counts)
    x, weight = torch.zeros(100 * n, 64, device=device), torch.randn(300, 64, device=device)

    def call() -> list[torch.Tensor]:
        return [
            op(comm, x, weight, counts, most_rows=100 * n, method=method)[:came].clone()
            for op in (ops.gemm_all_to_all, ops.all_to_all_gemm)
            for method in ("fused", "split", "unfused", "auto")
        ]

    return lambda step: x.fill_(step + comm.rank), call


def split(comm: Communicator) -> Case:
    """Parts by copy engines, some of them empty."""
    n, device = comm.world_size, comm.device
    counts = [[(37 * (sender * n + receiver) + 5) % 97 for receiver in range(n)] for sender in range(n)]
    counts[0][-1] = 1  # of which there are no three parts
    most = max(map(sum, (*counts, *zip(*counts, strict=True))))
    came = sum(row[comm.rank] for row in counts)
    x, weight = torch.zeros(150 * n, 64, device=device), torch.randn(300, 64, device=device)

    def call() -> list[torch.Tensor]:
        options: dict[str, Any] = {"most_rows": max(most, 150 * n), "method": "split", "pieces": 3}
        routed = ops.gemm_all_to_all(comm, x, weight, counts, **options)
        reduced = [op(comm, x, weight, method="split") for op in (ops.gemm_reduce_scatter, ops.gemm_all_reduce)]
        dispatched = ops.all_to_all_gemm(comm, x, weight, counts, **options)
        gathered = ops.all_gather_gemm(comm, x, weight, method="split", pieces=2)
        return [routed[:came], *reduced, gathered, dispatched[:came]]

    return lambda step: x.fill_(step + comm.rank), call


@on_ranks(gpu=True, timeout_s=120)
@pytest.mark.parametrize(
    "case",
    [
        *(gemv, rms_norm, embedding, embedding_backward, gemm, gemm_reduce, gather_gemm, split, dispatch_gemm),
        *(counts_of_the_host, tokens_once, gemv_of_one_token, rms_norm_pushed),
    ],
)
def test_in_a_graph(context: Context, case: MakesCase) -> None:
    in_a_graph(context, case, 12)


@on_ranks(gpu=True, timeout_s=120)
@pytest.mark.parametrize("case", [gemv, rms_norm, embedding, gemm])
def test_a_default_method_that_is_fused_in_graphs_only(context: Context, case: MakesCase) -> None:
    """Its first launch is the captured one."""
    in_a_graph(context, case, 4, only_there=True)


def in_a_graph(context: Context, case: MakesCase, replays: int, *, only_there: bool = False) -> None:
    """An operator captured once and replayed, with eager calls in between: all are what a call alone is.

    ``only_there``: it is fused in graphs only, so that its first launch is captured.
    """
    rtol, atol = (1e-3, 1e-2) if only_there else (1e-5, 1e-4)
    device = context.device
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.cuda.stream(torch.cuda.Stream()),
        Communicator(device=device, config=Config(timeout_s=30)) as comm,
    ):
        patch.setattr(operator, "choose_method", fused_in_graphs if only_there else fused_always)
        change, call = case(comm)
        wanted = []
        for step in range(replays):
            change(step)
            wanted.append([part.clone() for part in call()])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            found = call()
        for step, parts in enumerate(wanted):
            change(step)
            if step % 3 == 2:
                graph.replay()
                call()  # whatever it leaves behind, the next replay is right
            graph.replay()
            for part, other in zip(found, parts, strict=True):
                torch.testing.assert_close(part, other, rtol=rtol, atol=atol)
        del graph


def fused_in_graphs(*_: object, ways: Sequence[str], captured: bool, **__: object) -> Selection[Method]:
    """In place of the choice."""
    return Selection(Method(ways[0] if captured else UNFUSED), "a test")


@on_ranks(gpu=True, timeout_s=120)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_on_several_streams(context: Context, captured: bool) -> None:
    """Calls of split operators and of experts on streams that nobody orders, while some rank is late: buffers are used
    in turn.
    """
    device, steps = context.device, 9
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.cuda.stream(streams[0]), Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank, generator = comm.world_size, comm.rank, torch.Generator(device).manual_seed(5 + comm.rank)
        rows = 512 * n
        counts = [[rows // n] * n] * n
        weight = torch.randn(768, 256, device=device, generator=generator)
        xs = [torch.randn(rows, 256, device=device, generator=generator) for _ in range(steps)]
        chosen = torch.arange(2 * rows, device=device).view(rows, 2) % (2 * n)
        routes = ops.route_experts(comm, chosen, torch.rand(rows, 2, device=device, generator=generator), experts=2)
        calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda x: ops.gemm_reduce_scatter(comm, x, weight, method="split"),
            lambda x: ops.all_gather_gemm(comm, x, weight, method="split", pieces=2),
            lambda x: ops.all_to_all_gemm(comm, x, weight, counts, most_rows=rows, method="split"),
            lambda x: ops.combine_tokens(comm, ops.dispatch_tokens(comm, x, routes).sin(), routes),
            lambda x: ops.dispatch_tokens(comm, x, routes, wire=torch.float8_e4m3fn),
        ]
        for call in calls:
            wanted = []
            for x in xs:
                wanted.append(call(x).clone())
                comm.synchronize()

            def on_all(call: Callable[[torch.Tensor], torch.Tensor] = call) -> list[torch.Tensor]:
                found = []
                for step, x in enumerate(xs):
                    with torch.cuda.stream(streams[step % len(streams)]):
                        if step % n == rank:
                            torch.cuda._sleep(1_000_000)  # cycles: half a millisecond
                        found.append(call(x))
                return found

            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=streams[0]):
                    for stream in streams[1:]:
                        stream.wait_stream(streams[0])
                    found = on_all()
                    for stream in streams[1:]:
                        streams[0].wait_stream(stream)
                graph.replay()
                graph.replay()
            else:
                found = on_all()
            torch.cuda.synchronize()
            comm.synchronize()
            for number, (part, other) in enumerate(zip(found, wanted, strict=True)):
                torch.testing.assert_close(
                    part, other, rtol=1e-5, atol=1e-4, msg=lambda text, at=number: f"{at}: {text}"
                )


@on_ranks(gpu=fused, timeout_s=150)
def test_calls_that_c_makes_again(group: dist.ProcessGroup) -> None:
    """Calls that C makes again on tensors at other addresses and alignments, from changing streams: the bits of calls
    that Python makes.
    """
    assert load_replays().module is not None, load_replays().words
    device, steps, native = torch.get_default_device(), 100, [0]
    again = RepeatedLaunch.run

    def seen(*given: Any) -> bool:
        made = again(*given)
        native[0] += made
        return made

    with (
        pytest.MonkeyPatch.context() as patch,
        Communicator(device=device, config=Config(timeout_s=30)) as comm,
        Communicator(device=device, config=Config(timeout_s=30, native=False)) as plain,
    ):
        patch.setattr(RepeatedLaunch, "run", seen)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        generator = torch.Generator(device).manual_seed(comm.rank)
        weight, ones = torch.randn(1000, 128, device=device, generator=generator), torch.ones(128, device=device)
        tables = [torch.randn(50, 64, device=device, generator=generator) for _ in range(2)]
        offsets = torch.arange(0, 4 * 40 * 2 + 1, 4, device=device)
        calls: dict[str, Callable[[Communicator, torch.Tensor], Any]] = {
            "gemv_all_reduce": lambda comm, x: ops.gemv_all_reduce(comm, weight, x),
            "all_reduce_rms_norm": lambda comm, x: ops.all_reduce_rms_norm(comm, x, None, ones),
            "embedding_all_to_all": lambda comm, x: ops.embedding_all_to_all(comm, tables, x, offsets),
        }
        for name, call in calls.items():
            native[0] = 0
            for step in range(steps):
                with torch.cuda.stream(streams[step // 20 % 2]):
                    shift = 4 * step + (step % 7 == 6)  # floats: 16 bytes, and 4 more
                    x = torch.empty(4 * 128 + shift, device=device)[shift:].view(4, 128).normal_(generator=generator)
                    if name == "embedding_all_to_all":
                        x = (x.flatten()[: 4 * 40 * 2] * 7).long().abs() % 50
                    found, wanted = call(comm, x), call(plain, x)
                    comm.synchronize()
                    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else ((found, wanted),)
                    assert all(torch.equal(part, other) for part, other in pairs), (name, step)
                torch.cuda.synchronize()
            assert native[0] > steps // 2, (name, native)


@on_ranks(gpu=fused, timeout_s=170)
def test_products_and_collectives_are_replaced(group: dist.ProcessGroup) -> None:
    by_our_group(group, fusion_cases.replaced)


@on_ranks(gpu=fused, fresh=True, timeout_s=170)
@pytest.mark.parametrize("case", [fusion_cases.norms, fusion_cases.batches])
def test_patterns_are_replaced(group: dist.ProcessGroup, case: Callable[..., int]) -> None:
    """In processes of their own: Dynamo of torch 2.11 skips a function of a gather for good once it has met it outside
    of what it compiles."""
    by_our_group(group, case)


def by_our_group(group: dist.ProcessGroup, case: Callable[..., int]) -> None:
    """A case of the compiler pass as on CPUs, by our group: functional collectives of Gloo end the process on GPUs."""
    with sidelane_group(group) as ours:
        assert case(ours)
