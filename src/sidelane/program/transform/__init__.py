"""Transforms: pure functions from Program to Program."""

from sidelane.program.transform.freeze import freeze
from sidelane.program.transform.lower import lower
from sidelane.program.transform.prelaunch import hold

__all__ = ["freeze", "hold", "lower"]
