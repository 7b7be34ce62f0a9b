"""Kernels on CPU ranks by Triton's interpreter: slow, but they move real bytes between processes."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sidelane import forks
from sidelane.device.language import COMPILE_OPTIONS
from sidelane.device.triton_language import interpreter, tl

POLL_S = 1e-3
"""Seconds that a volatile load sleeps first: it polls for a peer, which may need the processor."""

_one_at_a_time = forks.lock()


def is_interpreted(kernel: Any) -> bool:
    """Return True if the interpreter runs a kernel: ``TRITON_INTERPRET=1`` was set when it was made."""
    return isinstance(kernel, interpreter.InterpretedFunction)


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch a kernel that does not synchronize with peers; on GPUs, on the current stream."""
    if is_interpreted(kernel):
        run_interpreted(kernel, grid, arguments, options)
    else:
        kernel[grid](*arguments, **{**COMPILE_OPTIONS, **options})


def run_interpreted(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run a kernel in this thread until it ends. The interpreter runs one kernel at a time in a process.

    Tensors are passed as addresses: the interpreter would otherwise write back all of their storage at the end, and
    overwrite bytes that peers have written meanwhile.
    """
    pointers = [interpreter._implicit_cvt(part) if isinstance(part, torch.Tensor) else part for part in arguments]
    with _one_at_a_time, quick_interpreter(), polls_that_sleep():
        kernel[grid](*pointers, **options)


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Make the interpreter faster inside of this context.

    The interpreter patches the functions of Triton's language at every call of every function of a kernel, and searches
    the whole language to do so: two thirds of its time, although they are patched already. Inside of this context it
    does so once, and the end restores them. Checks for overflows, a quarter of the remaining time, are off, and what
    follows from a type alone is found once for each type, a quarter again.
    """
    replace = interpreter._patch_lang
    languages: dict[Any, tuple[types.ModuleType, ...]] = {}
    replaced: dict[tuple[types.ModuleType, ...], Any] = {}

    def once(function: Any) -> Any:
        if function not in languages:
            found = (value for value in function.__globals__.values() if value is tl or value is tl.core)
            languages[function] = tuple(dict.fromkeys(found))
        key = languages[function]
        if key not in replaced:
            replaced[key] = replace(function)
            tl.core.tensor.__index__ = _only_value
        return interpreter._LangPatchScope()  # an empty scope, which restores nothing

    builder = interpreter.interpreter_builder
    options = builder.options
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._patch_lang = once
    try:
        with _types_known():
            yield
    finally:
        interpreter._patch_lang, builder.options = replace, options
        for scope in reversed(replaced.values()):
            scope.restore()


@contextmanager
def _types_known() -> Iterator[None]:
    """Let the interpreter find what follows from a type once for each type, inside of this context.

    Types with the same name are equal, as for Triton.
    """
    block, tensor, find_dtype = tl.core.block_type, tl.core.tensor, interpreter._get_np_dtype
    make_block, make_tensor = block.with_element_ty, tensor.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[tuple[str, str], Any] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def dtype(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = find_dtype(kind)
        return dtypes[kind.name]

    def with_element_ty(self: Any, scalar: Any) -> Any:
        key = self.name, scalar.name
        if key not in blocks:
            blocks[key] = make_block(self, scalar)
        return blocks[key]

    def initialize(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        else:
            vars(self).update(tensors[type.name])
            self.handle = handle

    interpreter._get_np_dtype, block.with_element_ty, tensor.__init__ = dtype, with_element_ty, initialize
    try:
        yield
    finally:
        interpreter._get_np_dtype, block.with_element_ty, tensor.__init__ = find_dtype, make_block, make_tensor


def _only_value(tensor: Any) -> int:
    """Return the value of a tensor with one element. Triton 3.6 calls ``int`` on an array, which numpy 2.4 refuses."""
    return int(tensor.handle.data.item())


@contextmanager
def polls_that_sleep(seconds: float = POLL_S) -> Iterator[None]:
    """Let volatile loads sleep ``seconds`` first, inside of this context."""
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def sleeping_load(self: Any, *arguments: Any) -> Any:
        if arguments[-1]:  # whether it is volatile; what comes before differs from Triton 3.6 to 3.9
            time.sleep(seconds)
        return load(self, *arguments)

    builder.create_masked_load = sleeping_load
    try:
        yield
    finally:
        builder.create_masked_load = load
