"""What a study can run: every implementation of a collective behind one interface, and what it must return."""
