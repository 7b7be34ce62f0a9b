"""Fused operators between CPU processes, by Triton's interpreter, against float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import pytest
from marks import long
from ranks import Crew

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import fused_embeddings
import fused_gemm_family
import fused_gemms
import fused_methods
import fused_modules
import fused_ops
import fused_shadows
import fused_timelines
import fused_tokens

SHADOWED = ("gemv", "rms_norm", "embedding", "embedding_backward", "gemm", "dispatch_gemm")


@pytest.mark.parametrize(("world_size", "calls"), [long(1, 12), long(2, 12), long(3, 12), (4, 8), long(4, 12)])
def test_gemv_all_reduce_back_to_back(four: Crew, world_size: int, calls: int) -> None:
    done = four.run(fused_ops.gemv_back_to_back, world_size, world_size, calls, timeout_s=110)
    assert done == [calls] * world_size


@pytest.mark.parametrize("world_size", [long(2), 3])
def test_gemv_all_reduce_of_weights_of_8_bits(four: Crew, world_size: int) -> None:
    assert four.run(fused_ops.gemv_of_8_bits, world_size, world_size, timeout_s=110) == [4] * world_size


def test_gemvs_with_default_tilings(four: Crew) -> None:
    assert four.run(fused_ops.default_tilings, 2, (32, 512), (21, 70), timeout_s=110) == [28, 28]


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is reserved when it is touched")
def test_gemvs_of_rows_far_apart(four: Crew) -> None:
    assert four.run(fused_ops.gemvs_of_rows_far_apart, 2, timeout_s=110) == [[64.0 * token for token in range(9)]] * 2


def test_gemvs_in_place(four: Crew) -> None:
    assert four.run(fused_ops.gemvs_in_place, 2, timeout_s=110) == [12, 12]


def test_gemvs_without_columns(four: Crew) -> None:
    assert four.run(fused_ops.gemvs_without_columns, 3, timeout_s=110) == [8] * 3


def test_a_tiling_that_does_not_compile_is_named(four: Crew) -> None:
    for passes, resources, other in four.run(fused_ops.tilings_that_do_not_compile, 2):
        for told in (passes, resources):
            assert told.startswith(
                "UnavailableError: gemv_all_reduce: Triton cannot make the kernel, try other tile sizes (value=Tiling("
            )
        assert "): PassManager" in passes and other.startswith("RuntimeError: a launch")


def test_weights_that_autograd_follows(four: Crew) -> None:
    assert four.run(fused_methods.of_parameters, 2) == [26, 26]


def test_default_devices_of_callers_do_not_matter(four: Crew) -> None:
    four.run(fused_methods.away_from_the_default_device, 2)


@pytest.mark.parametrize("world_size", [2, long(4)])
def test_large_norms_are_pushed(four: Crew, world_size: int) -> None:
    found = four.run(fused_ops.large_norms, world_size, [(2, 128), (65, 8192)], timeout_s=110)
    assert found == [{"cells", "pushed"}] * world_size


@pytest.mark.parametrize(("world_size", "calls"), [(1, 8), long(1, 16), long(2, 16), long(3, 16), (4, 8), long(4, 16)])
def test_all_reduce_rms_norm_back_to_back(four: Crew, world_size: int, calls: int) -> None:
    done = four.run(fused_ops.rms_norm_back_to_back, world_size, world_size, calls, timeout_s=110)
    assert done == [calls] * world_size


def test_norms_of_one_row(four: Crew) -> None:
    assert four.run(fused_ops.norms_of_one_row, 2, timeout_s=110) == [6, 6]


@pytest.mark.parametrize("world_size", [2, long(3)])
def test_norms_in_8_bits(four: Crew, world_size: int) -> None:
    sizes = [(1, 6), (5, 34), (2, 300)]
    assert four.run(fused_ops.quantized_norms, world_size, sizes, timeout_s=110) == [54] * world_size


@pytest.mark.parametrize("world_size", [2, long(3)])
def test_programs_that_share_a_row_wait_for_each_other(four: Crew, world_size: int) -> None:
    """A row for each program and several of them, of two to six slices, the last one shorter or not; in 8 bits, too."""
    every = world_size > 2
    sizes = [(1, 300), (5, 270), (2, 768)][: 3 if every else 2]
    found = four.run(fused_ops.norms_of_teams, world_size, sizes, 7, every, timeout_s=170)
    assert found == [36 if every else 8] * world_size


def test_a_program_that_waits_for_another_one_blames_nobody(four: Crew) -> None:
    assert four.run(fused_ops.norm_without_a_slice, 2) == [("PeerTimeoutError", (1,)), ("nothing", ())]


def test_a_nan_stays_visible_in_8_bits(four: Crew) -> None:
    four.run(fused_ops.norms_of_nan, 2, timeout_s=110)


@pytest.mark.parametrize(("world_size", "calls"), [long(2, 3), (3, 2), long(3, 3)])
def test_embedding_all_to_all_back_to_back(four: Crew, world_size: int, calls: int) -> None:
    done = four.run(fused_embeddings.forward_back_to_back, world_size, world_size, calls, timeout_s=110)
    assert done == [3 * calls] * world_size


def test_orders_of_embeddings_are_chosen(four: Crew) -> None:
    """Each rank by its own bags, of which rank 1 has few rows."""
    ranks = four.run(fused_embeddings.orders, 3, timeout_s=110)
    assert [[text.partition(" ")[0] for text in told] for told in ranks] == [
        ["oblivious", "oblivious", "oblivious"],
        ["remote_first", "oblivious", "remote_first"],
        ["oblivious", "oblivious", "oblivious"],
    ]
    for told in ranks:
        for text in told:
            assert "embedding_all_to_all: fused: rule of thumb" in text
            assert "; order oblivious: rule of thumb" in text and "takes no longer than" in text


@pytest.mark.parametrize("world_size", [long(2), 3])
def test_gradients_of_embeddings(four: Crew, world_size: int) -> None:
    done = four.run(fused_embeddings.backward_back_to_back, world_size, world_size, 2, timeout_s=110)
    assert all(found >= 6 for found in done)


@pytest.mark.parametrize("world_size", [long(2), 3])
def test_gemms_that_are_reduced_back_to_back(four: Crew, world_size: int) -> None:
    assert four.run(fused_gemm_family.reductions_back_to_back, world_size, 5, 6, timeout_s=110) == [6] * world_size


def test_sums_are_passed_on_where_they_lie(four: Crew) -> None:
    assert four.run(fused_gemm_family.reductions_passed_on, 3, timeout_s=110) == [4] * 3


@pytest.mark.parametrize("world_size", [long(2), 4])
def test_gemms_of_what_is_gathered_back_to_back(four: Crew, world_size: int) -> None:
    assert four.run(fused_gemm_family.gathers_back_to_back, world_size, 5, 6, timeout_s=110) == [6] * world_size


def test_tables_that_have_moved_are_other_tables(four: Crew) -> None:
    four.run(fused_embeddings.tables_that_move, 2)


@pytest.mark.parametrize(
    "calls",
    [
        *(fused_ops.gemv_calls, fused_ops.rms_norm_calls, fused_embeddings.embedding_calls),
        *(fused_gemms.wrong_calls, fused_gemms.wrong_splits),
        *(fused_gemm_family.wrong_reductions, fused_gemm_family.wrong_gathers),
        *(fused_gemms.wrong_dispatches, fused_gemms.wrong_split_dispatches, fused_tokens.wrong_calls),
    ],
)
def test_what_is_refused(four: Crew, calls: Callable[..., object]) -> None:
    """On the rank with the wrong arguments, and on its peers with the reason, before anything has moved."""
    *others, (own,) = four.run(fused_ops.refusals, 2, calls)
    assert all(line.startswith(("ValueError", "TypeError")) and "(value=" in line for line in own), own
    for (told,) in others:
        for line, reason in zip(told, own, strict=True):
            assert line.startswith("PeerError") and reason in line, (line, reason)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("rms_norm_pushed", 2),
        ("rms_norm_of_teams", 2),
        ("rms_norm_pushed", 3),
        *((kind, 3) for kind in SHADOWED),
        *(long(kind, 2) for kind in SHADOWED),
    ],
)
def test_every_block_does_what_its_shadow_says(four: Crew, kind: str, world_size: int) -> None:
    assert all(steps > 10 for steps in four.run(fused_shadows.follow, world_size, kind, "none"))


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        *(("gemv", "copy"), ("gemv", "sent"), ("gemv", "waited"), ("embedding_backward", "flag")),
        *(("rms_norm", "sent"), ("rms_norm", "waited"), ("rms_norm_pushed", "copy"), ("rms_norm_pushed", "order")),
        *(("rms_norm_of_teams", "sent"), ("rms_norm_of_teams", "waited"), ("rms_norm_of_teams", "flag")),
        *(("dispatch_gemm", "copy"), ("dispatch_gemm", "order"), ("dispatch_gemm", "waited")),
    ],
)
def test_a_shadow_that_says_something_else_is_noticed(four: Crew, kind: str, mistake: str) -> None:
    with pytest.raises(AssertionError, match="generation 1, block"):
        four.run(fused_shadows.follow, 2, kind, mistake)


def test_fused_or_unfused(four: Crew) -> None:
    """By rank 0's times on all ranks, and by thumb where there is none."""
    for found in four.run(fused_methods.methods, 2):
        slow, fast, unknown = found
        times = "1 us expected, next fused 2 us; measured at 70, 16, 1, eager, fused-cpu.json"
        assert slow == f"False gemv_all_reduce: unfused: {times}"
        assert fast.startswith("True gemv_all_reduce: fused: 1 us expected, next unfused 2 us; measured at 1000")
        assert unknown.startswith("True gemv_all_reduce: fused: rule of thumb")


def test_autocast_changes_no_method(four: Crew) -> None:
    assert four.run(fused_methods.under_autocast, 2, timeout_s=110) == [24, 24]


def test_timelines(four: Crew) -> None:
    """Every rank has those of all, with what each operator does."""
    sends = {"local", "compute", "send", "wait"}
    norm = {"send", "wait", "compute"}
    kinds = [{"compute", "send", "wait", "add"}, sends, sends]
    kinds += [norm, {*norm, "add"}, {"send", "wait", "add"}, sends]
    for found in four.run(fused_timelines.timelines, 2):
        assert found == [[kind, kind] for kind in kinds]


@pytest.mark.parametrize("name", ["linear", long("embedding"), "norm", "gemms", "reduced"])
def test_layers_are_trained_and_compiled_whole(four: Crew, name: str) -> None:
    """Without breaks of the graph; what a backend makes of the operators is a call."""
    assert all(four.run(getattr(fused_modules, name), 2, "aot_eager", timeout_s=110))


def test_results_of_operators_are_copied_in_turn(four: Crew) -> None:
    assert four.run(fused_modules.results_of_their_own, 2, timeout_s=110) == [4, 4]


def test_operators_without_gradients_name_their_replacement(four: Crew) -> None:
    for told in four.run(fused_modules.without_gradients, 2):
        assert len(told) == 2 and all(
            "allowed=torch.no_grad()): dispatch_tokens, combine_tokens" in text for text in told
        )


def test_tables_have_gradients_of_rows(four: Crew) -> None:
    assert four.run(fused_modules.rows, 2, "aot_eager", timeout_s=110) == [6, 6]


@pytest.mark.long
def test_operators_of_pytorch_are_sound(four: Crew) -> None:
    assert four.run(fused_modules.checked, 2, timeout_s=110) == [15, 15]


@pytest.mark.long
def test_operators_run_with_reduced_overhead(four: Crew) -> None:
    assert four.run(fused_modules.reduce_overhead, 2, timeout_s=110) == [6, 6]


def test_a_layer_outlives_its_communicator(four: Crew) -> None:
    assert all("no open communicator has this number" in told for told in four.run(fused_modules.closed, 2))
