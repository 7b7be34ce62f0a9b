"""Verify: prove that a program is right, for every order in which its queues may run, before it runs."""

from sidelane.program.verify.check import Verification, verify, verify_sequence
from sidelane.program.verify.structure import check_structure

__all__ = ["Verification", "check_structure", "verify", "verify_sequence"]
