"""One profile for all ranks of a group: they must choose alike."""

from __future__ import annotations

from sidelane.choice.key import key_here
from sidelane.choice.store import InForce, in_force
from sidelane.memory.exchange import Exchange


def agree_on_profile(exchange: Exchange, device_type: str, setting: str | None) -> InForce:
    """The profile that rank 0 has, on every rank. Collective: one exchange of its text.

    Args:
        exchange: of the ranks.
        device_type: of the ranks' tensors.
        setting: ``Config.profile``; rank 0's counts.

    Raises:
        ValueError: on every rank, if rank 0 was told of a file that is missing or is not a profile.
        PeerError, PeerTimeoutError: a rank did not take part.
    """

    def own() -> tuple[str, str]:
        if exchange.rank:
            return "", ""
        try:
            return in_force(setting, key_here(device_type, exchange.world_size)).to_text(), ""
        except ValueError as error:
            return "", str(error)

    text, problem = exchange("the profile to choose by", own)[0]
    if problem:
        raise ValueError(f"Communicator: {problem}")
    return InForce.from_text(text)
