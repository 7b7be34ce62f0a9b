"""Collectives that torch.distributed users know, run as verified programs."""

from sidelane.collectives.backend import Work
from sidelane.collectives.communicator import Communicator

__all__ = ["Communicator", "Work"]
