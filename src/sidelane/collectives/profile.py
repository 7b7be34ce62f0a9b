"""One profile for all ranks of a group: they must choose alike."""

from __future__ import annotations

import torch.distributed as dist

from sidelane.choice.key import key_here
from sidelane.choice.store import InForce, in_force
from sidelane.memory.host_shared import exchange


def agree_on_profile(group: dist.ProcessGroup, device_type: str, setting: str | None) -> InForce:
    """The profile that rank 0 has, on every rank. Collective: one exchange of its text over the group.

    Args:
        group: of any backend.
        device_type: of the ranks' tensors.
        setting: ``Config.profile``; rank 0's counts.

    Raises:
        ValueError: on every rank, if rank 0 was told of a file that is missing or is not a profile.
        PeerError, PeerTimeoutError: a rank did not take part.
    """
    text, problem = "", ""
    if dist.get_rank(group) == 0:
        try:
            text = in_force(setting, key_here(device_type, dist.get_world_size(group))).to_text()
        except ValueError as error:
            problem = str(error)
    text, problem = exchange(group, (text, problem), "the profile to choose by")[0]
    if problem:
        raise ValueError(f"Communicator: {problem}")
    return InForce.from_text(text)
