"""Projections of language models by published sizes, and the tokens that they are asked for.

Each projection is the linear layer of one GPU: ``result[tokens, out] = input[tokens, in] @ weight[out, in].T``. Models
that do not fit on one GPU are divided as tensor parallelism divides them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sidelane.c3.workload import Gemm

FITTED = ("llama-8b", "llama-70b/8")
"""Models whose times a machine's description may be fitted to."""

SEEN = ("qwen-32b/4", "llama-405b/8", "deepseek-v3")
"""Models whose times were looked at before the rules of ``model/gemm.py`` went in. Those of the others are held out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of a model.

    Attributes:
        model: its name, behind a slash the GPUs that share a layer.
        layer: which one.
        gemm: its shape; ``m`` tokens, ``n`` outputs, ``k`` inputs.
    """

    model: str
    layer: str
    gemm: Gemm


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """Outputs and inputs of each layer, and the tokens."""

    layers: Mapping[str, tuple[int, int]]
    tokens: tuple[int, ...]


# Hidden size, heads and intermediate size as in each model's published configuration (config.json). gate_up are the two
# projections in front of the gated activation, in one GEMM; qkv those to queries, keys and values.
MODELS = {
    "llama-8b": _Model(
        {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
        (16, 128, 512, 2048, 8192),
    ),
    "llama-70b/8": _Model(
        {"qkv": (1280, 8192), "out": (8192, 1024), "gate_up": (7168, 8192), "down": (8192, 3584)},
        (8, 64, 256, 1024, 4096),
    ),
    "qwen-32b/4": _Model(
        {"qkv": (1792, 5120), "out": (5120, 1280), "gate_up": (13824, 5120), "down": (5120, 6912)},
        (16, 96, 400, 2048, 16384),
    ),
    "llama-405b/8": _Model(
        {"qkv": (2304, 16384), "out": (16384, 2048), "gate_up": (13312, 16384), "down": (16384, 6656)},
        (4, 64, 333, 1000, 8192),
    ),
    "deepseek-v3": _Model(
        {"q_b": (24576, 1536), "out": (7168, 16384), "expert_gate_up": (4096, 7168), "expert_down": (7168, 2048)},
        (32, 128, 640, 3072, 8192),
    ),
    "gemma-27b/2": _Model(
        {"qkv": (4096, 5376), "out": (5376, 2048), "gate_up": (21504, 5376), "down": (5376, 10752)},
        (16, 100, 500, 1500, 6000),
    ),
    "gpt-oss-120b": _Model(
        {"qkv": (5120, 2880), "out": (2880, 4096), "expert_gate_up": (5760, 2880), "expert_down": (2880, 2880)},
        (32, 200, 777, 2500, 16000),
    ),
    "mixtral-8x22b/4": _Model(
        {"qkv": (2048, 6144), "out": (6144, 1536), "expert_gate_up": (8192, 6144), "expert_down": (6144, 4096)},
        (1, 48, 300, 1200, 5000),
    ),
}


def projections(models: tuple[str, ...] = (), dtype: str = "bfloat16") -> tuple[Projection, ...]:
    """All shapes of some models.

    Args:
        models: names; empty takes all.
        dtype: of the matrices.

    Raises:
        ValueError: no such model.
    """
    unknown = [model for model in models if model not in MODELS]
    if unknown:
        raise ValueError(f"projections: models (value={', '.join(unknown)}, allowed={', '.join(MODELS)})")
    return tuple(
        Projection(name, layer, Gemm(tokens, outputs, inputs, dtype))
        for name, model in MODELS.items()
        if not models or name in models
        for layer, (outputs, inputs) in model.layers.items()
        for tokens in model.tokens
    )
