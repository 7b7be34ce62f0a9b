"""Triton for the files of kernels, imported when a kernel is compiled or launched: the import takes half a second.

These files import ``tl`` and ``triton`` from here. ``triton.jit`` makes a :class:`Kernel` of a function, and ``tl``
has constants and the names of dtypes. Triton makes a kernel when it, or a caller, first wants anything of it that the
function's name does not tell. Then all of this in the module of the function is replaced by what Triton has.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Kernel:
    """A function for Triton to compile, which passes for what ``triton.jit`` makes of it.

    Args:
        function: function in Triton's language.
        options: options of ``triton.jit``.
    """

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        self.function, self._options, self._made = function, options, None
        self.__module__, self.__name__, self.__qualname__ = (
            function.__module__,
            function.__name__,
            function.__qualname__,
        )
        self.__doc__ = function.__doc__

    def made(self) -> Any:
        """Return what ``triton.jit`` makes of the function."""
        if self._made is None:
            import triton

            names = self.function.__globals__
            names.update({name: real(value) for name, value in list(names.items()) if type(value) in _STAND_INS})
            self._made = triton.jit(self.function, **self._options)
        return self._made

    @property  # type: ignore[misc]  # Triton asks by isinstance for functions that it has made
    def __class__(self) -> type:
        return type(self.made())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self.made()[grid]
        return lambda *arguments, **constants: launch(*arguments, **real_constants(constants))

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        return self.made()(*arguments, **constants)


class AtCompileTime:
    """A function of Python that kernels call while they are compiled, as ``triton.constexpr_function`` makes them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class Constant(int):
    """A whole number that kernels use by its name, as ``tl.constexpr``."""

    @property
    def value(self) -> int:
        """The number, as ``tl.constexpr`` has it."""
        return int(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of Triton by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


class _Language:
    """Stand-in for ``triton.language``."""

    constexpr = Constant

    def __getattr__(self, name: str) -> Dtype:
        return Dtype(name)


class _Triton:
    """Stand-in for ``triton``."""

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        """Make a kernel of a function, or a decorator that does."""
        return (lambda found: Kernel(found, options)) if function is None else Kernel(function, options)

    @staticmethod
    def constexpr_function(function: Callable[..., Any]) -> AtCompileTime:
        """Make a function that kernels call while they are compiled."""
        return AtCompileTime(function)


_STAND_INS = (_Triton, _Language, AtCompileTime, Constant, Dtype)

tl: Any = _Language()
triton: Any = _Triton()


COMPILE_OPTIONS: Mapping[str, Any] = types.MappingProxyType({"enable_fp_fusion": True})
"""Options of Triton with which every kernel is compiled, on every path; a caller's own kernel may get others.

They are never left to Triton: ``a * b + c`` has other bits where the compiler may not contract it to one operation, and
Triton's default for that depends on its version (3.9 warns that 3.10 changes it) and on the environment.
"""


def real(value: Any) -> Any:
    """Return what Triton has for what this file defines in its place; others as they are."""
    kind = type(value)
    if kind not in _STAND_INS:
        return value
    import triton
    import triton.language

    if kind is Dtype:
        return getattr(triton.language, value.name)
    if kind is AtCompileTime:
        return triton.constexpr_function(value.function)
    if kind is Constant:
        return triton.language.constexpr(int(value))
    return triton if kind is _Triton else triton.language


def real_constants(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return constants of a launch as Triton takes them."""
    return {name: real(value) for name, value in constants.items()}


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
