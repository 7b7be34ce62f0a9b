"""accelerate: DDP, or FSDP2 by its plug-in, a checkpoint that is saved and loaded, metrics that are gathered.

torchrun --nproc-per-node 2 tests/clients/accelerate_train.py sidelane ddp
torchrun --nproc-per-node 2 tests/clients/accelerate_train.py sidelane fsdp2
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs, broadcast_object_list
from client import BACKEND, GPUS, batches, enable, finish, model, sums
from patches import accelerate_fsdp2_on_cpus

handlers = [InitProcessGroupKwargs(backend=BACKEND)]  # the line
if sys.argv[2:] == ["fsdp2"]:
    accelerate_fsdp2_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = Accelerator(fsdp_plugin=plugin, kwargs_handlers=handlers)
elif GPUS:
    accelerator = Accelerator(kwargs_handlers=handlers)
else:
    dist.init_process_group(BACKEND)  # the line: on CPUs accelerate takes no name but "gloo" for a group of its own
    accelerator = Accelerator(cpu=True)

net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(torch.cat(batches(8)), batch_size=8)
net, optimizer, data = accelerator.prepare(net, optimizer, data)
if accelerator.is_fsdp2:
    enable(net)


def train() -> list[float]:
    """Return the losses of an epoch, each averaged over the ranks."""
    losses = []
    for x in data:
        with accelerator.accumulate(net):
            loss = (net(x) - x).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    return losses


losses = train()
folder = [tempfile.mkdtemp() if accelerator.is_main_process else None]
broadcast_object_list(folder)
accelerator.save_state(folder[0])
saved = sums(net.parameters())
after = train()
accelerator.load_state(folder[0])
assert sums(net.parameters()) == saved
finish([*losses, *after, *saved])
