"""What is taken for lists of tensors, and for broadcasts."""

from __future__ import annotations

import pytest
from choices import B2B, CROSSING, ONE_SHOT, PCPY, gather

from sidelane.choice import Abilities, Candidate, Profile, choose
from sidelane.choice.candidate import DMA, EVERYTHING, SM
from sidelane.config import COMPUTE
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape


@pytest.mark.parametrize("given", [None, CROSSING], ids=["nothing measured", "measured"])
def test_lists_are_one_kernel_or_have_one_engine(given: Profile | None):
    def choice(nbytes: int, abilities: Abilities = EVERYTHING, **others: object) -> Candidate:
        return choose(given, gather(nbytes, listed=True, **others), abilities).candidate

    engines = Abilities(captures=True)
    for nbytes in (1024, 32 << 20, 256 << 20, 4 << 30):
        assert choice(nbytes) == (ONE_SHOT if nbytes < 256 << 20 else B2B)
        assert choice(nbytes, captured=True) == (ONE_SHOT if nbytes < 512 << 20 else B2B)
        assert choice(nbytes, symmetric=False) == (ONE_SHOT if nbytes < 64 << 20 else B2B), "it is staged"
        for reason in ({"beside": COMPUTE}, {"mixed": True}, {"even": False}, {"uniform": False}):
            assert choice(nbytes, **reason) == B2B
        assert choice(nbytes, engines) == B2B
        assert choice(nbytes, Abilities()) in (B2B, PCPY), "where there are no graphs, by the times of single tensors"
    assert "a list of tensors" in choose(given, gather(1024, listed=True)).reason


@pytest.mark.parametrize(
    ("kind", "in_place", "symmetric", "most"),
    [
        (Kind.ALL_TO_ALL, False, True, 256),
        (Kind.ALL_TO_ALL, True, True, 64),
        (Kind.REDUCE_SCATTER, True, True, None),
        (Kind.REDUCE_SCATTER, False, False, 128),
        (Kind.ALL_REDUCE, True, True, None),
        (Kind.ALL_REDUCE, True, False, 128),
        (Kind.BROADCAST, True, True, None),
    ],
)
def test_up_to_where_lists_are_one_kernel(kind: Kind, in_place: bool, symmetric: bool, most: int | None):
    def by_kernel(nbytes: int) -> bool:
        call = CallShape(kind, 4, nbytes, in_place=in_place, symmetric=symmetric, listed=True)
        return choose(None, call).candidate.implementation == SM

    assert by_kernel(1)
    if most is None:
        assert by_kernel(64 << 30)
    else:
        assert [by_kernel((most << 20) - 1), by_kernel(most << 20)] == [True, False]


@pytest.mark.parametrize(("listed", "symmetric", "most"), [(False, True, 128), (True, True, 128), (True, False, 64)])
def test_broadcasts_by_a_kernel(listed: bool, symmetric: bool, most: int):
    def implementation(ranks: int, nbytes: int, **others: object) -> str:
        call = CallShape(Kind.BROADCAST, ranks, nbytes, in_place=True, symmetric=symmetric, listed=listed, **others)
        return choose(None, call).candidate.implementation

    assert [implementation(2, (most << 20) - 1), implementation(2, most << 20)] == [SM, DMA]
    assert implementation(3, 4 << 30) == SM, "copy engines would send it twice"
    assert implementation(3, 1024, beside=COMPUTE) == DMA
    assert implementation(3, 1024, uniform=False) == DMA


@pytest.mark.parametrize(
    ("ranks", "nbytes", "others", "variant"),
    [
        (4, 8 << 20, {}, "relay"),
        (4, (8 << 20) - 1, {}, "b2b"),
        (8, 3 << 20, {}, "relay"),
        (2, 1 << 30, {}, "b2b"),
        (4, 1 << 30, {"symmetric": False}, "b2b"),
        (4, 1 << 30, {"listed": True}, "b2b"),
    ],
)
def test_broadcasts_by_copy_engines_are_relayed(ranks: int, nbytes: int, others: dict[str, object], variant: str):
    call = CallShape(Kind.BROADCAST, ranks, nbytes, in_place=True, beside=COMPUTE, **others)
    found = choose(None, call).candidate
    assert (found.implementation, found.variant) == (DMA, variant)


def test_lists_to_reduce_everywhere_are_in_one_shot_or_two_by_size():
    def variants(ranks: int, **others: object) -> list[str]:
        calls = (
            CallShape(Kind.ALL_REDUCE, ranks, nbytes, listed=True, **others) for nbytes in (1, 512 << 10, 513 << 10)
        )
        return [choose(None, call).candidate.variant for call in calls]

    assert variants(4) == variants(2) == variants(4, symmetric=False) == ["one_shot", "one_shot", "two_shot"]
    assert variants(2, symmetric=False) == ["one_shot"] * 3
