"""Lightning: DDP, with a logged value that is averaged over the ranks and a checkpoint.

torchrun --nproc-per-node 2 tests/clients/lightning_ddp.py sidelane
"""

import tempfile

import lightning
import torch
from client import BACKEND, GPUS, RANKS, batches, finish, model, sums
from lightning.pytorch.strategies import DDPStrategy


class Module(lightning.LightningModule):
    """A small model that is trained to return what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = model(), []

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.net(x) - x).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, x: torch.Tensor, index: int) -> None:
        self.log("validation", (self.net(x) - x).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


module = Module()
data = torch.utils.data.DataLoader(torch.cat(batches(8)), batch_size=8)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend=BACKEND),  # the line
        accelerator="gpu" if GPUS else "cpu",
        devices=RANKS,
        max_epochs=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, data)
    trainer.strategy.barrier()
logged = [trainer.callback_metrics[name].item() for name in ("loss", "validation")]
finish([*module.losses, *logged, *sums(module.parameters())])
