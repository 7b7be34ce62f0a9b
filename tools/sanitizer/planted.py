# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, misc"

"""Mistakes made on purpose: what a tool must find, so that finding nothing means something, and what none can find.

Triton puts barriers where they belong, so what breaks them is written in the assembly of the GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from sanitizer.cases import Case
from sidelane.device import flags
from sidelane.device.launch import Launch
from sidelane.kernels import direct

MEMCHECK, RACECHECK, SYNCCHECK, INITCHECK = "memcheck", "racecheck", "synccheck", "initcheck"
TOOLS = (MEMCHECK, RACECHECK, SYNCCHECK, INITCHECK)

_THREADS = 128
_BLOCK_FLAGS = Case("all_gather", "one_shot", 2, (300_001,), odd=True)
_PUSH = Case("all_gather", "one_shot", 4, (655_360,), symmetric=True)


@dataclasses.dataclass(frozen=True)
class Planted:
    """A mistake.

    Attributes:
        what: in words.
        kernel: that makes it.
        found_by: tools that must report it.
        blind: tools that must not, so far as is known: what they cannot judge.
        run: makes it, given a ``ranks.Runner``.
    """

    what: str
    kernel: str
    found_by: tuple[str, ...]
    blind: tuple[str, ...]
    run: Callable[[Any], object]


@triton.jit
def _fill(target, source, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    values = tl.load(source.to(tl.pointer_type(tl.int32)) + lane)
    tl.store(target.to(tl.pointer_type(tl.int32)) + lane, values + 1)


@triton.jit
def _race_in_shared_memory(target, SIZE: tl.constexpr):
    """Each thread writes a word and reads that of a thread of the next warp, without a barrier between."""
    lane = tl.arange(0, SIZE)
    seen = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b8 room[512];
        .reg .b32 base, place;
        mov.b32 base, room;
        mad.lo.s32 place, $1, 4, base;
        st.shared.b32 [place], $1;
        xor.b32 place, $1, 32;
        mad.lo.s32 place, place, 4, base;
        ld.shared.b32 $0, [place];
        }""",
        "=r,r",
        [lane],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(target.to(tl.pointer_type(tl.int32)) + lane, seen)


@triton.jit
def _race_in_global_memory(target, SIZE: tl.constexpr):
    """All blocks store other values in the same words."""
    lane = tl.arange(0, SIZE)
    tl.store(target.to(tl.pointer_type(tl.int32)) + lane, lane + tl.program_id(0))


@triton.jit
def _barrier_of_some(target, FEWER: tl.constexpr, SIZE: tl.constexpr):
    """The first ``FEWER`` threads of a block come to one barrier more than the others."""
    lane = tl.arange(0, SIZE)
    seen = tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.lt.s32 some, $1, $2;
        @some bar.sync 0;
        mov.b32 $0, $1;
        }""",
        "=r,r,r",
        [lane, tl.full([SIZE], FEWER, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(target.to(tl.pointer_type(tl.int32)) + lane, seen)


@triton.jit
def _barrier_of_a_warp(target, SIZE: tl.constexpr):
    """Every thread waits for the lower half of its warp, the upper half too."""
    lane = tl.arange(0, SIZE)
    seen = tl.inline_asm_elementwise(
        "{ bar.warp.sync $2; mov.b32 $0, $1; }",
        "=r,r,r",
        [lane, tl.full([SIZE], 0xFFFF, tl.int32) + tl.program_id(0)],  # a mask that is known is optimised away
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(target.to(tl.pointer_type(tl.int32)) + lane, seen)


def _start(runner: Any, kernel: Any, words: int = _THREADS, blocks: int = 1, **constants: int) -> None:
    target = runner.driver.allocate(4 * words)
    launch = Launch(kernel, blocks, _THREADS // 32, (target,), {"SIZE": _THREADS, **constants})
    runner.start(launch)
    runner.driver.call("cuCtxSynchronize")


def _fill_from(runner: Any, *, target_words: int, written: bool) -> None:
    target, source = runner.driver.allocate(4 * target_words), runner.driver.allocate(4 * _THREADS)
    if written:
        runner.driver.call("cuMemsetD8", source, 1, 4 * _THREADS)
    runner.start(Launch(_fill, 1, _THREADS // 32, (target, source), {"SIZE": _THREADS}))
    runner.driver.call("cuCtxSynchronize")


def _push_without_order(runner: Any) -> None:
    """``push`` whose last signal orders nothing: a peer may see it before what was stored. On one GPU it never does."""
    vars(direct)["signal"] = flags.relaxed_signal
    problem = runner.run(_PUSH)
    print(f"push without order: {problem or 'right results, as always on one GPU'}", flush=True)


PLANTED = {
    "beyond": Planted(
        "a store one word beyond the end of an allocation",
        "_fill",
        (MEMCHECK,),
        (),
        lambda runner: _fill_from(runner, target_words=_THREADS - 1, written=True),
    ),
    "short": Planted(
        "tensors one byte shorter than the kernel was told",
        "block_flags",
        (MEMCHECK,),
        (),
        lambda runner: runner.run(_BLOCK_FLAGS, missing=1, unwritten=1),
    ),
    "unwritten": Planted(
        "a load of memory that nobody has written",
        "_fill",
        (INITCHECK,),
        (),
        lambda runner: _fill_from(runner, target_words=_THREADS, written=False),
    ),
    "gap": Planted(
        "the last byte of every input was never written",
        "block_flags",
        (INITCHECK,),
        (),
        lambda runner: runner.run(_BLOCK_FLAGS, unwritten=1),
    ),
    "shared_race": Planted(
        "threads of two warps use a word of shared memory without a barrier",
        "_race_in_shared_memory",
        (RACECHECK,),
        (),
        lambda runner: _start(runner, _race_in_shared_memory),
    ),
    "half_warp": Planted(
        "half a warp at a barrier of the block",
        "_barrier_of_some",
        (SYNCCHECK,),
        (),
        lambda runner: _start(runner, _barrier_of_some, FEWER=16),
    ),
    "warp_mask": Planted(
        "threads at a barrier of their warp whose mask leaves them out",
        "_barrier_of_a_warp",
        (SYNCCHECK,),
        (),
        lambda runner: _start(runner, _barrier_of_a_warp),
    ),
    "half_block": Planted(
        "half of the warps at one barrier more than the others",
        "_barrier_of_some",
        (),
        (SYNCCHECK,),
        lambda runner: _start(runner, _barrier_of_some, FEWER=64),
    ),
    "global_race": Planted(
        "blocks store other values in the same words of global memory",
        "_race_in_global_memory",
        (),
        (RACECHECK,),
        lambda runner: _start(runner, _race_in_global_memory, blocks=64),
    ),
    "no_order": Planted(
        "the signal behind what was stored for peers orders nothing",
        "direct_push",
        (),
        TOOLS,
        _push_without_order,
    ),
}
