# ruff: noqa: B023, E731, E741  (functions of a turn are called in that turn only)
"""Times of the jobs of docs/lab/anchors.md between two GPUs, in chains and in graphs of one call.

python results/scripts/anchors.py decode|attention|small SECONDS     (rows to $OUT/anchors-<part>.json and as ROW lines)

Every way is compared with a reference before it is timed. Samples alternate; a time is the median of seven, of the
slowest rank.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from sidelane import Communicator, ops

PART, LIMIT = sys.argv[1], float(sys.argv[2])
BEGAN = time.time()
ROWS = []


def main(rank):
    """Measure one part on this rank."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29541"
    )
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    comm = Communicator()
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)

    def say(*words):
        if rank == 0:
            print(*words, flush=True)

    def row(**one):
        ROWS.append(one)
        say("ROW", json.dumps(one))

    def worst(values):
        t = torch.tensor(values, device="cuda", dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.tolist()

    def late():
        return worst([time.time() - BEGAN])[0] > LIMIT

    def graph_of(call, calls):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        g.capture_begin(capture_error_mode="thread_local")
        for _ in range(calls):
            call()
        g.capture_end()
        return g

    def sample(run, calls):
        dist.barrier()
        torch.cuda.synchronize()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        comm.barrier()
        a.record()
        run()
        b.record()
        torch.cuda.synchronize()
        return a.elapsed_time(b) * 1e3 / calls

    def both(calls_of, op, shape, right=True, chain=20, replays=1000):
        """Time each way in a chain of 20 calls, and in a graph of one call with 1,000 replays."""
        for launch in ("graph", "single"):
            graphs = {n: graph_of(c, chain if launch == "graph" else 1) for n, c in calls_of.items()}
            found = {n: [] for n in graphs}
            for turn in range(8):
                for n, g in graphs.items():
                    us = (
                        sample(g.replay, chain)
                        if launch == "graph"
                        else sample(lambda: [g.replay() for _ in range(replays)], replays)
                    )
                    if turn:
                        found[n].append(us)
            for n, us in zip(found, worst([statistics.median(v) for v in found.values()]), strict=True):
                row(
                    op=op,
                    shape=shape,
                    implementation=n,
                    schedule="",
                    launch=launch,
                    time_us=round(us, 3),
                    correct=right,
                )
            del graphs

    def close(x, y, tol):
        return bool((x.double() - y.double()).abs().max() <= tol * max(1e-6, float(y.double().abs().max())))

    if PART == "small":
        for nbytes in (512, 8192, 65536, 262144, 1 << 20, 4 << 20):
            if late():
                say("LATE")
                break
            x = comm.empty(nbytes // 2, dtype=torch.bfloat16)
            n = torch.empty_like(x)
            x.copy_(torch.randn(nbytes // 2))
            n.copy_(x)
            want = n.clone()
            dist.all_reduce(want)
            comm.all_reduce(x)
            good = close(x, want, 2e-2)
            x.zero_()
            n.zero_()
            both(
                {"auto": lambda: comm.all_reduce(x), "nccl": lambda: dist.all_reduce(n)},
                "all_reduce",
                f"{nbytes} bytes",
                good,
                replays=500,
            )
        for t, h in ((6, 6144), (138, 6144), (128, 8192)):
            if late():
                say("LATE")
                break
            x, r, w = (
                torch.randn(t, h).cuda().bfloat16(),
                torch.randn(t, h, generator=torch.Generator().manual_seed(1)).cuda().bfloat16(),
                torch.ones(h).cuda().bfloat16(),
            )
            total = x.float()
            dist.all_reduce(total)
            total += r.float()
            want = F.rms_norm(total, (h,), w.float(), 1e-6)
            y, _ = ops.all_reduce_rms_norm(comm, x, r, w)
            good = close(y, want, 2e-2)

            def plain():
                z = x.clone()
                dist.all_reduce(z)
                z += r
                F.rms_norm(z, (h,), w, 1e-6)

            both(
                {"auto": lambda: ops.all_reduce_rms_norm(comm, x, r, w), "nccl": plain},
                "all_reduce_rms_norm",
                f"{t}x{h}",
                good,
                replays=500,
            )
        for t in (1, 8, 64, 512):
            if late():
                say("LATE")
                break
            x, w = torch.randn(t, 8192).cuda().bfloat16(), torch.ones(8192).cuda().bfloat16()
            q, s = torch.empty(t, 8192, device="cuda", dtype=torch.float8_e4m3fn), torch.empty(t, 1, device="cuda")
            y, _ = ops.all_reduce_rms_norm(comm, x, None, w, quantized=q, scale=s)
            good = close(q.float() * s, y.float(), 0.08)

            def unfused8():
                z = x.clone()
                dist.all_reduce(z)
                n = F.rms_norm(z, (8192,), w, 1e-6).float()
                sc = n.abs().amax(1, keepdim=True) / 448
                q.copy_(n / sc)

            both(
                {"auto": lambda: ops.all_reduce_rms_norm(comm, x, None, w, quantized=q, scale=s), "nccl": unfused8},
                "all_reduce_rms_norm, float8",
                f"{t}x8192",
                good,
                replays=300,
            )
    elif PART == "decode":
        for t, h, d in (
            (1, 32, 128),
            (8, 32, 128),
            (1, 128, 128),
            (8, 64, 128),
            (32, 64, 128),
            (64, 32, 128),
            (64, 128, 128),
            (1, 128, 512),
            (16, 128, 512),
            (64, 128, 512),
            (5, 33, 128),
        ):
            if late():
                say("LATE")
                break
            p, l = torch.randn(t, h, d).cuda().bfloat16(), torch.randn(t, h).cuda() * 3
            ps, ls = [torch.empty_like(p) for _ in range(2)], [torch.empty_like(l) for _ in range(2)]
            dist.all_gather(ps, p)
            dist.all_gather(ls, l)
            lw = torch.stack(ls).double()
            top = torch.logsumexp(lw, 0)
            want = ((lw - top).exp()[..., None] * torch.stack(ps).double()).sum(0)
            own = torch.arange(h).tensor_split(2)[rank].cuda()
            calls, good = {}, {}
            for m in ("fused", "unfused"):
                o, ol = ops.combine_attention(comm, p, l, method=m)
                torch.cuda.synchronize()
                good[m] = close(o, want[:, own], 2e-2) and close(ol, top[:, own], 1e-4)
                calls[m] = lambda m=m: ops.combine_attention(comm, p, l, method=m)
            if h % 2 == 0:
                gl, ro = (
                    torch.empty(2 * t, h, device="cuda"),
                    torch.empty(h // 2, t, d, device="cuda", dtype=torch.bfloat16),
                )

                def nccl():  # vLLM's cp_lse_ag_out_rs: all-gather of LSEs, correction, reduce-scatter of heads
                    dist.all_gather_into_tensor(gl, l)
                    factor = (l - gl.view(2, t, h).logsumexp(0)).exp()
                    fixed = (p * factor[..., None].to(p.dtype)).transpose(0, 1).contiguous()
                    dist.reduce_scatter_tensor(ro, fixed)

                nccl()
                torch.cuda.synchronize()
                good["nccl"] = close(ro.transpose(0, 1), want[:, own], 3e-2)
                sl, sf, so = (
                    comm.empty(2 * t, h, dtype=torch.float32),
                    comm.empty(h, t, d, dtype=torch.bfloat16),
                    comm.empty(h // 2, t, d, dtype=torch.bfloat16),
                )

                def ours():  # the same by our two collectives
                    comm.all_gather(sl, l)
                    factor = (l - sl.view(2, t, h).logsumexp(0)).exp()
                    torch.mul(p.transpose(0, 1), factor.t()[..., None].to(p.dtype), out=sf)
                    comm.reduce_scatter(so, sf)

                ours()
                calls |= {"nccl": nccl, "two of ours": ours}
            say("CORRECT", t, h, d, good)
            both(calls, "combine_attention", f"{t}x{h}x{d}", all(good.values()), replays=300)
    else:
        for label, S, H, K, causal in (("wan", 32760, 40, 40, False), ("llama-16k", 16384, 32, 8, True)):
            make = lambda h: torch.randn(1, S // 2, h, 128, device="cuda", dtype=torch.bfloat16)
            q, k, v = make(H), make(K), make(K)
            grad = torch.randn_like(q)
            qs = [t.clone().requires_grad_() for t in (q, k, v)]

            def by_nccl(q, k, v):
                def swap(t, back=False):
                    if back:
                        t = t.reshape(1, 2, S // 2, -1, 128).permute(1, 0, 2, 3, 4).contiguous()
                    else:
                        t = t.reshape(1, S // 2, 2, -1, 128).permute(2, 0, 1, 3, 4).contiguous()
                    o = torch.empty_like(t)
                    dist.all_to_all_single(o, t)
                    return (
                        o.permute(1, 2, 0, 3, 4).reshape(1, S // 2, -1, 128)
                        if back
                        else o.permute(1, 0, 2, 3, 4).reshape(1, S, -1, 128)
                    )

                a, b, c = (swap(t).transpose(1, 2) for t in (q, k, v))
                return swap(
                    F.scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=H != K).transpose(1, 2), True
                )

            ways = {"auto": lambda a, b, c: ops.sequence_parallel_attention(comm, a, b, c, is_causal=causal)}
            with torch.no_grad():
                right = by_nccl(q, k, v)
                good = {n: close(w(q, k, v), right, 1e-2) for n, w in ways.items()}
            say("CORRECT", label, good)
            half = lambda h: torch.randn(1, h // 2, S, 128, device="cuda", dtype=torch.bfloat16)
            ha, hb, hc = half(H), half(K), half(K)
            forward = {n: (lambda w=w: w(q, k, v)) for n, w in ways.items()} | {
                "nccl": lambda: by_nccl(q, k, v),
                "none": lambda: F.scaled_dot_product_attention(ha, hb, hc, is_causal=causal, enable_gqa=H != K),
            }
            train = {n: (lambda w=w: torch.autograd.grad(w(*qs), qs, grad)) for n, w in ways.items()}

            def time_all(calls, kind, launch, rounds):
                if late():
                    say("LATE")
                    return
                found = {n: [] for n in calls}
                for turn in range(rounds + 1):
                    for n, c in calls.items():
                        us = sample(c, 1)
                        if turn:
                            found[n].append(us)
                for n, us in zip(found, worst([statistics.median(u) for u in found.values()]), strict=True):
                    row(
                        op=f"attention, {kind}",
                        shape=label,
                        implementation=n,
                        schedule="",
                        launch=launch,
                        time_us=round(us, 1),
                        correct=good.get(n, True),
                    )

            def no_grad(c):
                def run():
                    with torch.no_grad():
                        c()

                return run

            forward = {n: no_grad(c) for n, c in forward.items()}
            time_all(forward, "forward", "eager", 7)
            graphs = {}
            for n, c in forward.items():
                try:
                    graphs[n] = graph_of(c, 1).replay
                except Exception as error:
                    say("NO GRAPH", label, n, str(error)[:300])
            time_all(graphs, "forward", "graph", 7)
            del graphs
            time_all(train, "forward and backward", "eager", 5)
            graphs = {}
            for n, c in train.items():
                try:
                    graphs[n] = graph_of(c, 1).replay
                except Exception as error:
                    say("NO GRAPH", label, n, str(error)[:300])
            time_all(graphs, "forward and backward", "graph", 5)
            del graphs, qs, q, k, v, grad
            torch.cuda.empty_cache()
    if rank == 0:
        with open(os.path.join(os.environ.get("OUT", "/tmp"), f"anchors-{PART}.json"), "w") as file:
            json.dump(ROWS, file)
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
