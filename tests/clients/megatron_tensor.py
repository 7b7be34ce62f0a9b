"""Megatron-LM's core: feed-forward blocks whose layers are parallel by columns and by rows.

torchrun --nproc-per-node 2 tests/clients/megatron_tensor.py sidelane
"""

import torch
import torch.distributed as dist
from client import BACKEND, DEVICE, RANKS, finish, sums
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

dist.init_process_group(BACKEND)  # the line: the groups that Megatron makes of it are of the same kind
parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
config = ModelParallelConfig(tensor_model_parallel_size=RANKS, use_cpu_initialization=True)


def init(weight: torch.Tensor) -> None:
    """Fill a weight."""
    torch.nn.init.normal_(weight, std=0.1)


class Block(torch.nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        both = {"config": config, "init_method": init, "bias": False}
        self.up = ColumnParallelLinear(32, 128, gather_output=False, **both)
        self.down = RowParallelLinear(128, 32, input_is_parallel=True, skip_bias_add=False, **both)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)[0]))[0]


torch.manual_seed(0)
net = torch.nn.Sequential(Block(), Block()).to(DEVICE)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
data = torch.randn(8, 16, 4, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
losses = []
for x in data:
    loss = (net(x) - x.roll(1, -1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
finish([*losses, *sums(net.parameters())])
