"""DeepSpeed: ZeRO stages 1, 2 and 3, with a checkpoint that is saved and loaded.

torchrun --nproc-per-node 2 tests/clients/deepspeed_zero.py sidelane
"""

import tempfile

import deepspeed
import torch
import torch.distributed as dist
from client import BACKEND, DEVICE, batches, finish, model
from patches import deepspeed_on_cpus

deepspeed_on_cpus()
deepspeed.init_distributed(dist_backend=BACKEND, verbose=False)  # the line
values = []
for stage in (1, 2, 3):
    net = model()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "reduce_bucket_size": 1 << 20,  # elements; a pool around the engine's construction holds the bucket
                "overlap_comm": False,
            },
        },
    )

    def train(engine: deepspeed.DeepSpeedEngine = engine) -> list[float]:
        losses = []
        for x in batches(4):
            loss = (engine(x.to(DEVICE)) - x.to(DEVICE)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    values += train()
    engine.save_checkpoint(folder[0])
    after = train()
    engine.load_checkpoint(folder[0])
    assert train() == after
    values += after
    with deepspeed.zero.GatheredParameters(list(engine.parameters()), enabled=stage == 3):
        values += [parameter.detach().double().sum().item() for parameter in engine.parameters()]
finish(values)
