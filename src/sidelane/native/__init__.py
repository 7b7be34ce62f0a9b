"""Optional C code, compiled at its first use: repeated calls of a communicator, and memory pools on GPUs."""

from sidelane.native.build import Effect, Note, Replays, load_replays, load_replays_soon

__all__ = ["Effect", "Note", "Replays", "load_replays", "load_replays_soon"]
