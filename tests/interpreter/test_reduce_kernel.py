"""The reducing kernel under Triton's CPU interpreter, in a process of its own: the interpreter is chosen at import."""

from __future__ import annotations

import sys
from pathlib import Path

import forked
import pytest
import torch
from expected import in_rank_order
from marks import needs_triton

from sidelane.program.collective import ELEMENT_BYTES, ReduceOp, Reduction


@needs_triton
@pytest.mark.parametrize("dtype", list(ELEMENT_BYTES))
def test_against_torch(tmp_path: Path, dtype: str) -> None:
    forked.run(Path(__file__), (dtype,), tmp_path, {"TRITON_INTERPRET": "1"})


def compare(dtype_name: str, op: ReduceOp, sources: int, count: int, offset: int) -> None:
    """Reduce ``count`` elements that begin ``offset`` elements behind an aligned address, and look at the margins."""
    from sidelane.execute.cuda.reduce import arrange

    dtype = getattr(torch, dtype_name)
    margin = 8
    generator = torch.Generator().manual_seed(count + offset)
    if dtype.is_floating_point:
        values = (100 * torch.randn(sources, count + 2 * margin, generator=generator)).to(dtype)
        values[0, margin + offset + count // 2] = float("nan")
    else:
        limits = torch.iinfo(dtype)
        values = torch.randint(limits.min, limits.max, (sources, count + 2 * margin), generator=generator, dtype=dtype)
    rows = [row.clone() for row in values]
    out = torch.full((count + 2 * margin,), 77, dtype=dtype)
    begin = margin + offset
    wanted = in_rank_order([row[begin : begin + count] for row in rows], op)
    start = begin * dtype.itemsize
    addresses = [row.data_ptr() + start for row in rows]
    reduction = Reduction(op, dtype_name)
    launch = arrange(out.data_ptr() + start, addresses, count * dtype.itemsize, reduction, blocks=3)
    launch.kernel[(launch.blocks,)](*launch.arguments, **launch.constants)
    assert (out[:begin] == 77).all() and (out[begin + count :] == 77).all(), "wrote beyond its bytes"
    got = out[begin : begin + count]
    if dtype is torch.bfloat16:
        # The interpreter truncates where hardware rounds to nearest: one unit in the last place.
        torch.testing.assert_close(got.float(), wanted.float(), rtol=2**-7, atol=0, equal_nan=True)
    else:
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def main(dtype_name: str) -> None:
    from sidelane.device.triton_interpreter import quick_interpreter

    with quick_interpreter():
        for op in ReduceOp:
            for sources, count, offset in ((1, 5, 0), (2, 1, 1), (3, 4096, 0), (4, 4103, 3)):
                compare(dtype_name, op, sources, count, offset)
        for sources, count in ((4, 50_001), (16, 20_000)):  # several blocks, several times
            compare(dtype_name, ReduceOp.SUM, sources, count, 0)


if __name__ == "__main__":
    main(sys.argv[1])
