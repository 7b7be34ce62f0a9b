"""What all ranks of a lane know alike of ordinary memory, since it follows from posts that all have read
(``learning``): what was offered, what all of them have mapped, what cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.collectives.lesson import Said
from sidelane.collectives.mappings import Mappings, Name


class Knowledge:
    """Of one rank; the same on all of them but for where memory is mapped.

    Args:
        rank: of this process.
        mappings: of what others offer.

    Attributes:
        known: by owner and name of an allocation, the window in which all have heard of it.
        usable: what all ranks have mapped.
        refused: why some rank cannot map it.
        drops: how often something was mapped no more.
    """

    def __init__(self, rank: int, mappings: Mappings) -> None:
        self._rank, self._mappings = rank, mappings
        self.known: dict[Name, int] = {}
        self.usable: set[Name] = set()
        self.refused: dict[Name, str] = {}
        self.drops = 0
        self._not_usable: set[Name] = set()  # yet: of those known

    def hear(self, window: int, said: Sequence[Said], last_ahead: int) -> list[Name]:
        """Take what all ranks have said in one lesson, and have mapped what is new.

        Args:
            window: in which all of them take it.
            said: by rank.
            last_ahead: the last call that may read what was mapped until now.

        Returns:
            What is mapped no more.
        """
        gone = [(rank, name) for rank, each in enumerate(said) for name in each.gone]
        self.drops += bool(gone)
        for each_gone in gone:
            self.known.pop(each_gone, None)
            self.usable.discard(each_gone)
            self._not_usable.discard(each_gone)
            self.refused.pop(each_gone, None)
            self._mappings.drop(each_gone, last_ahead)
        for rank, each in enumerate(said):
            for owner, name, why in each.failed:
                if (owner, name) in self.known:
                    self.refused.setdefault((owner, name), f"rank {rank} cannot map it: {why}")
        for rank, each in enumerate(said):
            for name, handle in each.handles.items():
                if (rank, name) not in self.known:
                    self.known[rank, name] = window
                    self._not_usable.add((rank, name))
                    if rank != self._rank:
                        self._mappings.want((rank, name), handle)
        return gone

    def note_mapped(self, until: int) -> None:
        """All ranks have tried to map what they knew by a window, and have said what they could not."""
        if self._not_usable:
            tried = {name for name in self._not_usable if self.known[name] <= until}
            self._not_usable -= tried
            self.usable |= tried - self.refused.keys()

    def reaches(self, rank: int, name: str) -> bool:
        """True if all ranks have mapped an allocation of a rank, or if it is the one of a tensor without bytes."""
        return not name or (rank, name) in self.usable

    def close(self) -> None:
        """Forget it."""
        self.known.clear()
        self.usable.clear()
        self.refused.clear()
        self._not_usable.clear()
