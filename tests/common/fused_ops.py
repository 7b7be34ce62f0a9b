"""Fused operators in tests, under Triton's interpreter or on GPUs: against float64, with late ranks.

A rank's tensors are on its default device. All ranks draw the same sizes and inputs, so that each knows what the others
have. Without Triton a file of tests that imports this is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import own_stream
from programs_at_once import programs_at_once

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from sidelane import Communicator, Config
from sidelane.choice.fused import Method
from sidelane.choice.selection import Selection
from sidelane.ops import operator, rms_norm
from sidelane.ops.gemm import TileSizes

if TYPE_CHECKING:
    from device_context import Context

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILES = TileSizes(16, 16, 16, 1, 1, group=2)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of an element, next to the largest one: the last place of the dtype, twice."""


def fused(context: Context, function: Callable[..., Any]) -> Any:
    """Execute a test on this rank's GPU, where ``auto`` is fused: small products are not, by thumb."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "choose_method", fused_always)
        return own_stream(context, function)


def fused_always(*_: object, ways: Sequence[str], **__: object) -> Selection[Method]:
    """In place of the choice: fused, or in parts where an operator has no kernel."""
    return Selection(Method(ways[0]), "a test")


def draws_of(comm: Communicator) -> Draws:
    """Draw what a test on so many ranks has."""
    return Draws(7 if comm.device.type == "cuda" else comm.world_size, comm.rank)


class Draws:
    """Sizes and inputs that all ranks draw alike, and the rank that is late, which each draws for itself."""

    def __init__(self, seed: int, rank: int) -> None:
        self.sizes, self._late = random.Random(seed), random.Random(100 * seed + rank)
        self._values = torch.Generator("cpu").manual_seed(seed)

    def late(self) -> None:
        """Be late at random."""
        time.sleep(0.02 * self._late.random() * (self._late.random() < 0.3))

    def normal(self, *shape: int) -> torch.Tensor:
        """float32, on the CPU."""
        return torch.randn(*shape, generator=self._values, device="cpu")


def check_close(found: torch.Tensor, expected: torch.Tensor, where: object, *, scale: float | None = None) -> None:
    """Compare with float64, next to ``scale`` or the largest element."""
    if scale is None:
        scale = max(1e-3, float(expected.abs().max())) if expected.numel() else 1.0
    error = (found.double().cpu() - expected.cpu()).abs().max().item() / scale if expected.numel() else 0.0
    assert error <= TOLERANCE[found.dtype], (where, error)


def check_all(
    comm: Communicator, compared: Sequence[tuple[torch.Tensor, torch.Tensor]], *, scale: float | None = None
) -> None:
    """Compare all that was kept with float64, once the calls have ended."""
    comm.synchronize()
    for number, (result, expected) in enumerate(compared):
        assert result.shape == expected.shape, number
        check_close(result, expected, number, scale=scale)


def noting(call: Callable[..., Any], word: str, seen: list[str]) -> Callable[..., Any]:
    """Make a call that also writes down a word."""

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(word)
        return call(*arguments, **options)

    return noted


@contextlib.contextmanager
def communicator(group: dist.ProcessGroup, *, debug: bool = False) -> Iterator[Communicator]:
    """One that is patient: CPU ranks interpret kernels."""
    config = Config(timeout_s=60, debug=debug)
    with Communicator(group, device=torch.get_default_device(), config=config) as comm:
        yield comm


@contextlib.contextmanager
def teams_of_programs(programs: int) -> Iterator[None]:
    """Let CPU ranks do as GPUs do: a program has one slice of a row, and waits for those that have the others."""
    with (
        mock.patch.object(rms_norm, "slices_of_a_program", return_value=1),
        mock.patch.object(rms_norm, "programs_of", lambda comm, needed, per_unit: min(needed, programs)),
        programs_at_once(),
    ):
        yield
