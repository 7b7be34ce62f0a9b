"""``sidelane tune``: from measurements to the profile of a machine."""
