"""The driver of a GPU by its vendor, which torch tells: both vendors' devices are called ``cuda``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sidelane.execute.cuda.driver import Driver


def make_driver(device: torch.device) -> Driver:
    """Return a driver of ``device``.

    Raises:
        UnavailableError: the vendor's library is missing or too old.
    """
    if torch.version.hip is not None:
        from sidelane.execute.hip import HipDriver

        return HipDriver(device)
    from sidelane.execute.cuda.driver import Driver

    return Driver(device)
