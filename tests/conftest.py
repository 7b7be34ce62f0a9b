"""What every test can rely on."""

import gc
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from pathlib import Path

import pytest

from sidelane.cli import processes

# Whoever starts tests in the background of a shell script starts them, and all processes of theirs, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHADOWED = ("gemv", "rms_norm", "embedding", "embedding_backward", "gemm", "dispatch_gemm")
LONG = (
    *(f"cpu/test_fused.py::test_every_block_does_what_its_shadow_says[{kind}-2]" for kind in SHADOWED),
    "attack/test_attack.py::test_a_sample_of_the_campaign",
    "cpu/test_bench_studies.py::test_a_study_goes_on_where_it_stopped",
    "cpu/test_collectives.py::test_moving_collectives[4]",
    "cpu/test_collectives.py::test_moving_collectives[6]",
    "cpu/test_collectives.py::test_reducing_collectives[5]",
    "cpu/test_collectives.py::test_reducing_collectives[7]",
    "cpu/test_collectives.py::test_reducing_collectives[8]",
    "cpu/test_ddp.py::test_a_hundred_steps_are_those_of_the_group[3]",
    "cpu/test_executor_ranks.py::test_every_kind_of_program_moves_the_right_bytes[8]",
    "cpu/test_fsdp.py::test_a_hundred_steps_are_those_of_the_group[3]",
    "cpu/test_fsdp.py::test_gathers_ahead_scatters_and_exchanges_of_the_users_together[2-1]",
    "cpu/test_fsdp.py::test_loss_and_gradients_are_those_of_the_group[2]",
    "cpu/test_fsdp.py::test_parameters_are_gathered_into_their_own_memory[2]",
    "cpu/test_fused.py::test_all_reduce_rms_norm_back_to_back[2]",
    "cpu/test_fused.py::test_all_reduce_rms_norm_back_to_back[3]",
    "cpu/test_fused.py::test_all_to_all_gemm_back_to_back[4]",
    "cpu/test_fused.py::test_batches_are_replaced_and_lowered_by_inductor",
    "cpu/test_fused.py::test_embedding_all_to_all_back_to_back[2]",
    "cpu/test_fused.py::test_gemm_all_to_all_back_to_back[2]",
    "cpu/test_fused.py::test_gemms_of_what_is_gathered_back_to_back[2]",
    "cpu/test_fused.py::test_gemms_that_are_reduced_back_to_back[2]",
    "cpu/test_fused.py::test_gemv_all_reduce_back_to_back[1]",
    "cpu/test_fused.py::test_gemv_all_reduce_back_to_back[2]",
    "cpu/test_fused.py::test_gemv_all_reduce_back_to_back[3]",
    "cpu/test_fused.py::test_gemv_all_reduce_of_weights_of_8_bits[2]",
    "cpu/test_fused.py::test_gradients_of_embeddings[2]",
    "cpu/test_fused.py::test_large_norms_are_pushed[4]",
    "cpu/test_fused.py::test_operators_run_with_reduced_overhead",
    "cpu/test_fused.py::test_patterns_are_replaced[4]",
    "cpu/test_learning.py::test_a_storm_of_tensors_that_are_replaced[2-120]",
    "cpu/test_learning.py::test_a_storm_of_tensors_that_are_replaced[3-80]",
    "cpu/test_learning.py::test_many_ranks_go_ahead_alike[4]",
    "cpu/test_lessons.py::test_a_storm_of_tensors_that_are_replaced[2-120]",
    "cpu/test_lessons.py::test_a_storm_of_tensors_that_are_replaced[3-80]",
    "cpu/test_lessons.py::test_what_hosts_that_run_ahead_have_read_is_right[3]",
    "cpu/test_loads.py::test_programs_of_all_builders_under_contracts[8-5]",
    "cpu/test_new_addresses_ranks.py::test_a_storm_of_new_tensors[4-3-",
    "cpu/test_own_kernels.py::test_kernels_and_collectives_in_turn[1]",
    "cpu/test_own_kernels.py::test_kernels_and_collectives_in_turn[2]",
    "cpu/test_pooled.py::test_places_are_the_same_on_all_ranks_and_used_again[2-2]",
    "cpu/test_pooled.py::test_places_are_the_same_on_all_ranks_and_used_again[4-5]",
    "cpu/test_pools.py::test_ranks_that_allocate_alike[3]",
    "cpu/test_pools.py::test_ranks_that_do_not[4]",
    "cpu/test_prelaunched.py::test_a_rank_that_never_arms_or_fires_is_named[True-False]",
    "cpu/test_reach.py::test_a_storm_in_memory_of_several_pieces[4-60]",
    "cpu/test_reach.py::test_a_storm_in_memory_of_several_pieces[8-20]",
    "cpu/test_reach.py::test_a_storm_of_tensors_that_come_and_go[2-120]",
    "cpu/test_reach.py::test_a_storm_of_tensors_that_come_and_go[4-120]",
    "cpu/test_reach.py::test_eight_ranks",
    "cpu/test_reach.py::test_every_kind_at_odd_sizes_and_offsets[4]",
    "cpu/test_reach.py::test_lists_batches_and_uneven_exchanges[2-40]",
    "cpu/test_soak.py::test_every_end[closes early]",
    "cpu/test_soak.py::test_several_communicators[5]",
    "cpu/test_storm.py::test_a_storm_is_run_and_written_down",
    "cpu/test_storm.py::test_ranks_that_give_up_some_calls_go_on_with_others_alike",
    "cpu/test_storm.py::test_every_byte_is_right_and_nothing_is_left[learn-2-400]",
    "cpu/test_turns.py::test_calls_of_every_kind_in_turn[2-1]",
    "cpu/test_turns.py::test_calls_of_every_kind_in_turn[8-4]",
    "interpreter/test_kernel_shadows.py::test_every_block_does_what_its_shadow_says[1]",
    "interpreter/test_kernel_shadows.py::test_every_block_does_what_its_shadow_says[2]",
    "interpreter/test_kernel_shadows.py::test_every_block_does_what_its_shadow_says[4]",
    "interpreter/test_kernels_compile.py::test_every_kernel_compiles_and_fits_into_registers[moving-1]",
    "interpreter/test_sm_kernels.py::test_broadcasting[2]",
    "interpreter/test_sm_kernels.py::test_lists[1]",
    "interpreter/test_sm_kernels.py::test_moving[1]",
    "interpreter/test_sm_kernels.py::test_reducing[bfloat16:float16-2]",
    "interpreter/test_sm_kernels.py::test_reducing[float32-1]",
    "interpreter/test_sm_kernels.py::test_reducing[int32:int64-2]",
    "program/test_addresses.py::test_all_that_is_submitted_lies_where_it_may[1]",
    "program/test_addresses.py::test_what_is_gone_is_noticed[events]",
    "program/test_alternating.py::test_every_two_calls_take_turns[3]",
    "program/test_c3_judged.py::test_a_described_machine[h200x4]",
    "program/test_learn_model.py::test_mistakes_are_found[say nothing of what could not be mapped]",
    "program/test_native_build.py::test_a_home_that_is_of_no_use[compile_to-[Errno 13]",
    "program/test_native_build.py::test_a_home_that_is_of_no_use[load-noexec]",
    "program/test_native_build.py::test_what_others_can_write_is_not_loaded[folder]",
    "program/test_reach_model.py::test_no_order_of_steps_goes_wrong[3-3-False]",
    "program/test_verify_builders.py::test_everything_that_is_built_is_accepted[5-",
    "program/test_verify_large.py::test_sixty_four_ranks[pcpy]",
    "program/test_verify_pairs.py::test_every_pair[2]",
    "program/test_verify_pairs.py::test_pairs_of_captured_programs[2]",
    "sim/test_plan.py::test_steps_as_measured[2-",
    "sim/test_plan.py::test_the_command_prints_ranges_and_writes",
    "sim/test_sim_reports.py::test_published_values_are_on_the_pictures_of_their_machine_alone",
    "sim/test_slowdown.py::test_the_published_mean_is_bracketed_on_all_four_and_a_bracket_can_fail",
    "sim/test_slowdown.py::test_the_picture_names_its_axes_and_the_published_figures",
    "test_cli_json.py::test_json_goes_to_stdout_alone[chain",
    "test_cli_json.py::test_json_goes_to_stdout_alone[claims",
    "test_cli_json.py::test_json_goes_to_stdout_alone[demo",
    "test_cli_json.py::test_json_goes_to_stdout_alone[fused --device",
    "test_cli_json.py::test_json_goes_to_stdout_alone[gemms",
    "test_cli_json.py::test_json_goes_to_stdout_alone[host",
    "test_cli_json.py::test_json_goes_to_stdout_alone[pg",
    "test_cli_json.py::test_json_goes_to_stdout_alone[plan",
    "test_cli_json.py::test_json_goes_to_stdout_alone[tune",
    "test_examples.py::test_an_example_runs[process_group]",
    "test_isolated_pictures.py::",
    "test_measure_node.py::test_a_part_runs_between_cpu_ranks",
    "test_launch.py::test_a_second_ctrl_c_ends_ranks_that_do_not_listen",
)
"""Beginnings of tests that take long for what they add; most show again what others do, by other sizes or seeds."""


@pytest.hookimpl(tryfirst=True)  # before any are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = [item.nodeid.removeprefix("tests/") for item in items]
    for name, item in zip(names, items, strict=True):
        if name.startswith(LONG):
            item.add_marker(pytest.mark.long)
    if any("::" in given for given in config.args) or config.getoption("lf", False):
        return
    files = {name.partition("::")[0] for name in names}
    gone = [one for one in LONG if one.partition("::")[0] in files and not any(name.startswith(one) for name in names)]
    if gone:
        raise pytest.UsageError(f"LONG in tests/conftest.py: no test begins with {', '.join(gone)}")


def pytest_configure(config: pytest.Config) -> None:
    """Output as a pipe gets it, whoever looks on. Files in their order."""
    for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):  # xdist's workers get the first two
        os.environ.pop(name, None)
    # xdist would begin with the files of many tests, and end with the few that take minutes.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays: the garbage collector need not look through it for every test."""
    gc.collect()
    gc.freeze()
    if session.items and not session.config.option.collectonly:
        import_ahead()


def import_ahead() -> None:
    """Start what ranks are forked from; see ``common/imported_ahead.py``.

    A process that has looked for GPUs must not be forked: where there are any, ranks import for themselves.
    """
    import torch

    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return
    processes.PRELOADED += ("imported_ahead",)
    processes.rank_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("common")), prepend=os.pathsep)
        forkserver.ensure_running()
