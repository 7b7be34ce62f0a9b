"""Memory of another allocator that the ranks have registered, with a driver whose memory is made up."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import everyones, on_ranks
from pieces import BYTES, MadeUpPieces, NoOtherMemory

from sidelane import Communicator, Config
from sidelane.execute.cuda.exported import ExportedMemory
from sidelane.integrations.buffers import register_segments

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no sockets without a file elsewhere")

SIZES = (3 * BYTES, 5 * BYTES, 3 * BYTES)
"""Bytes of the segments, in the order in which all ranks make them; two are of one size."""


class Numbered(NoOtherMemory):
    """Numbers of allocations as a driver gives them: in the order in which they were made."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def allocation_number(self, address: int) -> int:
        return self.addresses.index(address) + 1


def segments_of(pieces: MadeUpPieces, driver: Numbered, rank: int) -> list[torch.Tensor]:
    """Make the segments; on odd ranks they lie the other way round."""
    holes = [] if rank % 2 == 0 else [pieces.tensor(nbytes, torch.uint8) for nbytes in SIZES[:2]]
    made = []
    for nbytes in SIZES:
        made.append(pieces.tensor(nbytes, torch.uint8))  # at the lowest free place
        driver.addresses.append(made[-1].data_ptr())
        if holes:
            holes.pop()
    return made


def exporting(comm: Communicator, **options: Any) -> tuple[MadeUpPieces, Numbered]:
    """Let a communicator of CPU ranks export memory that is made up."""
    pieces, driver = MadeUpPieces(16, **options), Numbered()
    backend: Any = comm.backend
    backend.exported = ExportedMemory(driver, pieces)  # type: ignore[arg-type]
    return pieces, driver


@on_ranks(1, 2, 3)
def test_calls_need_no_staging(group: dist.ProcessGroup) -> None:
    """Collectives on registered memory, and again behind its registration."""
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        pieces, driver = exporting(comm)
        segments = segments_of(pieces, driver, rank)
        made = register_segments(
            comm, [(each.data_ptr(), each.nbytes) for each in sorted(segments, key=torch.Tensor.data_ptr)], pieces
        )
        assert (made.nbytes, made.why) == (sum(SIZES), "")
        count = 64
        output, input = segments[1].view(torch.int32)[: n * count], segments[0].view(torch.int32)[5 : 5 + count]
        total = segments[2].view(torch.float32)[3:1003]
        for registered in (True, False):
            staged = 0
            if not registered:
                comm.synchronize()
                dist.barrier(group)
                made.end()
            for step in range(4):
                output.fill_(-1)
                input.copy_(torch.arange(count, dtype=torch.int32) + 1000 * step + 100 * rank)
                total.fill_(step + rank)
                variant = ("auto", "b2b", "pcpy", "auto")[step]
                comm.all_gather(output, input, variant=variant)
                if step == 0:
                    staged = comm.preparer._stagings[0].nbytes  # before the reductions, which need some
                comm.all_reduce(total)
                expected = torch.arange(count, dtype=torch.int32) + 1000 * step
                for peer, part in enumerate(output.view(n, count)):
                    assert torch.equal(part, expected + 100 * peer), (registered, step, peer)
                assert torch.equal(total, torch.full_like(total, n * step + sum(range(n)))), (registered, step)
            assert comm.reach(output).how == ("symmetric" if registered else "staged")
            assert not registered or staged == 0
            assert registered or not pieces.mapped, "nothing of the peers' stays mapped"


@on_ranks(2)
@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("sizes", "the ranks have other segments"),
        ("mapping", "rank 1: s"),
        ("exporting", "rank 1: it was made without file descriptors"),
    ],
)
def test_what_one_rank_cannot_do_is_staged_by_all(group: dist.ProcessGroup, why: str, said: str) -> None:
    """Register what cannot be symmetric on one rank: the reason, on each of them; calls are right all the same."""
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        options = {"mapping": {"refuses": 0}, "exporting": {"shareable": False}}.get(why, {}) if rank == 1 else {}
        pieces, driver = exporting(comm, **options)
        segments = segments_of(pieces, driver, rank)
        if why == "sizes" and rank == 1:
            segments = segments[:2]
        made = register_segments(comm, [(each.data_ptr(), each.nbytes) for each in segments], pieces)
        assert made.nbytes == 0
        output, input = torch.empty(n, 8), segments[0].view(torch.float32)[:8].fill_(rank)
        comm.all_gather(output, input)
        assert torch.equal(output, torch.arange(float(n))[:, None].expand(n, 8))
        assert made.why.startswith(said) and everyones(group, made.why) == [made.why] * n
