"""Memory between the steps of calls among several nodes."""

from __future__ import annotations

import torch

from sidelane.errors import UnavailableError
from sidelane.integrations.nodes.steps import PACKED
from sidelane.session import Communicator


class Scratch:
    """Scratch tensors: symmetric memory of the node for the inputs of near steps, kept for later calls; others are
    ordinary.

    Calls have one order, and all ranks of a node take the same. If the node has no symmetric memory left, and within
    a capture, all of it is ordinary memory, and near steps stage it.

    Args:
        near: communicator of the node.
    """

    def __init__(self, near: Communicator) -> None:
        self._near = near
        self._held: dict[str, torch.Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``count`` uninitialised elements. Collective in the node if more are needed than before.

        Raises:
            PeerError, PeerTimeoutError: a rank of the node failed, or did not come.
        """
        near, nbytes = self._near, count * dtype.itemsize
        captured = near.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not name.startswith(PACKED) or near.world_size == 1 or captured:
            return torch.empty(count, dtype=dtype, device=near.device)
        held = self._held.get(name)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                near.synchronize()  # calls under way use it
                del self._held[name], held
            try:
                held = near.empty(nbytes, dtype=torch.uint8)
            except UnavailableError:
                return torch.empty(count, dtype=dtype, device=near.device)
            self._held[name] = held
        return held[:nbytes].view(dtype)

    def clear(self) -> None:
        """Release the kept memory."""
        self._held.clear()
