"""A matrix product that leaves room on the compute units for a collective's kernel (overlap paper, 3.1 and 3.4)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidelane.errors import UnavailableError
from sidelane.modes import exclude_compilers
from sidelane_lab.shaping.choice import ShapingChoice
from sidelane_lab.shaping.shape import SHAPES, GemmShape

if TYPE_CHECKING:
    from sidelane.execute.cuda.driver import Driver

LIBRARY = "torch.matmul"
ALIGNMENT = 16


class ShapedMatmul:
    """Product ``a @ b`` by a kernel whose blocks claim a given part of a compute unit.

    The kernel of a collective on another stream (best one of high priority) can use the rest. The shape is
    a hint: if it is not available, ``torch.matmul`` computes the product, and ``ran`` gives the reason. Gradients flow;
    the products of the backward are ``torch.matmul``'s, unshaped. The first call for a size compiles: make it before a
    CUDA graph is captured.

    Args:
        tiles: tile sizes: ``opt1`` (64x64x32), ``opt2`` (64x64x64), ``tuned`` (128x256x64), or a ``GemmShape`` of your
            own.
        blocks: number of blocks of the grid; 0: one for each tile.
        blocks_per_unit: largest number that a compute unit holds at once; None: as many as fit.
        shaping: result of :func:`choose_shaping`, instead; ``torch.matmul`` runs if that shapes nothing.

    Attributes:
        ran: kernel of the last call, with the reason.

    Raises:
        ValueError: the tiles are unknown, or a number is too small.

    >>> product = ShapedMatmul("opt1", blocks_per_unit=2)
    >>> c = product(torch.ones(4, 8), torch.ones(8, 2))
    >>> float(c[0, 0]), product.ran
    (8.0, 'torch.matmul: CPU tensors, and no interpreter (TRITON_INTERPRET=1)')
    """

    def __init__(
        self,
        tiles: str | GemmShape = "tuned",
        *,
        blocks: int = 0,
        blocks_per_unit: int | None = None,
        shaping: ShapingChoice | None = None,
    ) -> None:
        self.ran: str = ""
        self._unshaped = ""
        if shaping is not None:
            chosen = shaping.shaping
            tiles, blocks = chosen.shape, chosen.blocks
            blocks_per_unit = chosen.resident or None if chosen.limited else None
            if not chosen.limited:
                self._unshaped = f"as many blocks as fit are best: {shaping.reason}"
        if isinstance(tiles, str) and tiles not in SHAPES:
            raise ValueError(f"ShapedMatmul: tiles (value={tiles!r}, allowed={', '.join(SHAPES)}, or a GemmShape)")
        if blocks < 0 or (blocks_per_unit is not None and blocks_per_unit < 1):
            allowed = "0 or more, and 1 or more or None"
            raise ValueError(
                f"ShapedMatmul: blocks, blocks_per_unit (value={blocks}, {blocks_per_unit}, allowed={allowed})"
            )
        shape = SHAPES[tiles] if isinstance(tiles, str) else tiles
        self._shape = shape if blocks_per_unit is None else dataclasses.replace(shape, resident=blocks_per_unit)
        self._blocks = blocks

    @exclude_compilers
    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Compute the product on the current stream.

        Args:
            a: [m, k], float32, float16 or bfloat16; copied if it is not contiguous.
            b: [k, n], the same.

        Returns:
            Tensor [m, n], of their type; sums are float32.

        Raises:
            ValueError: tensors that do not fit together.
        """
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.device != b.device:
            given = f"{tuple(a.shape)} {a.dtype} {a.device}, {tuple(b.shape)} {b.dtype} {b.device}"
            raise ValueError(f"ShapedMatmul: a, b (value={given}, allowed=[m, k], [k, n] of one type on one device)")
        problem = self._unshaped or _objection(a, b)
        if problem:
            self.ran = f"{LIBRARY}: {problem}"
            return a @ b
        try:
            found: torch.Tensor = _Product.apply(a, b, self._compute)  # type: ignore[no-untyped-call]
        except UnavailableError as unavailable:
            self.ran = f"{LIBRARY}: {unavailable}"
            return a @ b
        return found

    def _compute(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        tiles = self._shape.tiles(*c.shape)
        blocks = min(self._blocks or tiles, tiles)
        launch, how = _interpreted(self._shape, a, b, c) if a.device.type == "cpu" else _on_units(self._shape, a, b, c)
        launch(blocks)
        self.ran = f"{self._shape.name}: {blocks} blocks{how}"
        return c


class _Product(torch.autograd.Function):
    """Product whose gradients are the library's products."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return compute(a.detach().contiguous(), b.detach().contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        a, b = ctx.saved_tensors
        (gradient,) = gradients
        of_a = gradient @ b.t() if ctx.needs_input_grad[0] else None
        return of_a, a.t() @ gradient if ctx.needs_input_grad[1] else None, None


def _objection(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the reason why no kernel of ours computes it; empty if one does."""
    if a.device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        return f"shaped GEMMs run on NVIDIA GPUs ({a.device.type})"
    if a.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"shaped GEMMs are of float32, float16 or bfloat16 ({a.dtype})"
    if 0 in (*a.shape, *b.shape):
        return "nothing to compute"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if a.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "CPU tensors, and no interpreter (TRITON_INTERPRET=1)"
    # Contiguous ones are read in place; copies are aligned.
    if any(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT for tensor in (a, b)):
        return f"tensors begin at multiples of {ALIGNMENT} bytes"
    return ""


def _interpreted(
    shape: GemmShape, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[Callable[[int], None], str]:
    from sidelane_lab.shaping.kernel import KERNEL, constants_of

    constants = constants_of(shape, a, b, c, wide=True)
    addresses = [tensor.data_ptr() for tensor in (a, b, c)]
    return lambda blocks: KERNEL[(blocks,)](*addresses, **constants), ", interpreted"


def _on_units(shape: GemmShape, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[Callable[[int], None], str]:
    from sidelane_lab.shaping.launch import ShapedGemm

    with torch.cuda.device(a.device):
        kernel = ShapedGemm(_driver(a.device), shape, a, b, c)
    if not kernel.resident:
        raise UnavailableError(f"no block of {shape.name} fits a compute unit ({kernel.shared_bytes} bytes)")

    def launch(blocks: int) -> None:
        with torch.cuda.device(a.device):
            kernel.bind(blocks)()

    return launch, f", {kernel.resident} on a unit"


@functools.cache
def _driver(device: torch.device) -> Driver:
    """Return one driver for all products: it keeps its compiled kernels."""
    from sidelane.execute.cuda.driver import Driver

    return Driver(device)
