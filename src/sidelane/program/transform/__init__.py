"""Transforms: pure functions from Program to Program."""

from sidelane.program.transform.freeze import freeze
from sidelane.program.transform.lower import lower
from sidelane.program.transform.prelaunch import hold, prelaunch

__all__ = ["freeze", "hold", "lower", "prelaunch"]
