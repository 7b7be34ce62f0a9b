"""Programs of the study, each on one way to communicate: those of torch on a public Llama, and trainers' own.

A program is what a user would write. The ways differ in one line: the process group, or ``fsdp.enable``.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable
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
from sidelane_lab.studies.clients import trainers
from sidelane_lab.studies.clients.cases import ADAMW, DDP, FSDP, MEGATRON, TENSOR, TITAN, ClientCase
from sidelane_lab.studies.clients.trainers import BESIDE, POOL
from sidelane_lab.studies.fsdp.ways import StillGather, StillScatter
from sidelane_lab.studies.steps import EAGER, GRAPH, GROUP, NONE, calls_by_maker
from sidelane_lab.studies.torch_groups import StudyGroups, library_of

ENABLE, COMPILED = "enable", "compiled"
CAPTURE_WARMUP = 3

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
        way: ``group``, ``enable``, ``pool``, ``beside``, ``none``, or the name of the library.
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
        if way == GROUP and case.program not in MEGATRON:
            self._group = StudyGroups(rank).make(SIDELANE)
            self._undo.callback(dist.destroy_process_group, self._group)
        self.host_s: dict[str, list[float]] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        # In training each rank has data of its own.
        generator = torch.Generator(rank.device).manual_seed(0 if case.program == TENSOR else rank.rank)
        shape = (case.batch, case.length)
        self._tokens = torch.randint(case.model.vocabulary, shape, device=rank.device, generator=generator)
        self._names = {self._group.group_name}
        build = {DDP: self._ddp, FSDP: self._fsdp, TENSOR: self._tensor, TITAN: self._titan}
        self.model, step = build.get(case.program, self._megatron)()
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
        rows = ledger.report().rows if self._way in (GROUP, ENABLE, POOL, BESIDE) else ()
        mine = [row for row in rows if row.group in self._names]
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

    def _llama(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        return self._case.model.make(self._rank.device, dtype)

    def _ddp(self) -> tuple[nn.Module, Callable[[], None]]:
        wrapped = DistributedDataParallel(self._llama(), process_group=self._group)
        around = wrapped.no_sync if self._way == NONE else contextlib.nullcontext
        return wrapped, self._training(wrapped, self._own_loss(wrapped), around)

    def _fsdp(self) -> tuple[nn.Module, Callable[[], None]]:
        model, mesh = self._llama(torch.float32), self._mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        self._communicate(model)
        return model, self._training(model, self._own_loss(model))

    def _titan(self) -> tuple[nn.Module, Callable[[], None]]:
        made, loss, clip = trainers.titan(self._case.model, self._rank.device, self._mesh())
        self._communicate(made)
        return made, self._training(made, lambda: loss(self._tokens), clip=clip, shares=self._rank.world_size)

    def _megatron(self) -> tuple[nn.Module, Callable[[], None]]:
        on_library = self._way not in (GROUP, POOL, BESIDE)
        device, library = self._rank.device, self._group._get_backend(self._rank.device)
        backend = library_of(device.type) if on_library else SIDELANE
        made = trainers.MegatronClient(self._case, backend, self._way, device, library)
        self._undo.callback(made.close)
        self._names = {group.group_name for group in made.groups}
        backward = self._timed(torch.Tensor.backward, EAGER)

        def step() -> None:
            self.outputs[EAGER] = made.step(self._tokens, backward)

        return made.model, step

    def _communicate(self, model: nn.Module) -> None:
        """Let FSDP2 communicate in this way."""
        if self._way == ENABLE:
            self._undo.callback(fsdp.enable(model).disable)
        if self._way == NONE:
            gather, scatter = StillGather(), StillScatter(self._group)  # one for all: they keep buffers
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(gather)
                    module.set_custom_reduce_scatter(scatter)

    def _own_loss(self, model: Any) -> Callable[[], torch.Tensor]:
        return lambda: model(input_ids=self._tokens, labels=self._tokens).loss

    def _training(
        self,
        model: nn.Module,
        loss_of: Callable[[], torch.Tensor],
        around: Callable[[], Any] = contextlib.nullcontext,
        clip: Callable[[Iterable[torch.Tensor]], object] = bool,
        shares: int = 1,
    ) -> Callable[[], None]:
        """Return a step; ``shares``: divisor of the loss for backward, where gradients of ranks are added."""
        optimizer: torch.optim.Optimizer
        parameters = list(model.parameters())
        if self._case.optimizer == ADAMW:
            optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        else:
            optimizer = torch.optim.SGD(parameters, lr=1e-2, foreach=True)  # DTensor knows no fused SGD

        def step() -> None:
            with around():
                loss = loss_of()
                backward(loss if shares == 1 else loss / shares)
            clip(parameters)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.outputs[EAGER] = loss.detach()

        backward = self._timed(torch.Tensor.backward, EAGER)
        return step

    def _tensor(self) -> tuple[nn.Module, Callable[[], None]]:
        # All ranks have all of it.
        divided = parallelize_module(self._llama(), self._mesh(), TENSOR_PLAN, src_data_rank=None)
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
