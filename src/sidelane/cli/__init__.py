"""The command ``sidelane``: this package has its framework and the library's own commands; other packages add theirs.

A command is added by an entry point of the group ``sidelane.commands``.
"""

from typing import Any

__all__ = ["main"]


def __getattr__(name: str) -> Any:
    # The laboratory imports modules of this package, and those of the tool are not needed for that.
    if name == "main":
        from sidelane.cli.tool import main

        return main
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
