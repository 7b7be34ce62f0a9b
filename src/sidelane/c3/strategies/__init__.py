"""The strategies that there are. Each file registers what it has."""

from sidelane.c3.strategies.everything import FILES
from sidelane.c3.strategies.registry import named, register, strategies

__all__ = ["FILES", "named", "register", "strategies"]
