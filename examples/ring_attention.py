"""Attend to a sequence whose positions lie on several ranks by ring attention, made of programs of one's own.

At turn t a rank attends to the block of keys and values of the rank t before it (Liu et al., "Ring Attention with
Blockwise Transformers", 2023), which comes from that rank by copy engines while it attends to the block before::

    copy engine   block 1        | block 2          | block 3
    compute       the own block  | attend to 1      | attend to 2      | attend to 3

Results are merged by the logarithms of the sums of their exponentials. In the backward pass the blocks come again, and
the gradients of a block go back to its owner, which adds them in float32. Positions are in zigzag order: of 2 N parts,
rank r has the parts r and 2 N - 1 - r, so that a causal mask leaves every rank the same work.

torchrun --nproc-per-node 2 examples/ring_attention.py     (--tokens, --heads; CPU processes where there are no GPUs)
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidelane import Communicator
from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait

HEAD = 64  # elements of a head

aten = torch.ops.aten


def rotation(turn: int, coming: list[int], nbytes: int) -> Program:
    """Rank r gets the first bytes, ``coming[r]`` of them, of ``sent`` of rank r - turn into its ``came``."""
    ranks, queues, results = len(coming), [], []
    for rank in range(ranks):
        source, to = (rank - turn) % ranks, (rank + turn) % ranks
        here = Span(rank, "came", 0, coming[rank])
        commands: list[Command] = [
            Signal(Flag(source, 0), EPOCH),  # "my buffer is free", to the rank that writes it
            Wait(Flag(rank, 0), EPOCH),
            Copy(Span(to, "came", 0, coming[to]), Span(rank, "sent", 0, coming[to])),
            Signal(Flag(to, 1), EPOCH),  # "your block is there"
            Wait(Flag(rank, 1), EPOCH),
        ]
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
        results.append(Result(here, (Span(source, "sent", 0, coming[rank]),)))
    contract = Contract.of(f"rotation by {turn}", {"sent": [nbytes] * ranks, "came": [nbytes] * ranks}, results)
    return Program(contract, "push", tuple(queues), staging_bytes=(0,) * ranks, flag_count=2)


class Ring:
    """Buffers and programs for blocks of one shape: [positions, keys and values, batch, heads, HEAD], causal.

    The first positions of a block are its first bytes, so that no more is sent than the mask leaves.
    """

    def __init__(self, comm: Communicator, positions: int, batch: int, heads: int, dtype: torch.dtype) -> None:
        self.comm, self.positions = comm, positions
        ranks, shape = comm.world_size, (positions, 2, batch, heads, HEAD)
        self.own = torch.empty(shape, dtype=dtype, device=comm.device)
        self.sums = torch.empty_like(self.own, dtype=torch.float32)
        self.inboxes, self.returned = ([comm.empty(shape, dtype=dtype) for _ in range(2)] for _ in range(2))
        self.outboxes = [torch.empty_like(self.own) for _ in range(2)]
        self.there, self.back = [], []
        for turn in range(1, ranks):
            tensors = {"sent": self.own, "came": self.inboxes[turn % 2]}
            self.there.append(self.load(turn, [self.part(rank, turn)[1] for rank in range(ranks)], tensors))
            tensors = {"sent": self.outboxes[turn % 2], "came": self.returned[turn % 2]}
            self.back.append(self.load(-turn, [self.part(rank + turn, turn)[1] for rank in range(ranks)], tensors))

    def load(self, turn: int, counts: list[int], tensors: dict[str, Tensor]) -> Any:
        """A program that is proved by all ranks, and then bound to their tensors."""
        row = self.own[0].nbytes
        return self.comm.load(rotation(turn, [count * row for count in counts], self.own.nbytes), tensors)

    def part(self, rank: int, turn: int) -> tuple[int, int]:
        """The first of a rank's queries that attend to the block of a turn, and how many of its positions they need."""
        source = (rank - turn) % self.comm.world_size
        if source == rank % self.comm.world_size:
            return 0, self.positions
        if source < rank % self.comm.world_size:  # its late positions come after all of this rank's
            return 0, self.positions // 2
        return self.positions // 2, self.positions  # this rank's early positions come before all of its

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
        """Turns, their parts and their blocks; the next block travels while the caller computes with one."""
        for number, tensor in enumerate((k, v)):
            self.own[:, number].copy_(tensor.permute(2, 0, 1, 3))
        work = None
        for turn in range(self.comm.world_size):
            if work is not None:
                work.wait()
            if turn + 1 < self.comm.world_size:
                work = self.there[turn](async_op=True)
            yield turn, *self.part(self.comm.rank, turn), self.inboxes[turn % 2] if turn else self.own

    def add(self, turn: int, work: Any) -> None:
        """Add the gradients of the own block that came back at a turn."""
        if work is not None:
            work.wait()
            count = self.part(self.comm.rank + turn, turn)[1]
            self.sums[:count] += self.returned[turn % 2][:count]

    def close(self) -> None:
        for program in (*self.there, *self.back):
            program.close()


def keys_and_values(block: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Views [batch, heads, count, HEAD] of a block's first keys and values."""
    key, value = block[:count].permute(1, 2, 3, 0, 4)
    return key, value


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the positions of all ranks.

    Tensors are [batch, heads, positions, HEAD].
    """

    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total, logarithms = torch.zeros_like(q, dtype=torch.float32), q.new_zeros(q.shape[:3], dtype=torch.float32)
        for turn, first, count, block in ring.blocks(k, v):
            found, logarithm = attend(q[:, :, first:], *keys_and_values(block, count), turn == 0)
            if turn == 0:
                total, logarithms = found.float(), logarithm
                continue
            sums, before = total[:, :, first:], logarithms[:, :, first:]
            sums.lerp_(found.float(), torch.sigmoid(logarithm - before).unsqueeze(-1))
            before.copy_(torch.logaddexp(before, logarithm))
        result = total.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, result, logarithms)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ring, (q, k, v, result, logarithms), grad, sent = ctx.ring, ctx.saved_tensors, grads[0], None
        of_q = torch.zeros_like(q, dtype=torch.float32)
        for turn, first, count, block in ring.blocks(k, v):
            mine = [one[:, :, first:].contiguous() for one in (grad, q, result, logarithms)]
            found = gradients(*mine, *keys_and_values(block, count), turn == 0)
            of_q[:, :, first:] += found[0]
            target = ring.outboxes[turn % 2] if turn else ring.sums
            for place, of_one in zip(keys_and_values(target, count), found[1:], strict=True):
                place.copy_(of_one)
            if turn:
                work = ring.back[turn - 1](async_op=True)
                ring.add(turn - 1, sent)  # while that of this turn travels
                sent = work
        ring.add(ring.comm.world_size - 1, sent)
        of_k, of_v = (one.to(q.dtype).contiguous() for one in keys_and_values(ring.sums, ring.positions))
        return None, of_q.to(q.dtype), of_k, of_v


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to a block, and the logarithms of the sums of its exponentials, by PyTorch's flash attention."""
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def gradients(
    grad: Tensor, q: Tensor, result: Tensor, logarithms: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that a block gives q, k and v, of the result and the logarithms of all blocks."""
    given = grad, q, k, v, result, logarithms
    if q.is_cuda:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a generator for dropout; not read
        lengths = None, None, q.shape[2], k.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(*given, *lengths, 0.0, causal, state, state[0])
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384 if gpu else 64, help="positions of all ranks")
    parser.add_argument("--heads", type=int, default=16 if gpu else 3)
    sizes = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if sizes.tokens % (2 * ranks):
        raise SystemExit(f"--tokens (value={sizes.tokens}, allowed=multiples of {2 * ranks}, twice the ranks)")

    draw = torch.Generator(device).manual_seed(0)  # the whole sequence on every rank, which keeps its part
    shape, dtype = (4, 2, sizes.heads, sizes.tokens, HEAD), torch.bfloat16 if gpu else torch.float32
    q, k, v, grad = torch.randn(shape, generator=draw, device=device, dtype=dtype)
    parts = torch.arange(sizes.tokens, device=device).chunk(2 * ranks)
    own = torch.cat((parts[rank], parts[2 * ranks - 1 - rank]))
    inputs = [tensor[:, :, own].contiguous().requires_grad_() for tensor in (q, k, v)]
    with Communicator(device=device) as comm:
        ring = Ring(comm, len(own), shape[1], sizes.heads, dtype)
        for _ in range(2):  # buffers are used again
            result = RingAttention.apply(ring, *inputs)
            found = [result, *torch.autograd.grad(result, inputs, grad[:, :, own])]
        comm.synchronize()
        ring.close()

    whole = [tensor.requires_grad_() for tensor in (q, k, v)]
    result = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    wanted = [result, *torch.autograd.grad(result, whole, grad)]
    for one, other in zip(found, wanted, strict=True):
        difference = torch.linalg.vector_norm(one - other[:, :, own]) / torch.linalg.vector_norm(other[:, :, own])
        assert difference < (2e-2 if gpu else 1e-5), difference
    print(f"rank {rank} of {ranks} on {device}: results and gradients as with the whole sequence on one rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
