"""Python that ``torch.compile`` runs as it is; Dynamo is not imported. What it traces is done while it traces."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K")


def untraced(kind: type[K]) -> type[K]:
    """Have ``torch.compile`` run the methods of a class as they are, as it runs methods that are written in C++.

    They break its graph, and nothing that they call is traced. That costs a call nothing.
    """
    for member in vars(kind).values():
        accessors = (member.fget, member.fset) if isinstance(member, property) else (member,)
        for each in accessors:
            function = getattr(each, "__func__", each)  # of a class method, or a static one
            if isinstance(function, types.FunctionType):
                keep_compilers_out(function)
    return kind


def keep_compilers_out(function: F) -> F:
    """Make ``torch.compile`` break its graph here, and leave alone whatever runs behind; without importing Dynamo."""
    made: Any = function
    made._torchdynamo_disable = True
    made._torchdynamo_disable_msg = "a call of Sidelane runs as it is"
    with contextlib.suppress(AttributeError, ImportError):  # a compiler that does not know these traces the call
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(made.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function
