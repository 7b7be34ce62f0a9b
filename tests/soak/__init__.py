"""Random calls on real ranks: campaigns with faults among them, and storms of ordinary tensors that come and go.

Every byte is checked, and every fault is compared with what docs/internals/failure.md promises. ``make soak`` runs it.
"""
