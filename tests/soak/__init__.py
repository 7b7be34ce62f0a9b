"""Random calls on real ranks, with faults among them.

Every byte is checked, and every fault is compared with what docs/internals/failure.md promises. ``make soak`` runs it.
"""
