"""The command ``sidelane gemms``, where entry points of older installations look for it."""

from sidelane_lab.harness.options import loaded


def __getattr__(name: str) -> object:
    """Return the command, which stands with its study."""
    return getattr(loaded("studies.gemms"), name)
