"""Tests of this folder on AMD GPUs: what is CUDA's own is skipped there, with the reason."""

from __future__ import annotations

import torch

IS_AMD = torch.version.hip is not None

ONE_CHANNEL = {"GPU_MAX_HW_QUEUES" if IS_AMD else "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Environment of ranks whose streams share one hardware channel."""

_KERNELS = "communicators do not move bytes by kernels on AMD GPUs"
_WAITS = "ROCm makes each signal and wait a kernel of one thread, which a profiler shows"

CUDA_ONLY = {
    "test_device_kernels": _KERNELS,
    "test_device_crowd": _KERNELS,
    "test_lists::test_lists_by_kernels": _KERNELS,
    "test_overlap::test_kernels_move_the_bytes": _KERNELS,
    "test_device_repeats": "it counts launches of collectives in kernels, which communicators lack on AMD GPUs",
    "test_device_choice": _WAITS,
    "test_device_executor::test_moving_collectives_launch_no_kernel": _WAITS,
    "test_device_partitions": "it reads the numbers of SMs by PTX and limits GEMMs of cuBLASLt",
    "test_device_prelaunch::test_captures_are_refused": "it captures by CUDA's driver",
    "test_device_renewal::test_flags_that_nobody_set_for_billions_of_calls": "flags do not wrap around on AMD GPUs",
}
"""Reasons by file, or by file and test."""


def reason_to_skip(file: str, test: str, gpus: int, *, is_amd: bool = IS_AMD) -> str:
    """Return why a test does not run on this machine; "" if it does.

    Args:
        file: name of its file, without ``.py``.
        test: name of its function.
        gpus: number of GPUs.
        is_amd: torch is one for ROCm.
    """
    if gpus == 0:
        return "needs a GPU"
    return CUDA_ONLY.get(file, CUDA_ONLY.get(f"{file}::{test}", "")) if is_amd else ""
