"""Ranges of calls in profilers: torch's, and with ``SIDELANE_NVTX=1`` those that read NVTX, such as Nsight Systems.

A call on copy engines launches no kernel, so that a profiler shows nothing by its name. Its range lies on the host's
thread, and the copies that were submitted within it belong to it.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    title, domain, pushed = f"{DOMAIN}:{name}", _domain, False
    try:
        _thread.within = True
        if domain is not None:
            domain.push_range(domain.get_event_attributes(message=title))
            pushed = True
        if torch.autograd._profiler_enabled():
            fields = _fields(name, outputs, inputs, ranks, group)
            with torch._C._profiler._RecordFunctionFast(title, [*outputs, *inputs], fields):
                yield
        else:
            yield
    finally:
        _thread.within = False
        if pushed:
            domain.pop_range()


def leave_thread_out() -> None:
    """Record no calls of this thread from now on: they are parts of calls of other threads."""
    _thread.within = True


def method_call(
    name: str, arguments: Mapping[str, object], ranks: Sequence[int]
) -> contextlib.AbstractContextManager[None]:
    """Record a call of a communicator's method.

    Args:
        name: name of the call.
        arguments: arguments of a collective, by the names that they have in ``Communicator``.
        ranks: the ranks of the group.
    """
    in_place = _tensors(arguments.get("tensor"))
    read, written = in_place or _tensors(arguments.get("input")), _tensors(arguments.get("output")) or in_place
    return call(name, written, [tensor for tensor in read if all(tensor is not one for one in written)], ranks)


def _tensors(argument: object) -> list[torch.Tensor]:
    """Return the tensors of an argument: a tensor, or a list of them."""
    parts = argument if isinstance(argument, (list, tuple)) else (argument,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _fields(
    name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], ranks: Sequence[int], group: str
) -> dict[str, Any]:
    try:
        first = next(iter((*outputs, *inputs)), None)
        dtype = "" if first is None else first.type().rpartition(".")[2].removesuffix("Tensor")
        read = sum(tensor.numel() for tensor in inputs or outputs)
        written = sum(tensor.numel() for tensor in outputs)
    except Exception:  # tensors that the call itself refuses
        dtype, read, written = "", 0, 0
    return {
        "Collective name": name,
        "dtype": dtype,
        "In msg nelems": read,
        "Out msg nelems": written,
        "Group size": len(ranks),
        "Process Group Name": group,
        "Process Group Ranks": str(list(ranks)),
    }
