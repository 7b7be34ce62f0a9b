"""The kind of GPU for which a kernel is being compiled."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

from sidelane.device.language import triton

_backend: contextvars.ContextVar[str] = contextvars.ContextVar("backend", default="")


@contextlib.contextmanager
def compiling_for(backend: str) -> Iterator[None]:
    """Name the backend, ``cuda`` or ``hip``, of the kernels that are compiled inside of this context."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def _target_backend() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    from triton.language.target_info import current_target

    return _backend.get() or str(getattr(current_target(), "backend", ""))


_target_backend.__triton_builtin__ = True  # type: ignore[attr-defined]  # Triton does not read its body


@triton.constexpr_function
def is_nvidia():  # type: ignore[no-untyped-def]  # Triton reads it
    """Return True in kernels for NVIDIA's GPUs, whose instructions they may then contain.

    Outside of :func:`compiling_for`, kernels are compiled for the GPUs of this machine. False in Triton's interpreter.
    """
    return _target_backend() == "cuda"
