"""Cases of the study: programs, public sizes of models, and what of them fits a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from sidelane_lab.cli.clients import PROGRAMS
from sidelane_lab.model.transformer import Transformer, preset

DDP, FSDP, TENSOR, TITAN, *MEGATRON = PROGRAMS
ADAMW, SGD = "AdamW", "SGD"
EXPERTS = 4
"""Experts of Megatron-core's model in the place of each feed-forward layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientModel(Transformer):
    """A public model, and how it is trained.

    Attributes:
        batch: sequences of a rank in training, so many that the GPU is the limit of a step and not the host.
    """

    batch: int = 1

    def with_layers(self, layers: int) -> ClientModel:
        """Return the model with fewer layers, which its name says."""
        if layers == self.layers:
            return self
        return dataclasses.replace(self, layers=layers, name=f"{self.name} with {layers} of {self.layers} layers")

    def make(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Make Hugging Face's Llama of these sizes, with the same random weights on all ranks."""
        from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": self.tied,
            "attn_implementation": "sdpa",
            "use_cache": False,
        }
        config = LlamaConfig(**sizes)
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                made: nn.Module = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        return made


TINY = "tiny"
BATCHES = {"qwen2.5-0.5b": 8, "llama-3.2-1b": 4, "llama-3.2-3b": 2, "mistral-7b": 1, "llama-3.1-8b": 1}
"""Sequences of a rank by model; Qwen's is without its biases."""
MODELS = {name: ClientModel(**dataclasses.asdict(preset(name)), batch=batch) for name, batch in BATCHES.items()}
MODELS[TINY] = ClientModel(TINY, 2, 64, 128, 4, 2, 256, tied=True)


@dataclasses.dataclass(frozen=True, slots=True)
class ClientCase:
    """A program with a model.

    Attributes:
        batch: sequences of a rank.
        length: tokens of each.
        optimizer: ``AdamW``, ``SGD``, or empty where nothing is trained.
        note: reason for fewer layers, or for SGD.
    """

    program: str
    model: ClientModel
    batch: int
    length: int
    optimizer: str = ""
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.program}, {self.model.name}, {self.batch}x{self.length} tokens a rank"
        return f"{text}, {self.optimizer}" if self.optimizer else text

    @property
    def parameters(self) -> int:
        """Number of parameters of all ranks together: torchtitan has a head of its own, and experts are several."""
        model = self.model
        head = model.vocabulary * model.hidden if self.program == TITAN and model.tied else 0
        experts = 3 * model.hidden * model.feed * (EXPERTS - 1) + model.hidden * EXPERTS
        return model.total + head + (model.layers * experts if self.program == MEGATRON[-1] else 0)

    def state_bytes(self, ranks: int) -> float:
        """Return the bytes that a model keeps from step to step: parameters, gradients, buckets, optimizer.

        DDP trains in bfloat16, FSDP2 has shards of float32, Megatron-core shards AdamW's state. For decoding the model
        is whole before it is divided.
        """
        adamw = self.optimizer == ADAMW
        sharded = (16 if adamw else 8) / ranks
        each = {DDP: 10 if adamw else 6, FSDP: sharded, TENSOR: 2, TITAN: sharded, MEGATRON[0]: 4 + 12 / ranks}
        return self.parameters * each.get(self.program, sharded)

    def step_bytes(self) -> float:
        """Return the bytes of a step: what a Llama saves for backward, logits in float32, FSDP2's gathered root."""
        if self.program == TENSOR:
            return 0.0
        model, tokens = self.model, self.batch * self.length
        saved = tokens * model.layers * (44 * model.hidden + 8 * model.feed)
        gathered = 12 * model.vocabulary * model.hidden if self.program in (FSDP, TITAN) else 0
        return saved + 16 * tokens * model.vocabulary + gathered


def fitted(case: ClientCase, ranks: int, room: float) -> ClientCase:
    """Return the case as it fits: with AdamW, else with SGD, else with half of the layers, and so on."""
    layers, note = case.model.layers, ""
    while True:
        for optimizer in ("",) if case.program == TENSOR else (ADAMW, SGD)[: 1 if case.program in MEGATRON else 2]:
            tried = dataclasses.replace(case, model=case.model.with_layers(layers), optimizer=optimizer, note=note)
            needed = tried.state_bytes(ranks) + tried.step_bytes()
            if needed <= room:
                return tried
            note = note or f"all layers with {optimizer} need {needed / 1e9:.0f} GB, and there are {room / 1e9:.0f}"
        if layers == 1:
            return tried
        layers //= 2
