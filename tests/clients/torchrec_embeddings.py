"""TorchRec: embedding bags that are sharded by tables, by rows, by columns or not at all, with their fused optimizer.

torchrun --nproc-per-node 2 tests/clients/torchrec_embeddings.py sidelane
"""

import torch
import torch.distributed as dist
from client import BACKEND, DEVICE, RANK, RANKS, finish, sums
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed import sharding_plan as by
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan

dist.init_process_group(BACKEND)  # the line
NAMES, ROWS, DIM = ("one", "two", "three"), 40, 16


class Net(torch.nn.Module):
    """Bags of three tables and a layer above them."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[n]) for n in NAMES]
        self.bags, self.over = EmbeddingBagCollection(tables, device=DEVICE), torch.nn.Linear(3 * DIM, 1, device=DEVICE)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.bags(features).values()).square().mean()


def batch(step: int) -> KeyedJaggedTensor:
    """Return bags of several lengths, other ones on every rank."""
    generator = torch.Generator().manual_seed(10 * step + RANK)
    lengths = torch.randint(0, 4, (3 * 8,), generator=generator)
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(NAMES), values, lengths=lengths).to(DEVICE)


KINDS = {
    "tables": {name: by.table_wise(rank=index % RANKS) for index, name in enumerate(NAMES)},
    "rows": dict.fromkeys(NAMES, by.row_wise()),
    "columns": dict.fromkeys(NAMES, by.column_wise(ranks=list(range(RANKS)))),
    "not": dict.fromkeys(NAMES, by.data_parallel()),
}
values = []
for kinds in KINDS.values():
    torch.manual_seed(0)
    net, sharder = Net(), EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    plan = by.construct_module_sharding_plan(net.bags, kinds, sharder, RANKS, RANKS, DEVICE.type)
    net = DistributedModelParallel(net, device=DEVICE, plan=ShardingPlan({"bags": plan}), sharders=[sharder])
    optimizer = torch.optim.SGD([p for n, p in net.named_parameters() if "over" in n], lr=0.1)
    for step in range(4):
        loss = net(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    values += sums(net.module.over.parameters())
finish(values)
