"""A former entry point."""

from sidelane_lab.harness.options import loaded

ordinary = loaded("studies.ordinary").ordinary
