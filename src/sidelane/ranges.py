"""Ranges of calls in profilers: torch's, and with ``SIDELANE_NVTX=1`` those that read NVTX, such as Nsight Systems.

A call on copy engines launches no kernel, so that a profiler shows nothing by its name. Its range lies on the host's
thread, and the copies that were submitted within it belong to it.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

DOMAIN = "sidelane"

_domain: Any = None
_thread = threading.local()

is_active: Callable[[], bool] = torch.autograd._profiler_enabled
"""Function that returns True if a profiler records this thread, or ranges are marked by NVTX. Each call asks it."""


def mark_by_nvtx() -> None:
    """Mark ranges by NVTX from now on, in the domain ``sidelane``.

    Raises:
        ImportError: the package ``nvtx`` is not installed.
    """
    global _domain, is_active
    _domain, is_active = importlib.import_module("nvtx").get_domain(DOMAIN), lambda: True


@contextlib.contextmanager
def call(
    name: str,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    ranks: Sequence[int],
    group: str = "",
) -> Iterator[None]:
    """Record a call while the ``with`` block runs. A call that another one makes is a part of it.

    Profilers that record shapes also get the fields that ``record_param_comms`` has for calls of torch's backends in
    C++, under the names that tools read.

    Args:
        name: name of the collective or the operator.
        outputs: tensors that are written.
        inputs: tensors that are read only.
        ranks: the ranks of the group.
        group: name of the process group; "" for a communicator.
    """
    if getattr(_thread, "within", False):
        yield
        return
    title, domain = f"{DOMAIN}:{name}", _domain
    _thread.within = True
    if domain is not None:
        domain.push_range(domain.get_event_attributes(message=title))
    try:
        if torch.autograd._profiler_enabled():
            fields = _fields(name, outputs, inputs, ranks, group)
            with torch._C._profiler._RecordFunctionFast(title, [*outputs, *inputs], fields):
                yield
        else:
            yield
    finally:
        _thread.within = False
        if domain is not None:
            domain.pop_range()


def method_call(
    name: str, arguments: Sequence[object], ranks: Sequence[int]
) -> contextlib.AbstractContextManager[None]:
    """Record a call of a communicator's method, if anything records: of its tensors the first are those it writes."""
    if not is_active():
        return contextlib.nullcontext()
    given = [_tensors(argument) for argument in arguments]
    outputs, *inputs = [tensors for tensors in given if tensors] or [[]]
    return call(name, outputs, [tensor for tensors in inputs for tensor in tensors], ranks)


def _tensors(argument: object) -> list[torch.Tensor]:
    """Return the tensors of an argument: a tensor, or a list of them."""
    parts = argument if isinstance(argument, (list, tuple)) else (argument,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _fields(
    name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], ranks: Sequence[int], group: str
) -> dict[str, Any]:
    first = next(iter((*outputs, *inputs)), None)
    return {
        "Collective name": name,
        "dtype": "" if first is None else first.type().rpartition(".")[2].removesuffix("Tensor"),
        "In msg nelems": sum(tensor.numel() for tensor in inputs or outputs),
        "Out msg nelems": sum(tensor.numel() for tensor in outputs),
        "Group size": len(ranks),
        "Process Group Name": group,
        "Process Group Ranks": str(list(ranks)),
    }
