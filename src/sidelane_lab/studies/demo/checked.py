"""Every collective between processes of this machine, with real bytes, each output compared with what it must be."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import torch

from sidelane.cli.launch import Rank
from sidelane.config import BUILTIN, Config
from sidelane.session import Communicator

COUNTS = (1, 1000, 100_000)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
ROUNDS = 4


@dataclasses.dataclass(slots=True)
class Checked:
    """What became of one collective, on rank 0.

    Attributes:
        name: of the collective.
        calls: that were made.
        nbytes: of outputs that were compared.
        wrong: outputs that were not what they must be.
        seconds: that its calls and comparisons took.
    """

    name: str
    calls: int = 0
    nbytes: int = 0
    wrong: int = 0
    seconds: float = 0.0

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Count an output."""
        self.nbytes += found.nbytes
        self.wrong += not torch.equal(found, expected)


def check(rank: Rank) -> list[Checked]:
    """Make all calls on one rank. Ranks' values differ by rank, round and element, and are small: sums are exact."""
    found: dict[str, Checked] = {}
    with Communicator(device=rank.device, config=Config(timeout_s=60, profile=BUILTIN)) as comm:
        n, me = comm.world_size, comm.rank
        for number, (dtype, count) in enumerate((dtype, count) for dtype in DTYPES for count in COUNTS):
            for seed in range(number, number + ROUNDS):
                root = seed % n
                shards = [_values(of, count, seed, dtype) for of in range(n)]
                whole = [_values(of, n * count, seed, dtype) for of in range(n)]
                total = torch.stack(whole).sum(0).to(dtype)
                own = slice(me * count, (me + 1) * count)
                output, part = torch.empty(n * count, dtype=dtype), torch.empty(count, dtype=dtype)
                sent, given = whole[me].clone(), whole[me] if me == root else None
                # What to call, where the result is to be, and what it must be; None where this rank gets none.
                cases: dict[str, tuple[Callable[[], object], torch.Tensor, torch.Tensor | None]] = {
                    "all_gather": (partial(comm.all_gather, output, shards[me]), output, torch.cat(shards)),
                    "all_to_all": (
                        partial(comm.all_to_all, output, whole[me]),
                        output,
                        torch.cat([data[own] for data in whole]),
                    ),
                    "reduce_scatter": (partial(comm.reduce_scatter, part, whole[me]), part, total[own]),
                    "all_reduce": (partial(comm.all_reduce, whole[me], output=output), output, total),
                    "broadcast": (partial(comm.broadcast, sent, root=root), sent, whole[root]),
                    "scatter": (partial(comm.scatter, part, given, root=root), part, whole[root][own]),
                    "gather": (
                        partial(comm.gather, output if me == root else None, shards[me], root=root),
                        output,
                        torch.cat(shards) if me == root else None,
                    ),
                }
                for name, (call, target, expected) in cases.items():
                    row = found.setdefault(name, Checked(name))
                    began = time.perf_counter()
                    call()
                    row.calls += 1
                    if expected is not None:
                        row.compare(target, expected)
                    row.seconds += time.perf_counter() - began
        wrong = torch.tensor([row.wrong for row in found.values()])
        comm.all_reduce(wrong)
    for row, count in zip(found.values(), wrong.tolist(), strict=True):
        row.wrong = int(count)
    return list(found.values())


def _values(of: int, length: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(length) * 7 + 11 * of + seed) % 13).to(dtype)
