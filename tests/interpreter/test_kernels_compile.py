"""Every kernel as an H200 gets it: compiled here, where no GPU is, for 8 ranks and odd sizes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from marks import long

pytest.importorskip("triton")  # it has no packages for macOS, where there is nothing to compile for

import own_kernels
import triton
from every_kernel import AVERAGE, MB, moving, reducing, site_of, table, tiles
from triton.backends.compiler import GPUTarget

from sidelane.device.language import compiling_for, is_nvidia
from sidelane.device.launch import LaunchSite
from sidelane.execute.cuda.kernel_launch import compile_for
from sidelane.kernels import direct, ll, through_host
from sidelane.kernels.tile_table import KernelPiece, Tiles, TileTable
from sidelane.program.kernel import HOST_BLOCKS, NARROW_BLOCKS

H200 = GPUTarget("cuda", 90, 32)
MOST_STACK_BYTES = 1024
"""Of a thread, as a context has from the start: for more, the driver waits until nothing runs, and takes up to a
gigabyte of the GPU."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


OWN = {
    "push_tiles": {"context": "*i64", "outputs": "*i64", "shard": "*fp32", "count": "i32", "TILE": "constexpr"},
    "sum_of_all": {"context": "*i64", "output": "*bf16", "inputs": "*i64", "count": "i32", "TILE": "constexpr"},
    "along_the_ring": {"context": "*i64", "boxes": "*i64", "box": "*i64", "data": "*i64", "TILE": "constexpr"},
    "counted": {
        "context": "*i64",
        "boxes": "*i64",
        "box": "*i64",
        "output": "*i64",
        "counters": "*i32",
        "data": "*i64",
        "TILE": "constexpr",
    },
    "to_the_next": {"context": "*i64", "boxes": "*i64", "box": "*i64", "data": "*i64", "TILE": "constexpr"},
    "waits_for": {"context": "*i64", "peer": "i32", "flag": "i32"},
}


@pytest.mark.parametrize("name", OWN)
def test_kernels_of_ones_own_compile(name: str) -> None:
    """Signals release, and waits acquire, at system scope; each in front of or behind a barrier of all threads."""
    constants = {"TILE": 1024} if "TILE" in OWN[name] else {}
    source = triton.compiler.ASTSource(getattr(own_kernels, name), OWN[name], constants)
    with compiling_for("cuda"):
        text = triton.compile(source, target=H200, options={"num_warps": 4}).asm["ptx"]
    signals, waits = text.count(".sys.release.exch"), len(re.findall(r"ld\.acquire\.sys.*?bar\.sync", text, re.DOTALL))
    if name == "counted":
        assert re.search(r"(red|atom)\.[a-z.]*release[a-z.]*sys[a-z.0-9]*add|(red|atom)[a-z.]*sys\.release\.add", text)
        assert text.count(".sys.acq_rel.add") == 1, "the last program"
    assert bool(signals) == (name != "waits_for") and waits and ".gpu.acq_rel.add" in text


@pytest.mark.parametrize("ranks", [2, 3])
def test_kernels_through_host_memory_have_wide_loads_and_few_senders(ranks: int) -> None:
    site = LaunchSite(0, site_of(8).arenas[:ranks], 64, 1024, HOST_BLOCKS)
    launch = ll.arrange(site, 16 * MB, 32 * MB, 128 << 10, AVERAGE, distinct=False, once=True)
    text = compile_for(H200, launch.kernel, launch.constants, launch.warps).asm["ptx"]
    assert "ld.volatile.global.v2.b64" in text and "st.global.v2.b64" in text
    assert "ld.volatile.global.b64" not in text
    assert [
        through_host.arrange(
            site, cut(size * MB // 2, 8192, ranks), (MB,) * ranks, MB, AVERAGE, distinct=distinct, root=None
        ).blocks
        for cut, distinct in ((tiles, False), (tiles, True), (table, False))
        for size in (1, 2, 4, 8)
    ] == ([10, 10, 20, 40] if ranks == 2 else [40] * 4) + [40] * 8, "reduce-scatters and lists were not measured"


@pytest.mark.parametrize(("ranks", "available"), [(4, 227 << 10), (8, 227 << 10), (4, 163 << 10), (3, 0)])
def test_narrow_reductions_take_no_more_shared_memory_than_there_is(ranks: int, available: int) -> None:
    site = LaunchSite(0, site_of(8).arenas[:ranks], 64, 1024, NARROW_BLOCKS, available)
    piece = KernelPiece(16 * MB, 16 * MB, MB, groups=((16 * MB,) * ranks,) * 2)
    tiles = Tiles.of(piece, direct.tile_bytes_at(site, listed=False))
    launch = direct.arrange(site, tiles, tiles.count, AVERAGE, gather=True)
    shared = compile_for(H200, launch.kernel, launch.constants, launch.warps).metadata.shared
    assert shared <= max(available, 1024)
    assert shared > available // 2 or not available, "tiles are copied ahead"


@pytest.mark.parametrize(("nbytes", "is_branch"), [(MB, False), (MB + 2, True)])
def test_tiles_that_all_are_aligned_take_no_branch(nbytes: int, is_branch: bool) -> None:
    """A list of one took 3 to 7% longer with both branches (results/h200x2/kernels-66.txt). Only single elements that
    are stored to any address go through shared memory.
    """
    piece = KernelPiece(16 * MB, 16 * MB, nbytes, groups=((16 * MB,) * 2,) * 2)
    tiles = TileTable.of([piece], direct.LISTED_TILE_BYTES).at(16 * MB)
    launch = direct.arrange(site_of(2), tiles, tiles.count, AVERAGE, gather=False)
    assert (compile_for(H200, launch.kernel, launch.constants, launch.warps).metadata.shared > 0) == is_branch


@pytest.mark.parametrize(
    ("what", "odd", "part"), [long(moving, 1, slice(None)), *((reducing, 2, slice(n, None, 4)) for n in range(4))]
)
def test_every_kernel_compiles_and_fits_into_registers(what, odd: int, part: slice, tmp_path: Path) -> None:
    binary = tmp_path / "kernel.cubin"
    for launch in list(what(odd))[part]:
        compiled = compile_for(H200, launch.kernel, launch.constants, launch.warps)
        binary.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
        ).stdout
        (stack,) = re.findall(r"STACK:(\d+)", text)
        assert int(stack) <= MOST_STACK_BYTES, (launch.kernel.__name__, launch.constants)
        assert ("griddepcontrol" in compiled.asm["ptx"]) == ("DEPENDENT" in launch.constants), launch.kernel.__name__


def test_what_a_kernel_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait acquires by a load on NVIDIA's GPUs, by an atomic operation on others, and so in the interpreter."""
    assert not is_nvidia(), "there is no GPU here"
    with compiling_for("cuda"):
        assert is_nvidia()
        with compiling_for("hip"):
            assert not is_nvidia()
        with monkeypatch.context() as patched:
            patched.setenv("TRITON_INTERPRET", "1")
            assert not is_nvidia()
    (launch, *_) = (one for one in reducing(2) if one.kernel.__name__ == "_direct_reduce")
    text = compile_for(H200, launch.kernel, launch.constants, launch.warps).asm["ptx"]
    assert "ld.acquire.sys" in text and ".sys.acquire.add" not in text
    amd = compile_for(GPUTarget("hip", "gfx942", 64), launch.kernel, launch.constants, launch.warps).asm["amdgcn"]
    assert "ld.acquire" not in amd and "buffer_inv sc0 sc1" in amd, "an acquire at system scope"


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_kernel_that_is_launched_ahead_waits_before_all_else(capability: int) -> None:
    """Only where it was measured."""
    for launch in (one for one in (*moving(1), *reducing(2)) if "DEPENDENT" in one.constants):
        assert not launch.constants["DEPENDENT"], "by other launchers it is launched as usual"
        made = compile_for(GPUTarget("cuda", capability, 32), launch.kernel, launch.constants, launch.warps)
        before, wait, _ = made.asm["ptx"].partition("griddepcontrol.wait")
        assert bool(wait) == (capability == 90) and "griddepcontrol.launch" not in made.asm["ptx"]
        assert not wait or not re.search(r"\b(ld|st|red|atom)\.(?!param)", before)
