"""Collectives that torch.distributed users know, run as verified programs."""

from sidelane.collectives.batched import Batched
from sidelane.collectives.bound import BoundProgram
from sidelane.collectives.communicator import Communicator
from sidelane.collectives.prelaunched import Prelaunched
from sidelane.collectives.session import Lane, Session
from sidelane.collectives.work import Work

__all__ = ["Batched", "BoundProgram", "Communicator", "Lane", "Prelaunched", "Session", "Work"]
