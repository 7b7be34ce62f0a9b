"""Time torchtitan's training steps with its own FSDP2 calls and with ``fsdp.enable``, in turns in one process.

Run by hand on two GPUs, with torchtitan 0.2.2 (which fits torch 2.11), datasets and tokenizers in the path:

    torchrun --nproc-per-node 2 tests/device/torchtitan_step.py --flavor 8B --layers 8 --seq 4096
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time

import torch.distributed as dist
from datasets import IterableDataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import llama3_args
from torchtitan.tools import utils
from torchtitan.train import Trainer

from sidelane import fsdp

STEPS = 4
"""Steps of a turn; the first one is not timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="8B")
    for name, number in {"layers": 8, "seq": 4096, "batch": 1, "turns": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    folder = tempfile.mkdtemp()
    words = Tokenizer(models.WordLevel({str(word): word for word in range(50)} | {"<eos>": 50}, "<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(f"{folder}/tokenizer.json")
    text = [{"text": " ".join(str((7 * row + word) % 50) for word in range(100))} for row in range(200)]
    data = IterableDataset.from_generator(lambda: iter(text))
    DATASETS["c4_test"] = DatasetConfig("", lambda path: data, lambda sample: sample["text"])
    llama3_args[options.flavor] = dataclasses.replace(llama3_args[options.flavor], n_layers=options.layers)
    given = {
        "model.name": "llama3",
        "model.flavor": options.flavor,
        "model.hf_assets_path": folder,
        "job.dump_folder": folder,
        "training.dataset": "c4_test",
        "training.seq_len": options.seq,
        "training.local_batch_size": options.batch,
        "training.steps": STEPS * options.turns * 2,
        "metrics.log_freq": 1000,
    }
    trainer = Trainer(ConfigManager().parse_args([f"--{name}={value}" for name, value in given.items()]))
    batches, times = trainer.batch_generator(trainer.dataloader), {}
    for turn in range(2 * options.turns):
        way = ("nccl", "enable")[turn % 2]
        enabled = fsdp.enable(trainer.model_parts[0]) if way == "enable" else None
        for step in range(STEPS):
            utils.device_module.synchronize()
            dist.barrier()
            began = time.perf_counter()
            trainer.step += 1
            trainer.train_step(batches)
            utils.device_module.synchronize()
            if step:
                times.setdefault(way, []).append(1e3 * (time.perf_counter() - began))
        if enabled is not None:
            assert enabled.calls and not enabled.elsewhere, enabled.elsewhere
            enabled.disable()
    if dist.get_rank() == 0:
        for way, each in times.items():
            print(f"{way:8}{statistics.median(each):9.2f} ms a step ({min(each):.2f} to {max(each):.2f})")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
