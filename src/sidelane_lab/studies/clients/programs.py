"""Programs of the study: DDP, FSDP2 and DTensor's tensor parallelism of a public Llama, each on one way to communicate.

A program is what a user would write. The ways differ in one line: the process group, or ``fsdp.enable``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from sidelane import fsdp
from sidelane.integrations import ledger
from sidelane.integrations.ledger import SIDELANE
from sidelane_lab.baselines.candidate import captured
from sidelane_lab.harness.launch import Rank
from sidelane_lab.model.transformer import Transformer, preset
from sidelane_lab.studies.fsdp.ways import StillGather, StillScatter
from sidelane_lab.studies.steps import EAGER, GRAPH, GROUP, NONE, calls_by_maker
from sidelane_lab.studies.torch_groups import StudyGroups

DDP, FSDP, TENSOR = "ddp", "fsdp", "tensor"
ENABLE, COMPILED = "enable", "compiled"
ADAMW, SGD = "AdamW", "SGD"
CAPTURE_WARMUP = 3


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

    def state_bytes(self, ranks: int) -> float:
        """Return the bytes that a model keeps from step to step: parameters, gradients, buckets, optimizer.

        DDP trains in bfloat16, FSDP2 has shards of float32. For decoding the model is whole before it is divided.
        """
        adamw = self.optimizer == ADAMW
        each = {DDP: 10 if adamw else 6, FSDP: (16 if adamw else 8) / ranks, TENSOR: 2}[self.program]
        return self.model.total * each

    def step_bytes(self) -> float:
        """Return the bytes of a step: what a Llama saves for backward, logits in float32, FSDP2's gathered root."""
        if self.program == TENSOR:
            return 0.0
        model, tokens = self.model, self.batch * self.length
        saved = tokens * model.layers * (44 * model.hidden + 8 * model.feed)
        gathered = 12 * model.vocabulary * model.hidden if self.program == FSDP else 0
        return saved + 16 * tokens * model.vocabulary + gathered


def fitted(case: ClientCase, ranks: int, room: float) -> ClientCase:
    """Return the case as it fits: with AdamW, else with SGD, else with half of the layers, and so on."""
    layers, note = case.model.layers, ""
    while True:
        for optimizer in ("",) if case.program == TENSOR else (ADAMW, SGD):
            tried = dataclasses.replace(case, model=case.model.with_layers(layers), optimizer=optimizer, note=note)
            needed = tried.state_bytes(ranks) + tried.step_bytes()
            if needed <= room:
                return tried
            note = note or f"all layers with {optimizer} need {needed / 1e9:.0f} GB, and there are {room / 1e9:.0f}"
        if layers == 1:
            return tried
        layers //= 2


TENSOR_PLAN: Any = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
"""Division of each layer as in Megatron, with an all-reduce behind attention and one behind the feed-forward layer."""


class BuiltClient:
    """A program with a model on one way to communicate. All ranks build it together.

    Args:
        case: program and model.
        way: ``group``, ``enable``, ``none``, or the name of the library.
        rank: rank of this process.
        library: group of the library.

    Attributes:
        steps: a step of each launch.
        host_s: seconds that the host took for a backward, or to decode, by launch.
        outputs: loss or logits of the last step, by launch.
    """

    def __init__(self, case: ClientCase, way: str, rank: Rank, library: dist.ProcessGroup) -> None:
        self._case, self._way, self._rank, self._group = case, way, rank, library
        self._undo = contextlib.ExitStack()
        if way == GROUP:
            self._group = StudyGroups(rank).make(SIDELANE)
            self._undo.callback(dist.destroy_process_group, self._group)
        self.host_s: dict[str, list[float]] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        # In training each rank has data of its own.
        generator = torch.Generator(rank.device).manual_seed(0 if case.program == TENSOR else rank.rank)
        shape = (case.batch, case.length)
        self._tokens = torch.randint(case.model.vocabulary, shape, device=rank.device, generator=generator)
        build = {DDP: self._ddp, FSDP: self._fsdp, TENSOR: self._tensor}[case.program]
        made = case.model.make(rank.device, torch.float32 if case.program == FSDP else torch.bfloat16)
        self.model, step = build(made)
        self.steps = {EAGER: step}

    def capture(self, compiled: bool) -> None:
        """Add decoding in a graph, and compiled in a graph. Some steps come before: a group's first calls are eager."""
        if self._case.program != TENSOR or self._rank.device.type == "cpu":
            return
        models: dict[str, Any] = {GRAPH: self.model}
        if compiled:
            models[COMPILED] = torch.compile(self.model)
        for launch, model in models.items():
            decode = self._decode(model, launch)
            for _ in range(CAPTURE_WARMUP):
                decode()
            self.steps[launch] = self._timed(captured(decode, 1).replay, launch)

    def made_by(self) -> str:
        """Return who made which calls, and why."""
        enabled = self._way == ENABLE
        rows = ledger.report().rows if self._way in (GROUP, ENABLE) else ()
        mine = [row for row in rows if row.group == self._group.group_name]
        return calls_by_maker([row for row in mine if not enabled or row.operation.startswith(f"{FSDP} ")])

    def close(self) -> None:
        """Let go of everything. Collective; nothing may be under way."""
        if COMPILED in self.steps:
            torch.compiler.reset()  # compiled code keeps the model
        self.steps.clear()
        self.outputs.clear()
        self._undo.close()
        self.model = nn.Module()
        gc.collect()  # a model is full of cycles

    def _ddp(self, model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
        wrapped = DistributedDataParallel(model, process_group=self._group)
        return wrapped, self._training(wrapped, wrapped.no_sync if self._way == NONE else contextlib.nullcontext)

    def _fsdp(self, model: Any) -> tuple[nn.Module, Callable[[], None]]:
        mesh = self._mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if self._way == ENABLE:
            self._undo.callback(fsdp.enable(model).disable)
        if self._way == NONE:
            gather, scatter = StillGather(), StillScatter(self._group)  # one for all: they keep buffers
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(gather)
                    module.set_custom_reduce_scatter(scatter)
        return model, self._training(model, contextlib.nullcontext)

    def _training(self, model: nn.Module, around: Callable[[], Any]) -> Callable[[], None]:
        optimizer: torch.optim.Optimizer
        parameters = model.parameters()
        if self._case.optimizer == ADAMW:
            optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        else:
            optimizer = torch.optim.SGD(parameters, lr=1e-2, foreach=True)  # DTensor knows no fused SGD

        def step() -> None:
            with around():
                loss = model(input_ids=self._tokens, labels=self._tokens).loss
                backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.outputs[EAGER] = loss.detach()

        backward = self._timed(torch.Tensor.backward, EAGER)
        return step

    def _tensor(self, model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
        divided = parallelize_module(model, self._mesh(), TENSOR_PLAN, src_data_rank=None)  # all ranks have all of it
        return divided, self._timed(self._decode(divided, EAGER), EAGER)

    def _mesh(self) -> DeviceMesh:
        """Return a mesh that no other way's equals.

        DTensor keeps what it has found out about an operator by meshes, which are equal if shape and names are. Two
        equal ones would share the group of the first.
        """
        return DeviceMesh.from_group(
            self._group, self._rank.device.type, mesh_dim_names=(f"{self._way}_{self._group.group_name}",)
        )

    def _decode(self, model: Any, launch: str) -> Callable[[], None]:
        def decode() -> None:
            with torch.no_grad():
                self.outputs[launch] = model(input_ids=self._tokens).logits

        return decode

    def _timed(self, call: Callable[..., object], launch: str) -> Callable[..., None]:
        times = self.host_s.setdefault(launch, [])

        def timed(*arguments: Any) -> None:
            began = time.perf_counter()
            call(*arguments)
            times.append(time.perf_counter() - began)

        return timed
