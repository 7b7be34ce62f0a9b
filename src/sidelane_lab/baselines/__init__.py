"""Implementations of collectives behind one interface, and the results that they must have."""
