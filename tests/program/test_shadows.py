"""The shadows of kernels are proved, back to back, and with a mistake in the protocol they are refused."""

from __future__ import annotations

import itertools

import pytest
from kernel_mistakes import mistakes_of
from marks import long
from shadowed_kernels import FLOATS, kernels, kinds_of, name_of, shadow

from sidelane.errors import ProgramError
from sidelane.program import kernel_chunks
from sidelane.program.collective import Kind, all_reduce
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.verify import verify_sequence

TILE = 16
NAMES = sorted({name_of(kernel) for kernel in kernels(3, 1, 1)})


def test_every_protocol_has_shadows() -> None:
    assert {kernel.protocol for kernel in kernels(3, 1, 1)} == set(Protocol)


@pytest.mark.parametrize("n", [1, 2, 3, 5, long(8)])
@pytest.mark.parametrize("name", NAMES)
def test_every_shadow_is_proved(name: str, n: int) -> None:
    """With fewer tiles than blocks and more, none or some left over."""
    for part, blocks in ((1, 3), (16, 1), (40, 3), (110, 1), (110, 3)) if n < 5 else ((40, 3),):
        for kernel in kernels(n, part, blocks):
            if name_of(kernel) == name:
                verify_sequence(shadow(kernel, TILE))


@pytest.mark.parametrize("n", [2, 3])
def test_launches_follow_each_other(n: int) -> None:
    """All kernels of a communicator share flags and generations, those with staging share that, and arenas."""
    chosen = {name_of(kernel): kernel for blocks in (1, 2) for kernel in kernels(n, 20, blocks)}
    turns = [shadow(kernel, TILE) for kernel in chosen.values()]
    for pair in itertools.product(turns, repeat=2):
        verify_sequence([programs[generation % len(programs)] for generation, programs in enumerate(pair)])


def is_harmless(mistake: str, kernel: KernelProgram) -> bool:
    """Found by the proof: what would be right all the same."""
    protocol, (kind, in_place) = kernel.protocol, kinds_of(kernel)
    match mistake:
        case "no meeting 0":  # who hears of a chunk knows that its sender runs
            return protocol is Protocol.SEND
        case "no barrier":  # where results lie on nothing that is sent but to oneself, which comes back first
            return not (in_place and kind in (Kind.ALL_TO_ALL, Kind.ALL_REDUCE))
        case "a reset where a generation belongs":  # between two meetings of all, the reset of one is over
            rooted = kind is Kind.BROADCAST
            return not (rooted or protocol is Protocol.BLOCK_FLAGS)
    return False


@pytest.mark.parametrize("name", NAMES)
def test_mistakes_of_a_protocol_are_refused(name: str) -> None:
    seen = set()
    for kernel in kernels(3, 40, 2):
        if name_of(kernel) != name:
            continue
        for mistake, programs in mistakes_of(shadow(kernel, TILE)):
            seen.add(mistake)
            if is_harmless(mistake, kernel):
                verify_sequence(programs)
                continue
            with pytest.raises(ProgramError):
                verify_sequence(programs)
                pytest.fail(f"accepted: {mistake} in {kernel}")
    assert {"signals before stores", "no generation"} <= seen


@pytest.mark.parametrize(("slots", "fine"), [(3, False), (4, True), (5, True)])
def test_four_slots_are_enough_and_three_are_not(monkeypatch: pytest.MonkeyPatch, slots: int, fine: bool) -> None:
    """``program/kernel_chunks.py`` says so in words."""
    monkeypatch.setattr(kernel_chunks, "SLOTS", slots)
    for n, in_place in itertools.product((2, 3), (False, True)):
        collective = all_reduce([16 * 60] * n, FLOATS, in_place=in_place)
        programs = shadow(KernelProgram(collective, "two_shot_push", Protocol.SEND, 1), TILE)
        if fine:
            verify_sequence(programs)
            continue
        with pytest.raises(ProgramError, match="race on staging"):
            verify_sequence(programs)
