"""Megatron-LM's core: training of a small GPT by its distributed optimizer, as `sidelane clients` times it.

torchrun --nproc-per-node 2 tests/clients/megatron_train.py sidelane megatron     (or -tensor, -sequence, -experts)
"""

import sys

import torch
import torch.distributed as dist
from client import BACKEND, DEVICE, RANK, finish, sums
from patches import megatron_on_cpus

from sidelane_lab.studies.clients.cases import MODELS, TINY, ClientCase
from sidelane_lab.studies.clients.trainers import MegatronClient

megatron_on_cpus()
dist.init_process_group(BACKEND)
kind = sys.argv[2] if len(sys.argv) > 2 else "megatron"
is_divided = kind in ("megatron-tensor", "megatron-sequence")  # ranks that divide layers see the same tokens
client = MegatronClient(ClientCase(kind, MODELS[TINY], 2, 16, "AdamW"), BACKEND, "group", DEVICE, None)
generator = torch.Generator().manual_seed(0 if is_divided else RANK)
losses = []
for _ in range(4):
    tokens = torch.randint(MODELS[TINY].vocabulary, (2, 16), generator=generator).to(DEVICE)
    losses.append(client.step(tokens, torch.Tensor.backward).item())
found = [*losses, *sums(client.model.parameters())]
client.close()
finish(found)
