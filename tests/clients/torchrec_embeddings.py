"""TorchRec: embedding bags that are sharded by tables, by rows, by columns or not at all, with their fused optimizer.

torchrun --nproc-per-node 2 tests/clients/torchrec_embeddings.py sidelane
"""

import torch
import torch.distributed as dist
from client import BACKEND, DEVICE, RANKS, finish, sums
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed import sharding_plan as by
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan
from torchrec_parts import NAMES, Net, batch

dist.init_process_group(BACKEND)  # the line
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
