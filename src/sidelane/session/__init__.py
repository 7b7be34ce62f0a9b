"""Objects in the hands of users: communicators, and programs and kernels loaded into them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sidelane.collectives.work import Work
from sidelane.session.communicator import Communicator
from sidelane.session.lists import Batched

if TYPE_CHECKING:
    from sidelane.session.bound_program import BoundProgram
    from sidelane.session.prelaunch import Prelaunched

__all__ = ["Batched", "BoundProgram", "Communicator", "Prelaunched", "Work"]

_ELSEWHERE = {"BoundProgram": "sidelane.session.bound_program", "Prelaunched": "sidelane.session.prelaunch"}


if not TYPE_CHECKING:  # type checkers read the imports above

    def __getattr__(name: str) -> Any:
        if name in _ELSEWHERE:
            return getattr(import_module(_ELSEWHERE[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
