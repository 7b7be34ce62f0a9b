"""Settings and ends of DeepEP's calls."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class DeepEpConfig:
    """Settings of a dispatch or a combine. Chunks of tokens have no effect, since rows go straight to their places.

    Attributes:
        num_sms: largest number of compute units that the kernel takes, the same on all ranks.
        num_max_nvl_chunked_recv_tokens: no effect but on :meth:`get_nvl_buffer_size_hint`; the others have none.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.num_sms, int) or self.num_sms < 1:
            raise ValueError(f"Config: num_sms (value={self.num_sms!r}, allowed=1..)")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of a chunk of tokens of ``hidden_bytes`` from each rank, which servers set aside."""
        return num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: nothing travels by RDMA on one node."""
        return 0


class EventOverlap:
    """The end of an asynchronous call, for which a stream waits.

    Args:
        event: event of the GPU, such as the result of ``EventHandle()``; None where there is nothing to wait for.
    """

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


def record_event() -> torch.cuda.Event | None:
    """Return an event after all work of the current stream; None without a GPU. It is ``EventHandle`` of DeepEP."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None


NO_EFFECT = "allocate_on_comm_stream", "return_recv_hook"
"""Arguments that need no refusal: results may be used on either stream, and hooks have nothing to do."""


def check_kind(name: str, what: str, value: object, kind: type) -> None:
    """Refuse an object of another class. Raises TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: {what} (value={type(value).__name__}, allowed={kind.__name__})")


def refuse_set(name: str, **given: object) -> None:
    """Refuse arguments that a call does not support. Raises ValueError unless all are None, False or 0."""
    for what, value in given.items():
        if what not in NO_EFFECT and value is not None and (isinstance(value, Tensor) or value):
            said = type(value).__name__ if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}: {what}, which is not supported here (value={said}, allowed=None, False, 0)")


def install_deep_ep() -> None:
    """Make ``import deep_ep`` and its modules import ``sidelane.deep_ep`` in this process. Idempotent.

    Raises:
        RuntimeError: another module of this name is imported.
    """
    own = importlib.import_module("sidelane.deep_ep")
    if (found := sys.modules.get("deep_ep", own)) is not own:
        raise RuntimeError(f"install: another module deep_ep is imported already (value={found!r}, allowed={own!r})")
    importlib.import_module("sidelane.deep_ep.utils")
    for name, module in tuple(sys.modules.items()):
        if name.startswith("sidelane.deep_ep"):
            sys.modules[name.removeprefix("sidelane.")] = module
