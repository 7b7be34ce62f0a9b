"""Prelaunched collectives from their trigger to their end."""
