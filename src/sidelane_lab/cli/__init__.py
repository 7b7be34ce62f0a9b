"""The laboratory's commands of the tool ``sidelane``, which finds them by their entry points."""
