"""Objects in the hands of users: communicators, sessions and their lanes, and programs and kernels loaded into them."""

from sidelane.collectives.work import Work
from sidelane.session.bound_program import BoundProgram
from sidelane.session.communicator import Communicator
from sidelane.session.lists import Batched
from sidelane.session.prelaunch import Prelaunched
from sidelane.session.session import Lane, Session

__all__ = ["Batched", "BoundProgram", "Communicator", "Lane", "Prelaunched", "Session", "Work"]
