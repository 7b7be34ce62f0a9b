"""torchtitan: its trainer with a small Llama, by FSDP2, tensor or context parallel, with checkpoints.

torchrun --nproc-per-node 2 tests/clients/torchtitan_train.py sidelane fsdp        (or tensor, context)
"""

import sys
import tempfile

import torch.distributed as dist
from client import BACKEND, DEVICE, ENABLE, RANKS, finish, sums
from patches import torchtitan_on_cpus

dist.Backend.default_device_backend_map[DEVICE.type] = BACKEND  # the line
torchtitan_on_cpus()

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3.config_registry import llama3_debugmodel

kind = sys.argv[2] if len(sys.argv) > 2 else "fsdp"
text = [{"text": " ".join(str((7 * row + word) % 50) for word in range(100))} for row in range(200)]
DATASETS["c4_test"] = DatasetConfig("", lambda path: Dataset.from_list(text), lambda sample: sample["text"])
folder = tempfile.mkdtemp()
words = Tokenizer(models.WordLevel({str(word): word for word in range(50)} | {"<eos>": 50}, "<eos>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.save(f"{folder}/tokenizer.json")

config = llama3_debugmodel()
config.hf_assets_path, config.dump_folder = folder, folder
config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 256, 4
config.training.disable_cuda_graphs, config.validator.enable, config.debug.seed = True, False, 1
config.checkpoint.enable, config.checkpoint.interval = True, 2
config.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch
if kind != "fsdp":
    setattr(config.parallelism, f"{kind}_parallel_degree", RANKS)
config.override.imports = ["sidelane.torchtitan.fsdp"] if ENABLE else []
trainer, losses = config.build(), []
log = trainer.metrics_processor.log


def keep(step: int, *means: float, **more: object) -> None:
    """Keep the losses and the norm of the gradients that torchtitan logs."""
    losses.extend(means[:3])
    log(step, *means, **more)


trainer.metrics_processor.log = keep
trainer.train()
finish([*losses, *sums(parameter for part in trainer.model_parts for parameter in part.parameters())])
