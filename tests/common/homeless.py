"""Users without a home, as in containers whose user is a number that ``/etc/passwd`` does not have."""

from __future__ import annotations

import pytest


def leave_home(patch: pytest.MonkeyPatch) -> None:
    """Let this process have no home."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        patch.delenv(name, raising=False)
    patch.setattr("pwd.getpwuid", _unknown)


def _unknown(uid: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {uid}")
