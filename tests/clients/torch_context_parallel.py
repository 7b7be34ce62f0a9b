"""torch: context parallel, where a rank has a part of the sequence and ring attention makes it whole.

torchrun --nproc-per-node 2 tests/clients/torch_context_parallel.py sidelane
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from client import BACKEND, DEVICE, GPUS, RANKS, finish
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention import SDPBackend, sdpa_kernel

dist.init_process_group(BACKEND)  # the line
mesh = init_device_mesh(DEVICE.type, (RANKS,))


class Ring(torch.autograd.Function):
    """torch's ring attention with its kernel for CPUs, for which torch has no sharding strategy of its own."""

    @staticmethod
    def forward(ctx, q, k, v):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, logsumexp = _attention._templated_ring_attention(mesh.get_group(), 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, logsumexp = ctx.saved_tensors
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return _attention._templated_ring_attention_backward(
            *(mesh.get_group(), 2, op, grad, "grad_out", q, k, v, out, logsumexp, True), dropout_p=0.0
        )[:3]


generator, dtype = torch.Generator().manual_seed(1), torch.bfloat16 if GPUS else torch.float32
tolerance, values = {"rtol": 2e-2, "atol": 2e-2} if GPUS else {"rtol": 1e-5, "atol": 1e-5}, []
for rotate in ("allgather", "alltoall"):
    set_rotate_method(rotate)
    whole = [torch.randn(2, 4, 64, 16, generator=generator).to(DEVICE, dtype).requires_grad_() for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*whole, is_causal=True)
    wanted.square().sum().backward()
    parts = [tensor.detach().clone() for tensor in whole]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
        leaves = [part.detach().clone().requires_grad_() for part in parts]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True) if GPUS else Ring.apply(*leaves)
        out.square().sum().backward()
        made = context_parallel_unshard(mesh, [out.detach(), *(leaf.grad for leaf in leaves)], [2] * 4)
    for one, other in zip(made, [wanted.detach(), *(tensor.grad for tensor in whole)], strict=True):
        torch.testing.assert_close(one, other, **tolerance)
        values.append(one.double().sum().item())
finish(values)
