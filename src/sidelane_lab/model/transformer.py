"""Sizes of decoders: of presets, of Hugging Face's ``config.json``, or as they are stated; and what follows from them.

Layers of a model count as alike: where some have experts and some have none, each has the mean number of parameters,
and is computed as one with experts.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidelane.user_files import json_of
from sidelane_lab.harness.files import text_of

Matrix = tuple[int, int]
"""Outputs and inputs of a linear layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a decoder.

    Attributes:
        name: name of the model.
        layers: number of layers.
        hidden: width of the residual.
        feed: width of the gated feed-forward part; of layers without experts, where some have them.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        vocabulary: rows of the embedding, and of the head.
        head: width of a head; 0: ``hidden`` over ``heads``.
        tied: the embedding is the head, too.
        experts: experts of a layer that a rank has; 0: there are none.
        active: experts that a token goes to.
        expert_feed: width of an expert.
        shared: width of the experts that all tokens go to, together.
        dense: layers without experts at the beginning.
        latent: of latent attention: ranks of queries (0: none) and of keys, widths of a head without and with rotation,
            and of a value; empty: grouped attention.
        bits: of a weight as it is published, with its scales; 0: it is not quantized.
        left_out: what the model has that is not modelled.
        whole: all parameters of the model that this is a part of; 0: it is whole.
    """

    name: str
    layers: int
    hidden: int
    feed: int
    heads: int
    kv_heads: int
    vocabulary: int = 128_256
    head: int = 0
    tied: bool = False
    experts: int = 0
    active: int = 0
    expert_feed: int = 0
    shared: int = 0
    dense: int = 0
    latent: tuple[int, ...] = ()
    bits: float = 0.0
    left_out: tuple[str, ...] = ()
    whole: int = 0

    @property
    def head_size(self) -> int:
        """Width of a head of queries."""
        return sum(self.latent[2:4]) or self.head or self.hidden // self.heads

    @property
    def kv_size(self) -> int:
        """Elements of keys and values of a token that a layer keeps for later ones."""
        return self.latent[1] + self.latent[3] if self.latent else 2 * self.kv_heads * self.head_size

    def attention(self) -> list[Matrix]:
        """Return the matrices around attention; the last one has its output."""
        if not self.latent:
            width = self.heads * self.head_size
            return [(width + self.kv_size, self.hidden), (self.hidden, width)]
        queries, keys, plain, rotated, value = self.latent
        wide = self.heads * (plain + rotated)
        first = [((queries or wide) + keys + rotated, self.hidden), *([(wide, queries)] if queries else [])]
        return [*first, (self.heads * (plain + value), keys), (self.hidden, self.heads * value)]

    def gated(self, width: int) -> list[Matrix]:
        """Return the matrices of a gated feed-forward part, gate and up as one."""
        return [(2 * width, self.hidden), (self.hidden, width)] if width else []

    @property
    def parameters(self) -> int:
        """Parameters of a layer, on the average."""
        routed = self.experts * _size(self.gated(self.expert_feed)) + self.experts * self.hidden
        routed += _size(self.gated(self.shared))
        with_experts = self.layers - self.dense if self.experts else 0
        parts = with_experts * routed + (self.layers - with_experts) * _size(self.gated(self.feed))
        return _size(self.attention()) + parts // self.layers

    @property
    def ends(self) -> int:
        """Parameters of the embedding and of the head."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def total(self) -> int:
        """All parameters, norms as well."""
        return self.layers * (self.parameters + 2 * self.hidden) + self.hidden + self.ends

    @property
    def computed(self) -> int:
        """Parameters that a token is multiplied with: those of its experts, and the head's."""
        idle = max(0, self.experts - self.active) * _size(self.gated(self.expert_feed)) * (self.layers - self.dense)
        return self.layers * self.parameters - idle + self.vocabulary * self.hidden

    def divided(self, tensor: int, experts: int = 1) -> Transformer:
        """Return a rank's part with tensor and expert parallelism.

        Raises:
            ValueError: heads or experts cannot be shared evenly.
        """
        for flag, ranks, all_of_it in (("--tp", tensor, self.heads), ("--ep", experts, self.experts or 1)):
            if all_of_it % ranks:
                if flag == "--ep" and not self.experts:
                    raise ValueError(f"plan: --ep {ranks}: {self.name} has no experts")
                shared = "heads" if flag == "--tp" else "experts"
                raise ValueError(f"plan: {flag} {ranks} does not divide the {all_of_it} {shared} of {self.name}")
        names = ("feed", "expert_feed", "shared", "vocabulary")
        parts = {name: -(-getattr(self, name) // tensor) for name in names}
        return dataclasses.replace(
            self,
            heads=self.heads // tensor,
            kv_heads=max(1, self.kv_heads // tensor),
            head=0 if self.latent else self.head_size,
            experts=self.experts // experts,
            whole=self.whole or self.total,
            **parts,
        )


def _size(matrices: list[Matrix]) -> int:
    return sum(outputs * inputs for outputs, inputs in matrices)


KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "feed": ("intermediate_size", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "vocabulary": ("vocab_size",),
    "head": ("head_dim",),
    "tied": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok", "experts_per_token"),
    "expert_feed": ("moe_intermediate_size",),
    "shared": ("n_shared_experts",),
    "shared_feed": ("shared_expert_intermediate_size",),
    "dense": ("first_k_dense_replace",),
    "latent_q": ("q_lora_rank",),
    "latent_kv": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
}
"""Names of sizes on the command line, and in ``config.json``."""
NEEDED = ("layers", "hidden", "heads")
SCALE_BITS = 0.16
"""Bits of a weight below 8 bits for its group's scale and zero: 20 bits for 128 weights."""
LEFT_OUT = {
    "vision_config": "the vision tower",
    "audio_config": "the audio tower",
    "sliding_window": "sliding windows (attention is counted as full)",
    "full_attention_interval": "linear attention (counted as full attention)",
    "num_nextn_predict_layers": "layers that predict further tokens",
    "interleave_moe_layer_step": "layers without experts between others",
    "layer_types": "layers of several types (counted as alike)",
}
"""Keys of ``config.json`` for what is not modelled."""


def read_model(text: str) -> Transformer:
    """Return a model: of a preset's name, of a ``config.json`` or its folder, or of ``layers=32,hidden=4096,...``.

    Raises:
        ValueError: there is none, or a size is missing or wrong.
    """
    path = Path(text).expanduser()
    path = path / "config.json" if text and path.is_dir() else path
    if path.suffix == ".json" and not path.is_file():
        raise ValueError(f"plan: --model {text}: no such file")
    if path.is_file():
        try:
            content = json_of(text_of(path))
        except ValueError as problem:
            raise ValueError(f"plan: --model {text}: {problem}") from problem
        if not isinstance(content, Mapping):
            raise ValueError(
                f"plan: --model {text}: not a config.json (value={type(content).__name__}, allowed=object)"
            )
        return of_config(path.resolve().parent.name if path.stem == "config" else path.stem, content)
    if "=" in text:
        pairs = (part.partition("=") for part in text.replace(" ", "").split(",") if part)
        return of_config("the model", {key: int(value) if value.isdigit() else value for key, _, value in pairs})
    return preset(text)


def of_config(name: str, content: Mapping[str, Any]) -> Transformer:
    """Return the model of a configuration, of Hugging Face or with the names of :data:`KEYS`.

    Raises:
        ValueError: a size is missing or wrong.
    """
    content = {**content, **(content.get("text_config") or {})}
    found: dict[str, Any] = {}
    for field, names in KEYS.items():
        value = next((content[key] for key in (field, *names) if content.get(key) is not None), None)
        if value is None and field in NEEDED:
            raise ValueError(f"plan: --model {name}: {field} is missing (allowed={' or '.join((field, *names))})")
        if value is not None and not (isinstance(value, int) and (field in NEEDED) <= value < 1 << 30):
            raise ValueError(f"plan: --model {name}: {field} (value={value!r}, allowed=a whole number)")
        found[field] = value or 0
    latent = tuple(found.pop(key) for key in ("latent_q", "latent_kv", "nope", "rope", "value"))
    shared_feed = found.pop("shared_feed")
    width = found["expert_feed"] or found["feed"]
    if not width:
        raise ValueError(f"plan: --model {name}: feed is missing (allowed=feed or intermediate_size)")
    found |= {
        "expert_feed": width if found["experts"] else 0,
        "shared": shared_feed or found["shared"] * width,
        "tied": bool(found["tied"]) or str(content.get("model_type", "")).startswith("gemma"),
        "kv_heads": found["kv_heads"] or found["heads"],
        "vocabulary": found["vocabulary"] or 128_256,
    }
    for part, whole in (("heads", "hidden"), ("kv_heads", "heads")):
        if found[whole] % found[part] and (part == "kv_heads" or not (found["head"] or latent[1])):
            value = f"value={found[part]}, allowed=divisors of {found[whole]}, its {whole}"
            raise ValueError(f"plan: --model {name}: {part} ({value})")
    content |= {} if content.get("use_sliding_window", True) else {"sliding_window": None}
    left_out = [words for key, words in LEFT_OUT.items() if content.get(key)]
    latent = latent if latent[1] else ()
    return Transformer(name, **found, latent=latent, bits=_bits(content), left_out=tuple(left_out))


def _bits(content: Mapping[str, Any]) -> float:
    """Return the bits of a quantized weight: of GPTQ, AWQ, bitsandbytes, compressed tensors, FP8 and MXFP4."""
    about: Any = content.get("quantization_config")
    if not isinstance(about, Mapping):
        return 0.0
    groups: Any = about.get("config_groups") or {}
    stated = [group.get("weights", {}).get("num_bits") for group in groups.values()]
    named = {"fp8": 8, "mxfp4": 4, "awq": 4, "gptq": 4, "bitsandbytes": 4 if about.get("load_in_4bit") else 8}
    stated += [about.get("bits"), about.get("w_bit"), named.get(str(about.get("quant_method")))]
    bits = next((one for one in stated if one in (2, 3, 4, 8)), 0)
    return bits + SCALE_BITS if 0 < bits < 8 else float(bits)


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Return what ``models.toml`` says of each model: its sizes, published numbers of parameters, other names."""
    text = (importlib.resources.files("sidelane_lab.model") / "models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def preset(text: str) -> Transformer:
    """Return the first preset whose name has all parts of a name: ``70B``, ``Llama 3.1 8B``, ``Qwen/Qwen3-32B``.

    Raises:
        ValueError: there is none.
    """
    wanted = _parts(text.rpartition("/")[2])
    for name, about in presets().items():
        known = [_parts(other) for other in (name, *about.get("also", ()))]
        if any(
            wanted and all(any(f"{word}.".startswith(f"{part}.") for word in parts) for part in wanted)
            for parts in known
        ):
            return of_config(name, about["sizes"])
    near = ", ".join(difflib.get_close_matches(text.lower(), presets(), 3, 0))
    other = "a config.json, or layers=32,hidden=4096,feed=14336,heads=32,kv_heads=8"
    raise ValueError(f"plan: no model is called {text!r}; the nearest are {near}; --model also takes {other}")


def _parts(name: str) -> list[str]:
    """Return words and numbers of a model's name, without those of its tuning."""
    name = re.sub(r"instruct|chat|base|thinking|like|meta|-hf|-it\b|-v0\.\d|-\d{4}\b", "", name.lower())
    return re.findall(r"\d+x\d+b|a?\d+(?:\.\d+)?[bt]?|[a-z]+", name)
