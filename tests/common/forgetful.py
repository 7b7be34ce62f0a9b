"""Gloo as an implementation with a race is: one rank's last byte is wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidelane_lab.baselines.baselines_cpu import Gloo
from sidelane_lab.baselines.candidate import Tensors
from sidelane_lab.baselines.reference import Case


class Forgetful(Gloo):
    """Leaves one byte out, on one rank."""

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        wait = super().start(case, tensors, variant)

        def forget() -> None:
            wait()
            if case.rank == 1 and tensors.output is not None:
                tensors.output.view(torch.uint8)[-1] ^= 255

        return forget
