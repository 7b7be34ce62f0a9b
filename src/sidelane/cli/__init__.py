"""The command ``sidelane``: look at a machine, measure collectives, measure computation next to communication, and
predict both for machines that are not here.
"""

from sidelane.cli.collectives import PHASED
from sidelane.cli.info import DEMO_WORKLOADS
from sidelane.cli.tool import main

__all__ = ["DEMO_WORKLOADS", "PHASED", "main"]
