"""Programs of the study that are trainers' own: torchtitan's Llama, and GPTs of Megatron-core.

Both take the sizes of a public model. Nothing here imports a trainer before a model is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from sidelane import config as settings
from sidelane.machine.local import installed_version
from sidelane_lab.studies.clients.cases import DDP, EXPERTS, FSDP, MEGATRON, TENSOR, TITAN, ClientCase, ClientModel

POOL, BESIDE = "pool", "beside"
"""Ways of Megatron-core: its buffers in a pool that the group registers; and ``SIDELANE_BESIDE=compute``, too."""

PACKAGES = {
    **dict.fromkeys((DDP, FSDP, TENSOR), "transformers"),
    TITAN: "torchtitan",
    **dict.fromkeys(MEGATRON, "megatron-core"),
}
"""Packages that programs need."""

Loss = Callable[[torch.Tensor], torch.Tensor]
Clip = Callable[[Iterable[torch.Tensor]], object]


def lacking(program: str, device_type: str) -> str:
    """Return why a program cannot run here, or an empty text."""
    package = PACKAGES[program]
    if (version := installed_version(package)) is None:
        return f"the package {package} is required (value=not installed)"
    if package == "torchtitan" and not version.startswith("0.2."):
        return f"torchtitan 0.2 is required (value={version})"
    return f"{package} trains on GPUs only" if program in MEGATRON and device_type == "cpu" else ""


def titan(model: ClientModel, device: torch.device, mesh: DeviceMesh) -> tuple[Any, Loss, Clip]:
    """Make torchtitan's Llama of a model's sizes, sharded by its own function.

    Args:
        model: sizes; the head has weights of its own.
        device: of the weights, which are the same on all ranks.
        mesh: all ranks.

    Returns:
        The model; a function of tokens, which returns their mean loss; and torchtitan's clipping of gradients, which
        FSDP2 adds: torchtitan divides them itself.
    """
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp

    torch.manual_seed(0)
    # The size of a feed-forward layer is rounded up to a multiple of the last.
    wide = {"ffn_dim_multiplier": model.feed / (3 * model.hidden), "multiple_of": model.feed}
    sizes = {"n_layers": model.layers, "n_heads": model.heads, "n_kv_heads": model.kv_heads, **wide}
    with device, torch.no_grad():
        made = Transformer(TransformerModelArgs(dim=model.hidden, vocab_size=model.vocabulary, **sizes))
        made.init_weights()
    apply_fsdp(made, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    if device.type == "cpu":  # Gloo adds, and has no sum with a factor
        for module in filter(lambda each: isinstance(each, FSDPModule), made.modules()):
            module.set_force_sum_reduction_for_comms(True)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = cross_entropy_loss(made(tokens), tokens.roll(-1, 1))
        return added / tokens.numel()

    return made, loss, functools.partial(clip_grad_norm_, max_norm=1.0, foreach=True)


class CausalAttention(nn.Module):
    """Core attention of Megatron-core by torch's kernel: its own one makes the matrix of scores."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [S, B, A, D] to [B, A, S, D]
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


class SharedNorm(nn.RMSNorm):
    """Norm of Megatron-core's layers: its own one for sequence parallelism needs other packages."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class MegatronClient:
    """A GPT with Megatron-core's distributed optimizer, on groups of its own of one backend. Collective.

    Gradients are reduced behind backward, and parameters are gathered behind the next forward. ``megatron-tensor``
    divides layers among ranks, ``megatron-sequence`` activations between them, too, and ``megatron-experts`` puts
    experts in the place of feed-forward layers, divided among all ranks.

    Args:
        case: program and model.
        backend: of the groups that Megatron makes.
        way: ``pool``: ``nccl_ub=True``, for which Megatron registers its buffers with the group; ``beside``: with
            ``SIDELANE_BESIDE=compute``, too.
        device: of this rank.
        library: backend of the library's group, whose allocator pools take; None where there is none.

    Attributes:
        groups: that Megatron has made with this rank.
        model: what it trains.
    """

    def __init__(self, case: ClientCase, backend: str, way: str, device: torch.device, library: Any) -> None:
        self.case, self._device = case, device
        self.groups: list[dist.ProcessGroup] = []
        self._settings = settings.current()
        if way == BESIDE:
            self._settings = dataclasses.replace(self._settings, beside="compute")
        with settings.override(self._settings), self._groups_of(backend):
            self._make(way in (POOL, BESIDE), library)

    def step(self, tokens: torch.Tensor, backward: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """Take a step and return the mean loss of the tokens."""
        from megatron.core.distributed import finalize_model_grads

        position = torch.arange(tokens.shape[1], device=self._device).expand(tokens.shape[0], -1)
        with settings.override(self._settings), _globals(self._state):
            self.model.zero_grad_buffer()
            self._optimizer.zero_grad()
            loss: torch.Tensor = self.model(tokens, position, None, labels=tokens).float().mean()
            backward(loss)
            finalize_model_grads([self.model])
            self._optimizer.step()
        return loss.detach()

    def close(self) -> None:
        """Let go of the model, then of the groups. Collective."""
        del self.model, self._optimizer, self._state
        while self.groups:
            dist.destroy_process_group(self.groups.pop())

    @contextlib.contextmanager
    def _groups_of(self, backend: str) -> Iterator[None]:
        from megatron.core import parallel_state

        new_group = dist.new_group

        def make(*args: Any, **named: Any) -> Any:
            made = new_group(*args, **{**named, "backend": backend})
            if isinstance(made, dist.ProcessGroup):  # this rank is in it
                self.groups.append(made)
            return made

        dist.new_group = make
        try:
            with _globals({name: one for name, one in vars(parallel_state).items() if _is_global(name)}):
                yield
        finally:
            dist.new_group = new_group

    def _make(self, pooled: bool, library: Any) -> None:
        from megatron.core import nccl_allocator, parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        sizes, program, ranks = self.case.model, self.case.program, dist.get_world_size()
        tensor = ranks if program in MEGATRON[1:3] else 1
        experts = EXPERTS if program == MEGATRON[3] else None
        # Megatron would compile an allocator of ncclMemAlloc, and turn NVLS on; torch's group has the same allocator.
        nccl_allocator._allocator = library.mem_allocator if pooled else None
        nccl_allocator.init = lambda: None
        vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 forgets it where Transformer Engine is missing
        parallel_state.initialize_model_parallel(
            tensor, expert_model_parallel_size=ranks if experts else 1, create_gloo_process_groups=False
        )
        model_parallel_cuda_manual_seed(123)
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            num_query_groups=sizes.kv_heads,
            ffn_hidden_size=sizes.feed,
            tensor_model_parallel_size=tensor,
            sequence_parallel=program == MEGATRON[2],
            num_moe_experts=experts,
            expert_model_parallel_size=ranks if experts else 1,
            moe_token_dispatcher_type="alltoall",
            normalization="RMSNorm",
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            persist_layer_norm=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
        )
        layers = get_gpt_layer_local_spec(experts, moe_grouped_gemm=False, normalization="RMSNorm")
        layers.submodules.self_attention.submodules.core_attention = CausalAttention
        layers.submodules.input_layernorm = layers.submodules.pre_mlp_layernorm = SharedNorm
        model = GPTModel(
            *(config, TransformerBlockSubmodules([layers] * sizes.layers, SharedNorm)),
            *(sizes.vocabulary, self.case.length),
            share_embeddings_and_output_weights=sizes.tied,
            position_embedding_type="rope",
        )
        wraps = DistributedDataParallelConfig(
            overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, nccl_ub=pooled
        )
        self.model: Any = DistributedDataParallel(config, wraps, model.to(self._device).bfloat16())
        adam = OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        )
        self._optimizer: Any = get_megatron_optimizer(adam, [self.model], use_gloo_process_groups=False)
        self._state: dict[str, Any] = {name: one for name, one in vars(parallel_state).items() if _is_global(name)}


def _is_global(name: str) -> bool:
    return name.startswith("_") and name.isupper()


@contextlib.contextmanager
def _globals(values: Mapping[str, Any]) -> Iterator[None]:
    """Give Megatron-core's state of groups these values, and what it had before at the end."""
    from megatron.core import parallel_state

    state = vars(parallel_state)
    before = {name: state[name] for name in values}
    state.update(values)
    try:
        yield
    finally:
        state.update(before)
