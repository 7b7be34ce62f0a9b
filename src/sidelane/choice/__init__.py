"""Choice of a way to run a call: candidates, measured profiles, and the choice with its reason."""

from sidelane.choice.candidate import Abilities, Candidate, candidates, illegal_reason
from sidelane.choice.choose import Choice, choose
from sidelane.choice.profile import Curve, Profile

__all__ = [
    "Abilities",
    "Candidate",
    "Choice",
    "Curve",
    "Profile",
    "candidates",
    "choose",
    "illegal_reason",
]
