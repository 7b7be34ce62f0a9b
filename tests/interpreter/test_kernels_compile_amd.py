"""Every kernel as AMD's GPUs get it: compiled here, where none is, and its fences looked for in the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from marks import long

pytest.importorskip("triton")

import triton
import triton.language as tl
from every_kernel import MB, moving, reducing
from triton.backends.compiler import GPUTarget

from sidelane.device import stamps
from sidelane.device.launch import Launch
from sidelane.execute.cuda import reduce
from sidelane.execute.cuda.kernel_launch import KernelBinary, compile_for
from sidelane.program.collective import Reduction


@triton.jit
def clock(place):  # type: ignore[no-untyped-def]
    tl.store(place, stamps.amd_clock_ns())


FLAGLESS = ("_ll", "_ll_broadcast")
"""Kernels whose data carry their own flags: no fence orders them, each word is stored as a whole."""

PARTS = 3
"""Number of tests that share the kernels: one for all would compile for more than 4 CPU seconds."""

LOCAL_MEMORY_BYTES = 64 << 10
MOST_THREADS = 1024


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("architecture", ["gfx942", long("gfx950")])
@pytest.mark.parametrize("launches", [moving, reducing])
def test_every_kernel_compiles_with_its_fences(
    launches: Callable[[int, int], Iterator[Launch]], architecture: str, part: int
) -> None:
    """A signal makes earlier stores visible to the system (``buffer_wbl2 sc0 sc1``), and a wait drops stale lines."""
    found: dict[str, Launch] = {}
    for launch in launches(2, 4):
        found.setdefault(launch.kernel.__name__, launch)
    assert len(found) > PARTS
    for name, launch in [*found.items()][part::PARTS]:
        compiled = compile_for(GPUTarget("hip", architecture, 64), launch.kernel, launch.constants, launch.warps)
        text = compiled.asm["amdgcn"]
        binary = KernelBinary.of(compiled)
        assert binary.image.startswith(b"\x7fELF") and binary.shared_bytes <= LOCAL_MEMORY_BYTES
        if name in FLAGLESS:
            continue
        code = [line.strip() for line in text.splitlines()]
        released = [number for number, line in enumerate(code) if line.startswith("buffer_wbl2 sc0 sc1")]
        acquired = [number for number, line in enumerate(code) if line.startswith("buffer_inv sc0 sc1")]
        assert released and acquired, f"{name}: a flag is signalled or awaited without a fence"
        for number in released:  # nothing but a wait for the write-back comes between the fence and the flag's store
            after = [line for line in code[number + 1 : number + 40] if line and not line.startswith((";", "."))]
            until = next(i for i, line in enumerate(after) if re.match(r"(global|flat)_(atomic|store)", line))
            assert any(line.startswith("s_waitcnt vmcnt(0)") for line in after[:until]), f"{name}: {after[:until]}"


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("sources", "dtype"), [(8, "bfloat16"), (16, "float32"), (2, "int64")])
def test_the_kernel_that_adds_what_engines_have_moved_compiles(sources: int, dtype: str, architecture: str) -> None:
    """The one kernel of a communicator's own on AMD GPUs: its blocks have as many threads as one may have there."""
    launch = reduce.arrange(16 * MB, [32 * MB * n for n in range(1, sources + 1)], MB, Reduction("sum", dtype), 32)
    binary = KernelBinary.of(
        compile_for(GPUTarget("hip", architecture, 64), launch.kernel, launch.constants, launch.warps)
    )
    assert binary.image.startswith(b"\x7fELF") and 64 * binary.warps <= MOST_THREADS
    assert binary.shared_bytes <= LOCAL_MEMORY_BYTES


def test_stamps_read_the_constant_clock() -> None:
    source = triton.compiler.ASTSource(clock, {"place": "*i64"}, {})
    text = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options={"num_warps": 1}).asm["amdgcn"]
    assert "s_memrealtime" in text
