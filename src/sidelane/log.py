"""The library's log: Python's logger ``sidelane``, which ``SIDELANE_LOG`` prints where the program sets up no logging.

``INFO`` has a line for each communicator that is made (versions, machine, memory, the times that it chooses by), for
the first call of each shape, before staging for ordinary tensors grows, and for what else the ranks agree on, such as a
program or a kernel of one's own.
``WARNING`` has one for each reason why calls fall back to something slower or to another backend, and one for each wait
for another rank that lasts (``Config.warn_s``). Nothing is logged for repeated calls.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "WARNING": logging.WARNING}
"""Values of ``SIDELANE_LOG``; capital letters do not matter."""


class UnfailingLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger whose handlers and filters, which are the program's, fail no call: peers would wait for it.

    An error of one is printed to the standard error, as Python's own handlers do.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See ``logging.Logger.log``; the other methods come here."""
        try:
            super().log(level, msg, *args, stacklevel=2, **kwargs)
        except Exception:
            if logging.raiseExceptions and sys.stderr:
                traceback.print_exc()


calls = UnfailingLogger(logging.getLogger("sidelane.calls"))
"""Logger of communicators and their calls. Unless a handler is set up, it prints nothing, not even warnings."""

calls.logger.addHandler(logging.NullHandler())

waits = UnfailingLogger(logging.getLogger("sidelane.waits"))
"""Logger of waits that last. Unless a handler is set up, Python prints its warnings to the standard error."""


def show(level: int) -> None:
    """Print what is logged at a level or above to the standard error. Where the program has set up handlers, of this
    logger or of the root, these get it instead.
    """
    logger = logging.getLogger("sidelane")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[sidelane] %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
