"""Kernels of one's own between CPU processes, by Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from marks import long
from ranks import Crew, RankPool

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import firing
import own_kernels


def interpreting_crew() -> Crew:
    """Three processes that interpret kernels; this one does not, nor does anybody whom it starts later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return Crew(3)


@pytest.fixture(scope="module")
def three() -> Iterator[Crew]:
    """Ranks that all tests share."""
    found = interpreting_crew()
    yield found
    found.close()


@pytest.mark.parametrize("world_size", [long(1), long(2), 3])
def test_kernels_and_collectives_in_turn(three: Crew, world_size: int) -> None:
    launches = three.run(own_kernels.everything, world_size, world_size, 40, timeout_s=120)
    assert len(set(launches)) == 1 and launches[0] > 20


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_as_flags_and_the_last_program(three: Crew, world_size: int) -> None:
    assert three.run(own_kernels.counting, world_size, world_size, 6, timeout_s=100) == [6] * world_size


def test_what_is_refused(three: Crew) -> None:
    for told in three.run(own_kernels.refused, 3):
        assert [text.split(":")[0] for text in told] == ["ValueError"] * 5 + [
            "TypeError",
            "ValueError",
            "MismatchError",
            "RuntimeError",
        ]
        assert all("grid (value=" in text for text in told[:4]), told
        assert "symmetric" in told[4] and "a kernel of triton.jit" in told[5] and "flags (value=-1" in told[6], told
        assert "each program must call end" in told[8], told


@pytest.mark.parametrize("flag", [long(1), 2])
def test_a_signal_that_nobody_sends(three: Crew, flag: int) -> None:
    """Also of a flag that there is not."""
    for kind, text, ranks in three.run(own_kernels.waits_in_vain, 3, flag, None):
        assert kind == "PeerTimeoutError"
        assert "kernel waits_for" in text and 2 in ranks, (text, ranks)


@pytest.mark.parametrize("world_size", [1, 3])
def test_kernels_fire_handles(three: Crew, world_size: int) -> None:
    three.run(firing.handles, world_size, 6, timeout_s=120)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_kernels_fire_slices(three: Crew, world_size: int) -> None:
    assert all(fired > 2 for fired in three.run(firing.slices, world_size, 1, 8, timeout_s=120))


def test_a_dead_peer() -> None:
    own = interpreting_crew()
    try:
        *told, code = own.run(own_kernels.waits_in_vain, None, 1, 2, dying=(2,))
    finally:
        own.kill()
    assert code == 3
    for kind, text, ranks in told:
        assert kind == "PeerError" and ranks == (2,) and "died" in text, text


def test_compiled_kernels_run_on_no_cpu(pool: RankPool) -> None:
    told = pool.run(own_kernels.without_interpreter, 2)
    assert all("TRITON_INTERPRET=1" in text for text in told), told
