"""What tests of the choice share: candidates, curves and profiles of a made-up machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sidelane.choice import Candidate, Curve, Profile
from sidelane.choice.candidate import DMA, SM
from sidelane.choice.fused import FusedTime
from sidelane.choice.key import MachineKey
from sidelane.config import BESIDE
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape

B2B, PCPY, BCST = (Candidate(DMA, name) for name in ("b2b", "pcpy", "bcst"))
ONE_SHOT = Candidate(SM, "one_shot")
KEY = MachineKey("cuda", "NVIDIA H999", 4, "18 to a switch", (("driver", "1.0"), ("torch", "2.0")))


def curve(candidate: Candidate, *times: tuple[int, float], **others: Any) -> Curve:
    given: dict[str, Any] = {
        "kind": Kind.ALL_GATHER,
        "world_size": 4,
        "dtype": "bfloat16",
        "in_place": False,
        "captured": False,
    }
    return Curve(**{**given, **others}, candidate=candidate, times=times)


def profile(*curves: Curve) -> Profile:
    return Profile("h999x4", KEY, "2026-01-02T03:04:05+00:00", "sidelane tune", curves)


def keep(key: MachineKey, times: Iterable[FusedTime]) -> Path:
    """Write the user's file of a machine with times of fused operators."""
    from sidelane_lab.studies.fused import study  # takes a while

    return study.keep(Profile("h999x4", key, "2026-01-02T03:04:05+00:00", "sidelane fused --keep", (), tuple(times)))


def gather(nbytes: int = 4096, **others: Any) -> CallShape:
    return CallShape(Kind.ALL_GATHER, 4, nbytes, **others)


CROSSING = profile(
    curve(ONE_SHOT, (1024, 5.0), (1 << 20, 50.0)),
    curve(B2B, (1024, 20.0), (1 << 20, 25.0)),
    curve(PCPY, (1024, 21.0), (1 << 20, 40.0)),
)


def calls_of_all_kinds() -> list[CallShape]:
    axes = itertools.product(Kind, (1, 2, 8, 16), (False, True), (False, True), (False, True), BESIDE, (False, True))
    return [
        CallShape(kind, n, 4096, "int32", place, symm, captured, hint, even)
        for kind, n, place, symm, captured, hint, even in axes
    ]
