"""FSDP2 whose collectives Sidelane makes, between CPU processes, against Gloo."""

from __future__ import annotations

import fsdp_cases
import nodes_fsdp_cases
import pytest
import straight_cases
import torch
from marks import long
from ranks import RankPool, crew

from sidelane.integrations.fsdp_group import Ring


@pytest.mark.parametrize("n", [long(2), 3])
def test_loss_and_gradients_are_those_of_the_group(pool: RankPool, n: int) -> None:
    for told in pool.run(fsdp_cases.as_without, n, 2):
        for name, (calls, reserved, elsewhere) in told.items():
            assert calls > 10 and reserved > 0, name
            assert elsewhere == {}, name


@pytest.mark.long
@pytest.mark.parametrize("n", [2, 3])
def test_a_hundred_steps_are_those_of_the_group(pool: RankPool, n: int) -> None:
    for calls, first, last in pool.run(fsdp_cases.curves, n, 100):
        assert calls >= 5 * 100 and last < 0.7 * first, "it learns"


def test_what_else_fsdp2_can_be_told(pool: RankPool) -> None:
    """Each with its operation: average, sum, a sum that FSDP2 divides before; and compiled blocks."""
    first, second = pool.run(fsdp_cases.switched, 2)
    assert first == second and first.keys() == fsdp_cases.SWITCHES.keys()
    assert first["kept after backward"] < first["sums"], "the second part of a step gathers nothing"


@pytest.mark.parametrize("compiled", [False, long(True)])
def test_what_keeps_a_model_ends_as_without(pool: RankPool, compiled: bool) -> None:
    """Deep copies, averaged models, saved models and compiled autograd: as torch has it, also after ``disable``."""
    assert pool.run(fsdp_cases.kept, 2, compiled) == [[], []]


def test_prefetching(pool: RankPool) -> None:
    assert len(set(pool.run(fsdp_cases.prefetched, 2, 1))) == 1


@pytest.mark.parametrize(("n", "seed"), [long(2, 1), (3, 2)])
def test_gathers_ahead_scatters_and_exchanges_of_the_users_together(pool: RankPool, n: int, seed: int) -> None:
    """Ranks make the calls of each lane in one order, and those of several lanes in an order of their own."""
    told = pool.run(fsdp_cases.beside_exchanges, n, seed, 4)
    orders = [order for order, _, _ in told]
    assert len(set(orders)) == n, "they make them in the same order"
    assert len({order.replace("x", "") for order in orders}) == 1 and {order.count("x") for order in orders} == {16}
    for _, beside_exchange, beside_gather in told:
        assert beside_exchange > 4 and beside_gather > 4


def test_buffers_that_another_backend_has_had_are_free_on_no_rank_before_the_others(pool: RankPool) -> None:
    for elsewhere in pool.run(fsdp_cases.with_a_factor, 2):
        assert elsewhere == {"reduce_scatter: premul_sum of float32"}


def test_a_factor_of_ones_own_is_multiplied_behind_a_sum(pool: RankPool) -> None:
    assert pool.run(fsdp_cases.by_a_factor, 2) == [set(), set()]


def test_on_and_off(pool: RankPool) -> None:
    for told in pool.run(fsdp_cases.on_and_off, 2):
        assert "it is on for this model" in told[0]
        assert all("no module that fully_shard was applied to" in each for each in told[1:]) and len(told) == 3


def test_all_that_was_taken_is_given_back_at_once(pool: RankPool) -> None:
    pool.run(fsdp_cases.given_back, 2)


@pytest.mark.long
def test_all_that_was_taken_on_several_nodes_is_given_back_at_once(pool: RankPool) -> None:
    pool.run(nodes_fsdp_cases.given_back, 4, (0, 0, 1, 1))


def test_a_rank_that_dies_is_named() -> None:
    with crew(3) as ranks:
        first, second, code = ranks.run(fsdp_cases.dies, None, dying=(2,))
    assert code == 3
    for text in (first, second):
        assert text.startswith("PeerError (2,)") and "died" in text, text


@pytest.mark.parametrize("n", [2, long(3)])
def test_parameters_are_gathered_into_their_own_memory(pool: RankPool, n: int) -> None:
    for told in pool.run(straight_cases.straight_into_parameters, n):
        assert told["mixture"] == told["offloaded"] == told["torch 2.11"] == (0, {straight_cases.STRAIGHT})
        for name, wanted in (
            ("dimension 1", "a parameter is sharded along dimension 1"),
            ("extension", "a parameter has an extension of its own for gathers"),
            ("not asked for", "not asked for"),
        ):
            copies, why = told[name]
            assert copies > 0 and why == {f"copied out: {wanted}"}


def test_two_buffers_do_for_all_layers(pool: RankPool) -> None:
    for told in pool.run(straight_cases.buffers_go_round, 2, 6):
        layer = 512 * 512 * 4
        assert told == {True: (2 + 1) * layer, False: (6 + 1) * layer}  # and one for gradients; on GPUs two


def test_buffers_are_free_when_fsdp2_frees_them_whoever_refers_to_them(pool: RankPool) -> None:
    first, second = pool.run(straight_cases.kept_by_others, 2)
    assert first == second


def test_without_room_in_symmetric_memory_parameters_are_copied_out(pool: RankPool) -> None:
    for why in pool.run(straight_cases.without_room, 2):
        assert why == {straight_cases.STRAIGHT, "copied out: no symmetric memory is left for the parameters"}


def test_one_of_two_models_gives_it_back(pool: RankPool) -> None:
    assert pool.run(straight_cases.one_of_two, 2) == [{straight_cases.STRAIGHT}] * 2


def test_memory_that_is_in_use_is_given_back(pool: RankPool) -> None:
    pool.run(straight_cases.given_back_in_use, 2)


def test_another_torch_is_left_alone(pool: RankPool) -> None:
    for why in pool.run(straight_cases.guarded, 2):
        assert why == {"copied out: something else has replaced foreach_all_gather"}


class Stream:
    """A stream of a GPU that only remembers."""

    def __init__(self) -> None:
        self.now, self.waited = 0, []  # type: int, list[int]

    def record_event(self) -> int:
        return self.now

    def wait_event(self, event: int) -> None:
        self.waited.append(event)


def test_gathers_do_not_wait_for_the_layer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs: a layer is gathered while the one before is computed, into memory that is no longer in use."""
    computing, gathering = Stream(), Stream()
    handle = type("Handle", (), {"current_stream": staticmethod(lambda: computing)})
    monkeypatch.setattr(torch, "get_device_module", lambda device: handle)
    made: list[int] = []
    ring = Ring(lambda nbytes: made.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8), torch.device("cpu"))
    for layer in range(6):  # forward: gather, compute, free
        _, free = ring.take(100, gathering, at_once=False)
        computing.now = layer
        assert gathering.waited == list(range(layer - 1)), "for those two before it, and not for the one before"
        free()
    assert made == [100, 100]
    gathering.waited.clear()
    held, free_held = ring.take(100, gathering, at_once=True)
    for layer in range(7, 12):  # backward: free, gather the one before, compute
        computing.now = layer
        following, free_following = ring.take(100, gathering, at_once=True)
        assert following is not held
        free_held()
        held, free_held = following, free_following
    assert made == [100, 100]
    ring.take(50, gathering, at_once=True)
    assert made == [100, 100, 50], "a size has buffers of its own"
