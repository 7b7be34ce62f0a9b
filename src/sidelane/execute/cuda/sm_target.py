"""How many SMs a library's GEMM counts on: a wish that libraries know, not a wall. The GEMM leaves the others alone.

cuBLAS has one for each of its handles, torch one for the calls that it makes to cuBLASLt. Which of the two a product
goes by depends on the library that torch takes for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

import torch

from sidelane.errors import UnavailableError

NAMES = tuple(f"libcublas.so.{major}" for major in (14, 13, 12))
"""cuBLAS as torch has loaded it."""


@contextlib.contextmanager
def cublas_target(units: int) -> Iterator[None]:
    """Have cuBLAS launch GEMMs for so many SMs, in a ``with`` block, on the current device and thread.

    Args:
        units: SMs to count on, 1 or more.

    Raises:
        UnavailableError: cuBLAS has no such setting, or refused it.
    """
    set_target = _set_target()
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    _check(set_target(handle, units))
    try:
        yield
    finally:
        _check(set_target(handle, 0))  # all


@contextlib.contextmanager
def torch_carve_out(units: int) -> Iterator[None]:
    """Have torch leave so many SMs out of what it asks cuBLASLt for, in a ``with`` block.

    Raises:
        UnavailableError: this version of torch has no such setting.
    """
    change: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if change is None:
        raise UnavailableError(f"torch {torch.__version__} has no carve-out of SMs")
    before = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)()
    change(units)
    try:
        yield
    finally:
        change(before)


@functools.cache
def _set_target() -> Callable[[ctypes.c_void_p, int], int]:
    for name in NAMES:
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.CDLL(name).cublasSetSmCountTarget
    raise UnavailableError(f"cuBLAS has no target of SMs here (tried {', '.join(NAMES)})")


def _check(status: int) -> None:
    if status:
        raise UnavailableError(f"cublasSetSmCountTarget failed: status {status}")
