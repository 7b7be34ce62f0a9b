"""Every kernel as an H200 gets it: compiled here, where no GPU is, for 8 ranks and odd sizes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from marks import long

if importlib.util.find_spec("triton") is None:  # it has no packages for macOS, where there is nothing to compile for
    pytest.skip("Triton is not installed", allow_module_level=True)

import own_kernels
import triton
from triton.backends.compiler import GPUTarget

from sidelane.device.launch import Launch, LaunchSite
from sidelane.execute.cuda.kernel_launch import compile_for
from sidelane.kernels import (
    broadcast_cells,
    broadcast_parcels,
    broadcast_push,
    broadcast_relay,
    exchange_cells,
    exchange_parcels,
    list_broadcast_parcels,
    list_broadcast_push,
    list_direct,
    list_parcels,
    list_pull,
    list_push,
    parcels,
    pull,
    push,
    reduce_cells,
    reduce_direct,
    reduce_parcels,
    reduce_pull,
    reduce_push,
    relay,
)
from sidelane.kernels.list_table import ListPiece, ListTable
from sidelane.program.collective import ReduceOp, Reduction
from sidelane.program.kernel import NARROW_BLOCKS

H200 = GPUTarget("cuda", 90, 32)
MOST_STACK_BYTES = 1024
"""Of a thread, as a context has from the start: for more, the driver waits until nothing runs, and takes up to a
gigabyte of the GPU."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
AVERAGE = Reduction(ReduceOp.AVG, "bfloat16")
MB = 1 << 20


RANKS = 8
SITE = LaunchSite(0, tuple(range(MB, (RANKS + 1) * MB, MB)), 64, 64)
STAGINGS = (16 * MB,) * RANKS


def moving(odd: int) -> Iterator[Launch]:
    """One of each kernel; addresses and sizes are ``odd`` bytes beyond a multiple of 16."""
    here, small, large = 16 * MB + odd, 4096 + odd, MB + odd
    reached = (here,) * RANKS
    for distinct in (True, False):
        yield exchange_cells.arrange(SITE, here, here, small, distinct=distinct)
        yield exchange_parcels.arrange(SITE, here, here, small, distinct=distinct)
        yield push.arrange(SITE, reached, here, large, distinct=distinct)
        yield pull.arrange(SITE, here, here, STAGINGS, large, distinct=distinct)
    yield broadcast_cells.arrange(SITE, here, small, 1)
    yield broadcast_parcels.arrange(SITE, here, small, 1)
    yield broadcast_relay.arrange(SITE, here, large, 1)
    yield broadcast_push.arrange(SITE, here, reached, large, 1, staged=False)
    yield broadcast_push.arrange(SITE, here, STAGINGS, large, 1, staged=True)
    tables = table(odd, parcels.TILE_BYTES)
    yield list_parcels.arrange(*tables, None, distinct=True)
    yield list_push.arrange(*table(odd, list_push.TILE_BYTES, 1), distinct=True)
    moved = table(odd, list_pull.tile_bytes(None))
    yield list_pull.arrange(*moved, STAGINGS, 2 * MB + 32, None, distinct=True)
    yield list_broadcast_parcels.arrange(*tables, 1)
    yield list_broadcast_push.arrange(*table(odd, relay.TILE_BYTES, 1), 1, None)
    yield list_broadcast_push.arrange(*table(odd, relay.TILE_BYTES), 1, STAGINGS)


def reducing(odd: int) -> Iterator[Launch]:
    here, small, large = 16 * MB + odd, 4096 + odd, MB + odd
    reached = (here,) * RANKS
    yield reduce_cells.arrange(SITE, here, here, small, AVERAGE, distinct=True)
    yield reduce_parcels.arrange(SITE, here, here, small, AVERAGE, distinct=True)
    for gather in (True, False):
        outputs = reached if gather else (here,)
        yield reduce_pull.arrange(SITE, here, here, STAGINGS, large, RANKS * large, AVERAGE, gather=gather)
        yield reduce_direct.arrange(SITE, outputs, reached, large, RANKS * large, AVERAGE, gather=gather)
    yield reduce_push.arrange(SITE, reached, here, STAGINGS, large, RANKS * large, AVERAGE)
    yield list_parcels.arrange(*table(odd, parcels.TILE_BYTES), AVERAGE, distinct=False)
    yield list_direct.arrange(*table(odd, list_direct.TILE_BYTES, 2), AVERAGE, gather=True)
    reduced = table(odd, list_pull.tile_bytes(AVERAGE))
    yield list_pull.arrange(*reduced, STAGINGS, 2 * MB + 32, AVERAGE, distinct=False, gather=True)


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
    text = triton.compile(source, target=H200, options={"num_warps": 4}).asm["ptx"]
    signals, waits = text.count(".sys.release.exch"), text.count(".sys.acquire.add")
    if name == "counted":
        assert re.search(r"(red|atom)\.[a-z.]*release[a-z.]*sys[a-z.0-9]*add|(red|atom)[a-z.]*sys\.release\.add", text)
        assert text.count(".sys.acq_rel.add") == 1, "the last program"
    assert bool(signals) == (name != "waits_for") and waits and ".gpu.acq_rel.add" in text


@pytest.mark.parametrize(("ranks", "available"), [(4, 227 << 10), (8, 227 << 10), (4, 163 << 10), (3, 0)])
def test_narrow_reductions_take_no_more_shared_memory_than_there_is(ranks: int, available: int) -> None:
    site = LaunchSite(0, SITE.arenas[:ranks], 64, NARROW_BLOCKS, available)
    inputs = (16 * MB,) * ranks
    launch = reduce_direct.arrange(site, inputs, inputs, MB, ranks * MB, AVERAGE, gather=True)
    shared = compile_for(H200, launch.kernel, launch.constants, launch.warps).metadata.shared
    assert shared <= max(available, 1024)
    assert shared > available // 2, "tiles are copied ahead"


def table(odd: int, tile_bytes: int, groups: int = 0) -> tuple[LaunchSite, ListTable, int]:
    here = 16 * MB + odd
    piece = ListPiece(here, here, MB + odd, MB + odd, MB + odd, 0, ((here,) * RANKS,) * groups)
    return SITE, ListTable.of([piece] * 2, tile_bytes), 64


@pytest.mark.parametrize(("what", "odd"), [long(moving, 1), (reducing, 2)])
def test_every_kernel_compiles_and_fits_into_registers(what, odd: int, tmp_path: Path) -> None:
    binary = tmp_path / "kernel.cubin"
    for launch in what(odd):
        compiled = compile_for(H200, launch.kernel, launch.constants, launch.warps)
        binary.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
        ).stdout
        (stack,) = re.findall(r"STACK:(\d+)", text)
        assert int(stack) <= MOST_STACK_BYTES, (launch.kernel.__name__, launch.constants)
