"""What a device adds to a communicator: its memory, its executor, and how a call is ordered with the caller's work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sidelane.choice import Abilities
from sidelane.execute.base import Addresses, Executor, LoadedProgram
from sidelane.memory.base import SymmetricMemory
from sidelane.program.kernel import KernelProgram


class Work(Protocol):
    """A collective started with ``async_op=True``."""

    def wait(self) -> None:
        """Order the caller behind the collective: a CPU caller blocks, a GPU caller's current stream waits.

        Raises:
            PeerError, PeerTimeoutError: a peer failed; on GPUs only once the failure has been noticed.
        """
        ...

    def is_completed(self) -> bool:
        """True once the output may be read. Never blocks."""
        ...


class Backend(Protocol):
    """One device type's part of a communicator."""

    @property
    def memory(self) -> SymmetricMemory: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def abilities(self) -> Abilities:
        """What ``auto`` may choose among; the same on all ranks."""
        ...

    def load_kernel(self, program: KernelProgram, addresses: Addresses, frozen: bool) -> LoadedProgram:
        """Bind a collective that one kernel runs. ``frozen``: for a graph under capture.

        Raises:
            UnavailableError: this device runs none (``abilities`` says so).
        """
        ...

    def capturing(self) -> bool:
        """True while the caller's work is being captured into a graph."""
        ...

    def run(
        self, loaded: LoadedProgram, epoch: int, async_op: bool, tensors: Sequence[torch.Tensor], frozen: bool
    ) -> Work | None:
        """Start a program behind the caller's work so far. Without ``async_op``, the caller's next work follows it.

        ``frozen``: the caller's work is being captured, and the program was made for that.
        """
        ...

    def synchronize(self) -> None:
        """Block the host until every call has finished. Raises what went wrong."""
        ...

    def close(self) -> None: ...
