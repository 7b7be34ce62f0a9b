"""Entry point of ``python -m sidelane``, which is the command ``sidelane``."""

from sidelane.cli import main

main(prog_name="sidelane")
