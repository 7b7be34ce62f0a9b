"""Verify: prove that a program is right, for every order in which its queues may run, before it runs."""

from sidelane.program.verify.check import Verification, verify, verify_sequence

__all__ = ["Verification", "verify", "verify_sequence"]
