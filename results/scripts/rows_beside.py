"""Measure the rows of a dispatch to experts beside a GEMM: by copy engines, by the kernel of DeepEP's calls, by NCCL.

    torchrun --nproc-per-node 2 results/scripts/rows_beside.py OUT.json     (CPU processes where there are no GPUs)

A token goes whole to each rank that has an expert of its: DeepEP's dispatch by a handle, whose counts the host knows.

==================  ====================================================================================================
nccl                rows are gathered by an index, ``all_to_all_single`` with split sizes
copies              rows are gathered by a kernel, ``all_to_all`` of the communicator, which is told of the GEMM: copy
                    engines carry them, and own rows, too
kernel, N SMs       ``deep_ep``'s dispatch, on so many compute units
==================  ====================================================================================================

The exchange is released ahead of the GEMM, as in the study ``layouts``; percent of ideal is that of the C3 study, with
the fastest exchange of all. Bytes are compared before and after. On GPUs it takes half a minute.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from sidelane import Communicator
from sidelane.config import COMPUTE
from sidelane.deep_ep.tokens import count_tokens, exchange_layout, send_tokens
from sidelane.ops.experts import sum_rows
from sidelane_lab.baselines.candidate import nothing_to_wait_for
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.provenance import heading
from sidelane_lab.harness.ways import Way, outcome
from sidelane_lab.pairs.beside import compare_beside
from sidelane_lab.pairs.pair import pair_streams
from sidelane_lab.pairs.workload import Gemm

UNITS = (132, 100, 64, 24) if torch.cuda.is_available() else (5, 2)
Exchange = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Options of the comparison."""

    warmup: int
    repeats: int


class Rows:
    """Tokens of this rank with their experts, the same draw on all ranks, and ways to exchange them."""

    def __init__(self, comm: Communicator, tokens: int, hidden: int, each: int, k: int) -> None:
        n, rank, draw = comm.world_size, comm.rank, torch.Generator().manual_seed(5)
        self.comm, self.rank = comm, rank
        chosen = torch.rand(n, tokens, n * each, generator=draw).topk(min(k, n * each)).indices.to(comm.device)
        goes = (chosen[..., None] // each == torch.arange(n, device=comm.device)).any(2)  # [rank, token, rank]
        self.splits = goes.sum(1).tolist()
        self.sent, self.came = self.splits[rank], [line[rank] for line in self.splits]
        self.leaving = torch.cat([goes[rank, :, peer].nonzero() for peer in range(n)]).int()
        self.arrives, self.shape = goes[..., rank], (n, tokens, hidden)
        layout = count_tokens(chosen[rank], n * each, n)
        self.handle, _ = exchange_layout(comm, layout)
        self.x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=comm.device)

    def everyone(self, seed: int) -> torch.Tensor:
        """Return the tokens of all ranks, [N, T, H]."""
        draw = torch.Generator(self.comm.device).manual_seed(seed)
        values = torch.randint(1, 32749, self.shape, generator=draw, device=self.comm.device, dtype=torch.int16)
        return values.view(torch.bfloat16)

    def ways(self) -> dict[str, Exchange]:
        """Return the exchanges by name. Collective."""
        comm, columns = self.comm, self.shape[2]
        most = max(map(sum, (*self.splits, *zip(*self.splits, strict=True))))
        symmetric = [comm.empty(most, columns, dtype=torch.bfloat16) for _ in range(2)]
        packed, arrived = symmetric[0][: sum(self.sent)], symmetric[1][: sum(self.came)]
        output, leaving = self.x.new_empty(sum(self.came), columns), self.leaving.flatten()

        def library(x: torch.Tensor) -> torch.Tensor:
            dist.all_to_all_single(output, x[leaving], self.came, self.sent)
            return output

        def copies(x: torch.Tensor) -> torch.Tensor:
            sum_rows(x, self.leaving, out=packed)
            options: dict[str, Any] = {"output_split_sizes": self.came, "input_split_sizes": self.sent}
            comm.all_to_all(arrived, packed, beside=COMPUTE, **options)
            return arrived

        def kernel(x: torch.Tensor, units: int) -> torch.Tensor:
            return send_tokens(comm, x, [], self.handle, units)[0]

        kernels = {f"kernel, {units} SMs": functools.partial(kernel, units=units) for units in UNITS}
        return {"gloo" if comm.device.type == "cpu" else "nccl": library, "copies": copies, **kernels}


class RowWay(Way):
    """One way to exchange the rows."""

    def __init__(self, rows: Rows, name: str, exchange: Exchange) -> None:
        self.label, self.as_graph, self._rows, self._exchange = name, False, rows, exchange
        self._found: torch.Tensor | None = None
        self._thread = ThreadPoolExecutor(1) if rows.comm.device.type == "cpu" else None

    def run(self) -> None:
        """Make one exchange."""
        self._found = self._exchange(self._rows.x)

    def start(self) -> Callable[[], object]:
        """Begin one; the result waits for the end on a CPU."""
        if self._thread is None:
            self.run()
            return nothing_to_wait_for
        return self._thread.submit(self.run).result

    def fill(self, seed: int) -> None:
        """Put in fresh tokens and poison the rows that came."""
        self._rows.x.copy_(self._rows.everyone(seed)[self._rows.rank])
        if self._found is not None:
            self._found.view(torch.int16).fill_(-1)

    def error(self, seed: int) -> str | None:
        """Say what is wrong with the rows."""
        right = self._rows.everyone(seed)[self._rows.arrives]
        is_right = self._found is not None and torch.equal(self._found.view(torch.int16), right.view(torch.int16))
        return None if is_right else f"rows of {self.label} are wrong"

    def close(self) -> None:
        """End the thread."""
        super().close()
        if self._thread is not None:
            self._thread.shutdown()


def measure(rank: Rank, rounds: Rounds) -> list[dict[str, Any]]:
    """Return a row for each way beside each GEMM. Collective."""
    on_cpu, meter, seeds = rank.device.type == "cpu", make_meter(rank, 60.0), itertools.count(1)
    tokens, hidden, each, k = (5, 40, 3, 2) if on_cpu else (4096, 7168, 256 // rank.world_size, 8)
    gemms = [Gemm(131, 259, 67, "float32")] if on_cpu else [Gemm(8192, 4096, 7168), Gemm(8192, 8192, 8192)]
    found = []
    with Communicator(device=rank.device) as comm:
        with meter.on_stream():
            rows = Rows(comm, tokens, hidden, each, k)
            ways = rows.ways()
        away = sum(rows.sent) - rows.sent[rank.rank]
        makers = {name: functools.partial(RowWay, rows, name, way) for name, way in ways.items()}
        for gemm in gemms:
            for one, columns in compare_beside(meter, makers, gemm, pair_streams(rank.device), seeds, rounds):
                row = {"way": one.key, "tokens": tokens, "hidden": hidden, "leaving_bytes": 2 * away * hidden}
                found.append({**row, "gemm": gemm.name, **outcome(one.rounds, one.problem), **columns})
        meter.finish("rows beside a GEMM")
    return found


def main(out: str) -> None:
    """Measure, print and write what was found."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    rank = Rank(dist.get_rank(), dist.get_world_size(), device, print)
    found = measure(rank, Rounds(1, 1) if device.type == "cpu" else Rounds(2, 9))
    if rank.rank == 0:
        for row in found:
            times = [row.get(name) for name in ("comm_us", "time_us", "percent_of_ideal")]
            print(f"{row['gemm']:18} {row['way']:16}", row["correct"], row["note"], *times, flush=True)
        Path(out).write_text(json.dumps({"heading": heading(), "rows": found}, indent=1), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
