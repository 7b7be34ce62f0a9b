"""Lightning: FSDP2 by its ModelParallelStrategy, with a sharded checkpoint that is saved and loaded.

torchrun --nproc-per-node 2 tests/clients/lightning_fsdp2.py sidelane
"""

import tempfile

import lightning
import torch
import torch.distributed as dist
from client import BACKEND, GPUS, RANKS, batches, enable, finish, model, sums
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Module(lightning.LightningModule):
    """A small model that is trained to return what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = model(), []

    def configure_model(self) -> None:
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        enable(self.trainer.strategy.model)

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.net(x) - x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


module = Module()
data = torch.utils.data.DataLoader(torch.cat(batches(8)), batch_size=8)
trainer = lightning.Trainer(
    strategy=ModelParallelStrategy(RANKS, 1, process_group_backend=BACKEND),  # the line
    accelerator="gpu" if GPUS else "cpu",
    devices=RANKS,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, data)
saved, folder = sums(module.parameters()), [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
trainer.save_checkpoint(f"{folder[0]}/model.ckpt")
for parameter in module.parameters():
    torch.nn.init.zeros_(parameter.to_local())
trainer.strategy.load_checkpoint(f"{folder[0]}/model.ckpt")
assert sums(module.parameters()) == saved
finish([*module.losses, *saved])
