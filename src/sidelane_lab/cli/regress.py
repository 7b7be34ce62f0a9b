"""A former entry point."""

from sidelane_lab.harness.options import loaded

regress = loaded("harness.regress").regress
