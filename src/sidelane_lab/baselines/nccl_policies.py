"""NCCL's collectives with a CTA policy for each call (``ncclCollConfig_t``, NCCL 2.32), by its own interface.

PyTorch knows a policy for a whole communicator only. The calls here run on the communicator that PyTorch has made, on
the current stream, with buffers in its symmetric windows. The structure is that of ``nccl.h`` of NCCL 2.32.3.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from sidelane.errors import UnavailableError
from sidelane.machine.nvidia import nccl_version
from sidelane.program.collective import Kind

POLICIES = {"efficiency": 1, "zero": 2}
"""Values of ``NCCL_CTA_POLICY_EFFICIENCY`` and ``NCCL_CTA_POLICY_ZERO``, which asks for copy engines."""

OLDEST = (2, 32, 0)
"""Oldest version of NCCL with the structure below."""

_UNDEFINED = -(1 << 31)
_MAGIC = 0xCAFEBEEF
_SUM = 0
_DTYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("ext", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("min_ctas", "max_ctas", "nvls_ctas", "cga_cluster_size")),
        ("alg_selection", ctypes.c_char_p),
        ("force_alg_selection", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("user_profiler_tag", ctypes.c_uint64),
        ("launch_completion_event", ctypes.c_void_p),
    )


def policies_of(kind: Kind, version: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the policies that a version of NCCL takes for a call; no copy engine can add.

    >>> policies_of(Kind.ALL_REDUCE, (2, 32, 3)), policies_of(Kind.ALL_GATHER, (2, 28, 9))
    (('efficiency',), ())
    """
    if version < OLDEST or kind is Kind.BROADCAST:
        return ()
    return tuple(POLICIES) if kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else ("efficiency",)


def call_with_policy(
    kind: Kind,
    output: torch.Tensor,
    input: torch.Tensor,
    policy: str,
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """Return a function that makes one call of NCCL's.

    Args:
        kind: all_gather, all_to_all, reduce_scatter or all_reduce (a sum).
        output: what the call writes, on the GPU.
        input: what it reads, of the same dtype.
        policy: one of ``POLICIES``.
        group: whose communicator, which has been used before; None for the default group.

    Raises:
        UnavailableError: this PyTorch does not tell its communicators, or it has none yet.
    """
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    backend = chosen._get_backend(output.device)
    pointer_of = getattr(backend, "_comm_ptr", None)
    communicator = 0 if pointer_of is None else int(pointer_of())
    if not communicator:
        raise UnavailableError("this PyTorch does not tell the address of NCCL's communicator")
    version = nccl_version()
    code = version[0] * 10000 + version[1] * 100 + version[2]
    config = _Config(ctypes.sizeof(_Config), _MAGIC, code, None, *(_UNDEFINED,) * 4, None, 1, POLICIES[policy], 0, None)
    ends = {
        Kind.ALL_GATHER: ("AllGather", input.numel(), ()),
        Kind.ALL_TO_ALL: ("AlltoAll", input.numel() // chosen.size(), ()),
        Kind.REDUCE_SCATTER: ("ReduceScatter", output.numel(), (_SUM,)),
        Kind.ALL_REDUCE: ("AllReduce", input.numel(), (_SUM,)),
    }
    name, count, operation = ends[kind]
    function = getattr(_library(), f"nccl{name}Config")
    start, end = ctypes.c_void_p(input.data_ptr()), ctypes.c_void_p(output.data_ptr())
    fixed = (start, end, ctypes.c_size_t(count), _DTYPES[input.dtype], *operation, ctypes.c_void_p(communicator))

    def call() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if status := function(*fixed, stream, ctypes.byref(config)):
            raise RuntimeError(f"nccl{name}Config: {policy}: NCCL's error {status}")

    return call


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libnccl.so.2")  # the one that is loaded, whatever its path
