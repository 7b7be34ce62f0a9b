"""The one part in C: calls of a communicator that repeat. Compiled where it is first used; all goes on without it."""

from sidelane.native.build import Replays, load_replays
from sidelane.native.effects import Effect, Note

__all__ = ["Effect", "Note", "Replays", "load_replays"]
