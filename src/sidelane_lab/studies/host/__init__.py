"""The study of host time."""
