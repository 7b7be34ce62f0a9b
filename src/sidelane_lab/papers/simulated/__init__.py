"""Studies on machines that need not be here."""
