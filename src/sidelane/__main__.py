"""``python -m sidelane`` is the command ``sidelane``."""

from sidelane.cli import main

main(prog_name="sidelane")
