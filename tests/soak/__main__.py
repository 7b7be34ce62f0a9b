"""``python -m soak``: what ``make soak`` runs. Exit status 1 if anything was not as it must be."""

import sys

from soak.campaign import main

if __name__ == "__main__":
    sys.exit(main())
