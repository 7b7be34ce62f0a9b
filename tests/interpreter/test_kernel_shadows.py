"""Kernels do what their shadows say, block by block: written down by Triton's interpreter, in several processes."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
from marks import long, needs_triton
from shadowed_kernels import half_of, kernels, name_of

RANKS = Path(__file__).with_name("shadow_ranks.py")

RELAXED = ("ll", "ll_once", "push", "send", "broadcast ll", "broadcast push", "broadcast stage")
"""Kernels that do something apart from the order of a block."""


@needs_triton
@pytest.mark.parametrize(
    ("world_size", "which"),
    [long(1, "lists"), long(2, "lists"), (3, "first"), (3, "second"), long(3, "lists"), long(4, "")],
)
def test_every_block_does_what_its_shadow_says(tmp_path: Path, world_size: int, which: str) -> None:
    """And what a shadow says with a mistake it does not do."""
    said = forked.run(RANKS, (str(world_size), which), tmp_path, {"TRITON_INTERPRET": "1"})
    assert said.count(" steps") == world_size
    there = {name_of(kernel) for kernel in kernels(world_size, 1, 1) if which == "lists" or not kernel.listed}
    names = half_of(there, which)
    if world_size == 4:
        assert [name for name in names if f"a copy left out in {name}\n" not in said] == []
    if world_size != 3:
        return
    for name in names:
        expected = ["a copy left out", "a wait left out"]
        if name.removeprefix("list of ") in RELAXED:
            expected += ["something apart left out", "something apart in order"]
        if not name.endswith(("ll", "ll_once")):
            expected += ["a signal before stores", "another flag"]
        assert [mistake for mistake in expected if f"{mistake} in {name}\n" not in said] == [], name
