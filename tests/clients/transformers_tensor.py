"""Hugging Face's Llama by ``tp_plan="auto"``: training, and generation of some tokens with a cache, eager and compiled.

torchrun --nproc-per-node 2 tests/clients/transformers_tensor.py sidelane
"""

import os
import tempfile

import torch
import torch.distributed as dist
from client import BACKEND, DEVICE, RANK, RANKS, finish, sums
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

# Without these lines two runs of the compiled model differ on GPUs with NCCL as well (seen on two H200s), so that a
# comparison of backends would mean nothing.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)

dist.init_process_group(BACKEND)  # the line
mesh = init_device_mesh(DEVICE.type, (RANKS,))
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
words = torch.randint(64, (8, 4, 16), generator=torch.Generator().manual_seed(1)).to(DEVICE)

with tempfile.TemporaryDirectory() as own:
    folder = [own]
    dist.broadcast_object_list(folder)
    if RANK == 0:
        LlamaForCausalLM(config).save_pretrained(own)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto", device_mesh=mesh)
    dist.barrier()

values = []
for call in (model, torch.compile(model, dynamic=False)):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for batch in words:
        loss = call(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    with torch.no_grad():
        values.append(call(input_ids=words[0], use_cache=False).logits.double().sum().item())
written = model.generate(words[0], max_new_tokens=6, do_sample=False, pad_token_id=0)
finish([*values, *written.flatten().tolist(), *sums(model.parameters())])
