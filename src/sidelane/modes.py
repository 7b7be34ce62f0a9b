"""Modes of PyTorch that a caller is in. Sidelane's own work with PyTorch is done outside of them.

A mode sees the operations of its thread, and may put others in their place: ``FakeTensorMode`` and
``torch.device("meta")`` make tensors without memory, ``torch.func.functionalize`` makes copies, a mode of the caller's
own may refuse. Staging made in such a mode would hold no bytes, on one rank alone and for all calls to come.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K")


def untraced(kind: type[K]) -> type[K]:
    """Make ``torch.compile`` run the methods of a class untraced, as it runs methods that are written in C++.

    They break its graph, and their callees are not traced either. That costs a call nothing.
    """
    for member in vars(kind).values():
        accessors = (member.fget, member.fset) if isinstance(member, property) else (member,)
        for each in accessors:
            function = getattr(each, "__func__", each)  # for class methods and static ones
            if isinstance(function, types.FunctionType):
                exclude_compilers(function)
    return kind


def exclude_compilers(function: F) -> F:
    """Make ``torch.compile`` break its graph at a function, and run it untraced; without importing Dynamo."""
    made: Any = function
    made._torchdynamo_disable = True
    made._torchdynamo_disable_msg = "a call of Sidelane runs as it is"
    with contextlib.suppress(AttributeError, ImportError):  # a compiler that does not know these traces the call
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(made.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


def trace_as_groups(kind: type[Any]) -> None:
    """Make ``torch.compile`` treat objects of a class as torch's own process groups, which are constants of a graph.

    The compiler of torch 2.11 asks whether the type is exactly ``ProcessGroup``; that of 2.13 treats subclasses so by
    itself, and nothing is done. Importing the compiler takes a second, which a program that compiles nothing is spared.
    """
    if torch.__version__ < "2.13":
        after_import("torch._dynamo.variables.distributed", lambda module: _accept_subclasses(module, kind))


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Call a function with a module: now if it has been imported, else at the end of its import."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ChangingFinder(name, change))


class _ChangingFinder(importlib.abc.MetaPathFinder):
    """Finder of one module, which changes that module at the end of its import."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how the module is loaded; None for all other modules."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # it is imported once
        found = importlib.util.find_spec(fullname)
        if found is not None and found.loader is not None:
            loader: Any = found.loader
            load = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                self._change(module)

            loader.exec_module = exec_module
        return found


def _accept_subclasses(module: Any, kind: type[Any]) -> None:
    variable = getattr(module, "ProcessGroupVariable", None)
    if variable is not None:
        torchs = variable.is_process_group
        variable.is_process_group = staticmethod(lambda value: isinstance(value, kind) or torchs(value))


P = ParamSpec("P")
R = TypeVar("R")

_PYTHON = ("Python", "PythonTLSSnapshot")
_INCLUDED_BY_MODES = (
    *_PYTHON,
    "PythonDispatcher",
    "PreDispatch",
    "Functionalize",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchVmapMode",
)

_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_transform = torch._C._functorch.peek_interpreter_stack


def is_in_modes() -> bool:
    """Return True if this thread is in a mode that :func:`outside_of_modes` leaves. It takes 0.1 us."""
    return bool(_dispatch_modes()) or _has_function_mode() or _transform() is not None


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Leave the modes of this thread: dispatch and function modes, default devices, transforms of ``torch.func``.

    Inference mode stays, since calls may write to tensors that were made in it; so do autocast and whether gradients
    are recorded, which change nothing here.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in _INCLUDED_BY_MODES:
        included = included.remove(getattr(torch._C.DispatchKey, name))
    for name in _PYTHON:
        excluded = excluded.add(getattr(torch._C.DispatchKey, name))
    with torch._C.DisableTorchFunction(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def leaving_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` to run outside of the modes of this thread."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        with outside_of_modes():
            return function(*args, **kwargs)

    return outside
