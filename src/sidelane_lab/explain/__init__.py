"""The command ``sidelane explain``: what ``auto`` takes for a call, and why."""
