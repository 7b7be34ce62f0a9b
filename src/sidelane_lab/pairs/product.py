"""The GEMM of a pair, with its matrices, a reference and a check."""

from __future__ import annotations

import math

import torch

from sidelane.c3.workload import Gemm

RELATIVE_ERROR = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-4}
ABSOLUTE_ERROR = {"bfloat16": 1e-3, "float16": 1e-3, "float32": 1e-5}
"""Allowed deviation of a GEMM from the same GEMM alone: two roundings of the result, and an absolute term in units of
its standard deviation, sqrt(k) for normal inputs. A library may pick another kernel on another stream."""


class GemmRun:
    """A GEMM with its matrices, a reference and a check."""

    def __init__(self, gemm: Gemm, device: torch.device) -> None:
        dtype = getattr(torch, gemm.dtype)
        self.gemm = gemm
        self.a = torch.empty(gemm.m, gemm.k, dtype=dtype, device=device)
        self.b = torch.empty(gemm.k, gemm.n, dtype=dtype, device=device)
        self.c = torch.empty(gemm.m, gemm.n, dtype=dtype, device=device)
        self._expected = torch.empty_like(self.c)

    def run(self) -> None:
        """Multiply, on the current stream."""
        torch.mm(self.a, self.b, out=self.c)

    def fill(self, seed: int) -> None:
        """Fresh normal inputs, their product with nothing else running, and a poisoned result."""
        generator = torch.Generator(device=self.a.device).manual_seed(seed)
        self.a.normal_(generator=generator)
        self.b.normal_(generator=generator)
        torch.mm(self.a, self.b, out=self._expected)
        self.poison()

    def poison(self) -> None:
        """Overwrite the result, so that one that nobody computes again is noticed."""
        self.c.fill_(math.nan)

    def error(self) -> str | None:
        """What is wrong with the result; None if nothing is."""
        rtol, atol = RELATIVE_ERROR[self.gemm.dtype], ABSOLUTE_ERROR[self.gemm.dtype] * math.sqrt(self.gemm.k)
        if torch.allclose(self.c, self._expected, rtol=rtol, atol=atol):
            return None
        return f"the GEMM's result differs from that of the GEMM alone (rtol={rtol:.2g}, atol={atol:.2g})"
