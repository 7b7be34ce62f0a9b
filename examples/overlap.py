"""Time a GEMM and an all-gather one after the other and at once, by Sidelane and by NCCL (Gloo between CPU processes).

torchrun --nproc-per-node 2 examples/overlap.py        (--size, --mebibytes, --rounds)

On GPUs the times are those of the device: a slow host does not make them longer.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from parts.rates import ON_CPUS

from sidelane import Communicator

HELD_BY = 8
"""Products that keep a GPU busy while the host submits what is to be timed behind them: 10 ms and more."""


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    for name, on_gpu, on_cpu in (("size", 8192, 1024), ("mebibytes", 512, 64), ("rounds", 20, 7)):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    asked = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # processes that share cores
    dist.init_process_group("nccl" if gpu else "gloo")
    dtype, library = (torch.bfloat16, "NCCL") if gpu else (torch.float32, "Gloo")
    library_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
    with Communicator(device=device) as comm:
        elements = asked.mebibytes * 2**20 // dtype.itemsize // comm.world_size
        weights = comm.empty(comm.world_size, elements, dtype=dtype)  # symmetric memory: no staging copy
        shard = weights[comm.rank].fill_(comm.rank)
        same, own = torch.empty_like(weights).flatten(), shard.clone()  # for NCCL
        a = torch.randn(asked.size, asked.size, dtype=dtype, device=device)

        def gather_beside_gemm() -> None:
            work = comm.all_gather(weights, shard, async_op=True, beside="compute")
            a @ a
            work.wait()

        def library_beside_gemm() -> None:
            work = library_all_gather(same, own, async_op=True)
            a @ a
            work.wait()

        ways: dict[str, Callable[[], object]] = {
            "the GEMM alone": lambda: a @ a,
            "the all-gather alone, Sidelane": lambda: comm.all_gather(weights, shard),
            f"the all-gather alone, {library}": lambda: library_all_gather(same, own),
            f"both at once, {library}": library_beside_gemm,
            "both at once, Sidelane": gather_beside_gemm,
        }
        times, late = measure(ways, asked.rounds, comm)
        choice = comm.last_choice()
        assert torch.equal(weights.flatten(), same)
    gemm, ours, theirs, _, both = (statistics.median(some) for some in times.values())
    fastest = min(ours, theirs)
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}: Sidelane gathered the same bytes as {library}"
    )
    if dist.get_rank() == 0:
        if not gpu:
            print(ON_CPUS)
        for name, some in times.items():
            print(f"{1e3 * statistics.median(some):9.3f} ms  {name}")
        print(f"{1e3 * (gemm + fastest):9.3f} ms  one after the other, by the faster all-gather")
        if gpu:  # processes that share cores say nothing about overlap
            together, longer = gemm + fastest, max(gemm, fastest)
            percent = 100 * (together / both - 1) / (together / longer - 1)
            print(f"{percent:9.0f} percent of ideal, Sidelane: 100 is as long as the longer one, 0 one after the other")
            if late:
                print(f"late: in {late} samples the GPU waited for the host, so that they are too long")
        print(f"Sidelane took {choice}")
    dist.destroy_process_group()


def measure(
    ways: dict[str, Callable[[], object]], rounds: int, comm: Communicator
) -> tuple[dict[str, list[float]], int]:
    """Time each way in each round; the ways take turns, and a first round is not counted.

    Returns:
        The seconds of each way, and how many times a GPU began before the host had submitted everything. On GPUs the
        time is that between two events of the device: the host's time for a submission is not in it.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    late = 0
    for number in range(rounds + 1):
        for name, run in ways.items():
            comm.barrier()
            comm.synchronize()
            if comm.device.type == "cuda":
                seconds, was_late = on_device(run, comm)
                late += was_late
            else:
                began = time.perf_counter()
                run()
                seconds = time.perf_counter() - began
            if number:
                times[name].append(seconds)
    return times, late


def on_device(run: Callable[[], object], comm: Communicator) -> tuple[float, bool]:
    """Return the seconds that a GPU takes for what ``run`` submits, and whether it began too early."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    busy = torch.ones(8192, 8192, dtype=torch.bfloat16, device=comm.device)
    for _ in range(HELD_BY):  # the host submits all that follows meanwhile
        busy @ busy
    comm.barrier()  # of the devices: none starts its clock before all are there
    start.record()
    run()
    end.record()
    was_late = start.query()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, was_late


if __name__ == "__main__":
    main()
