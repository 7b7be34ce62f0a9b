"""Hugging Face's Trainer: a small Llama, with evaluation, gradient accumulation and a checkpoint to go on from.

torchrun --nproc-per-node 2 tests/clients/transformers_trainer.py sidelane
"""

import tempfile

import torch
import torch.distributed as dist
from client import BACKEND, GPUS, finish, sums
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

if not GPUS:
    dist.init_process_group(BACKEND)  # the line: on CPUs accelerate takes no name but "gloo" for a group of its own

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]


def trainer(folder: str, steps: int) -> Trainer:
    """Return a trainer of a new model."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not GPUS,
        ddp_backend=BACKEND if GPUS else None,  # the line
    )
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, eval_dataset=data[:16])


with tempfile.TemporaryDirectory() as own:
    folder = [own]
    first = trainer(own, 4)
    dist.broadcast_object_list(folder)
    first.args.output_dir = folder[0]
    first.train()
    second = trainer(folder[0], 8)
    second.train(resume_from_checkpoint=True)
    losses = [entry["loss"] for entry in second.state.log_history if "loss" in entry]
    evaluated = second.evaluate()["eval_loss"]
    dist.barrier()
finish([*losses, evaluated, *sums(second.model.parameters())])
