"""Train a small Llama with DDP on this repository's docs, without Sidelane and with it: one line of difference.

torchrun --nproc-per-node 2 examples/llama_ddp.py        (--dim, --layers, --heads, --length, --batch, --steps,
                                                          --tokenizer, --vocabulary)
"""

import contextlib

import torch
import torch.distributed as dist
from parts.llama import Llama, begin, options, train
from parts.rates import ON_CPUS
from parts.text import read
from torch.nn.parallel import DistributedDataParallel

from sidelane import ddp


def main() -> None:
    gpu = torch.cuda.is_available()
    sizes, device = options(__doc__, gpu), begin()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text, vocabulary, words = read(sizes.tokenizer, sizes.vocabulary)
    rates, losses = [], []
    for with_sidelane in (False, True):
        torch.manual_seed(0)
        with device:
            model = Llama(vocabulary, sizes.dim, sizes.layers, sizes.heads)
        model = DistributedDataParallel(model.bfloat16() if gpu else model)
        with ddp.enable(model) if with_sidelane else contextlib.nullcontext():  # the one line
            rate, course = train(model, text, sizes, device, torch.cuda.synchronize if gpu else lambda: None)
        rates.append(rate)
        losses.append(course)
    torch.testing.assert_close(*losses, rtol=1e-2 if gpu else 1e-5, atol=0)
    assert losses[0][-1] < losses[0][0], losses[0]
    print(
        f"rank {rank} of {world_size} on {device}: loss {losses[1][0]:.3f} to {losses[1][-1]:.3f}, the same both times"
    )
    if rank == 0:
        print(words)
        if not gpu:
            print(ON_CPUS)
        print(f"tokens a second: {rates[0]:.0f} without Sidelane, {rates[1]:.0f} with")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
