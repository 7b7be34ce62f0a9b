"""The study of training steps on CPU ranks: what is compared, what is wrong or breaks off, what is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from ranks import crew

from sidelane_lab.cli.fsdp import FsdpOptions
from sidelane_lab.harness import running
from sidelane_lab.harness.drawing import save
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import read
from sidelane_lab.studies.fsdp import rows as pictures
from sidelane_lab.studies.fsdp import study
from sidelane_lab.studies.fsdp.cases import parse_case
from sidelane_lab.studies.fsdp.kernels import TimedKernel, group_of, summed
from sidelane_lab.studies.fsdp.rows import FsdpRow, fsdp_tables
from sidelane_lab.studies.fsdp.ways import (
    CommunicationWay,
    CommunicationWays,
    StillGather,
    WindowGather,
    gathered_bytes,
    names_on,
)

CPU = torch.device("cpu")
QUICK = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 1, "timeout_s": 100.0}


def test_with_an_optimizer_and_sums_in_float32() -> None:
    named = ("sidelane", "compute_only_straight")
    options = FsdpOptions(
        **QUICK, cases=("8b:2x512",), implementations=named, layers=2, optimizer=True, reduce_dtype="float32"
    )
    results = running.run(options)
    assert results is not None
    rows = [row for row in results.rows if isinstance(row, FsdpRow)]
    assert [row.implementation for row in rows] == ["gloo", *named]
    assert all(row.optimizer and row.reduce_dtype == "float32" and row.layers == 2 and row.batch == 2 for row in rows)
    assert rows[1].correct and rows[1].step_ms and rows[1].exposed_ms is None, "nothing was measured to compare with"


class Breaks(StillGather):
    """Fails at its third gather, on every rank."""

    count = 0

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.count += 1
        if self.count == 3:
            raise RuntimeError("out of something")
        return super().__call__(output_tensor, input_tensor, group, async_op)


def planted(group: dist.ProcessGroup, options: FsdpOptions) -> list[FsdpRow]:
    """The study of a case in which ``sidelane`` moves nothing, and ``sidelane_ag`` breaks off."""
    torch.set_num_threads(1)

    def wrong(ways: CommunicationWays, way: CommunicationWay) -> CommunicationWay:
        if way.name == "sidelane":
            still = [StillGather()] * len(way.gathers)
            return dataclasses.replace(way, gathers=still, scatters=ways.attached["gloo"].scatters)
        return breaking(way) if way.name == "sidelane_ag" else way

    with attached_as(wrong):
        return rows_here(options)


def breaking(way: CommunicationWay) -> CommunicationWay:
    return dataclasses.replace(way, gathers=[Breaks()] * len(way.gathers))


@contextlib.contextmanager
def attached_as(
    other: Callable[[CommunicationWays, CommunicationWay], CommunicationWay],
) -> Iterator[pytest.MonkeyPatch]:
    """Let the study have other ways than those that it attaches."""
    attach = CommunicationWays.attach

    def attach_other(ways: CommunicationWays, name: str) -> None:
        attach(ways, name)
        ways.attached[name] = other(ways, ways.attached[name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommunicationWays, "attach", attach_other)
        yield patch


def rows_here(options: FsdpOptions, say: Callable[[str], None] = lambda line: None) -> list[FsdpRow]:
    """The study's rows on this rank."""
    rank = Rank(dist.get_rank(), dist.get_world_size(), CPU, say)
    assert study.STUDY.measure is not None
    return list(study.STUDY.measure(rank, options, Sender(rank)))


def test_what_is_wrong_or_breaks_off_has_no_time_and_leaves_the_others_theirs() -> None:
    with crew(2) as ranks:
        for rows in ranks.run(planted, None, FsdpOptions(**QUICK, cases=("8b:1x512",))):
            by_name = {row.implementation: row for row in rows}
            assert list(by_name) == list(names_on("cpu"))
            broken, wrong = by_name.pop("sidelane_ag"), by_name.pop("sidelane")
            assert (broken.correct, broken.step_ms) == (None, None) and wrong.step_ms is None
            assert broken.note == "rank 0: RuntimeError: out of something"
            assert wrong.correct is False and "gradients are" in wrong.note
            assert all(row.step_ms and row.correct in (True, None) for row in by_name.values())


def failing_on_one_rank(
    group: dist.ProcessGroup, options: FsdpOptions, failing: str
) -> tuple[dict[str, tuple[bool, str]], str]:
    """Times and notes of a case in which a step of the study fails on rank 1 alone, and what the study notes."""
    torch.set_num_threads(1)
    lines, calls = list[str](), itertools.count(1)

    def once(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if failing == name and group.rank() == 1 and (name != "model" or next(calls) == 2):
            raise RuntimeError(f"no {name}")
        return result

    def other(ways: CommunicationWays, way: CommunicationWay) -> CommunicationWay:
        if way.name == "sidelane_ag" and failing == "model":
            return breaking(way)
        return dataclasses.replace(way, held=functools.partial(once, "size", way.held))

    with attached_as(other) as patch:
        patch.setattr(study, "Stepper", functools.partial(once, "model", study.Stepper))
        patch.setattr(study, "profiled", functools.partial(once, "profile", study.profiled))
        close = CommunicationWays.close
        patch.setattr(CommunicationWays, "close", lambda self: once("end", close, self))
        rows = rows_here(options, lines.append)
    return {row.implementation: (row.step_ms is not None, row.note) for row in rows}, "".join(lines)


@pytest.mark.parametrize(
    ("failing", "time", "note"),
    [
        ("size", False, "rank 1: RuntimeError: no size"),
        # The last way breaks off, and the model cannot be made again for the rounds.
        ("model", False, "rank 0: UnavailableError: the model cannot be made: rank 1: RuntimeError: no model"),
        ("profile", True, "not profiled: rank 1: RuntimeError: no profile"),
        ("end", True, ""),
    ],
)
def test_all_ranks_end_with_the_failure_of_one(failing: str, time: bool, note: str) -> None:
    options = FsdpOptions(**QUICK, cases=("8b:1x512",), implementations=("sidelane_ag",), profile=True)
    with crew(2) as ranks:
        for found, said in ranks.run(failing_on_one_rank, None, options, failing):
            assert found["gloo"] == (time, note)
            if failing != "model":
                assert found["sidelane_ag"][0] == time
            assert ("could not be closed: rank 1: RuntimeError: no end" in said) == (failing == "end" and bool(said))


class Windowed:
    """Ordinary memory in place of NCCL's windows."""

    def gather_of(self, params: Sequence[Any]) -> WindowGather:
        group = params[0].mesh_info.shard_process_group
        sizes = {gathered_bytes(one, torch.bfloat16, group.size()) for one in params}
        windows: Any = {
            nbytes: SimpleNamespace(buffers=tuple(torch.zeros(nbytes + 64, dtype=torch.uint8) for _ in range(2)))
            for nbytes in sizes
        }
        return WindowGather(group, windows)

    def close(self) -> None: ...


def in_windows(group: dist.ProcessGroup, options: FsdpOptions) -> list[FsdpRow]:
    """The rows of a study with gathers in two windows that take turns."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "names_on", lambda device_type: ("gloo", "nccl_ce"))
        patch.setattr(study, "NcclEngines", lambda *arguments: Windowed())
        return rows_here(options)


def test_two_windows_in_turn_are_enough() -> None:
    with crew(2) as ranks:
        for rows in ranks.run(in_windows, None, FsdpOptions(**QUICK, cases=("70b:1x512",))):
            found = [(row.implementation, row.correct, row.note) for row in rows]
            assert found == [("gloo", True, ""), ("nccl_ce", True, "")]


def test_what_is_asked_for_is_checked() -> None:
    case = parse_case("70b:2x4096")
    assert (case.model.hidden, case.model.layers, case.batch, case.seq) == (8192, 4, 2, 4096)
    assert parse_case("8b:1x8192", layers=3).model.layers == 3


KERNELS = {
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "gemm",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collective",
    "_reduce_pull": "collective",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorList, CopyFunctor<>>": "copy_in",
    "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>": "copy_in",
    "void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)": "copy_out",
    "Memcpy PtoP (Device -> Device)": "peer_copy",
    "Memcpy DtoD (Device -> Device)": "other",
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>": "other",
}


def test_kernels_are_told_apart_and_summed() -> None:
    assert {name: group_of(name) for name in KERNELS} == KERNELS
    found = summed(
        TimedKernel(name, 1000.0 * place, 1000.0 * place + 500) for place, name in enumerate(reversed(KERNELS))
    )
    assert found is not None
    assert found.by_group["gemm"] == found.by_group["copy_in"] == 1.0 and found.by_group["copy_out"] == 0.5
    assert (found.first_gather_ms, found.last_scatter_ms) == (10.0, 0.0)
    assert summed([TimedKernel("Memcpy PtoP", 0, 1)]) is None


GATHER, COPY, OUT, MULTIPLY, SILU = "Memcpy PtoP", "chunk_cat", "split_with_sizes_copy", "nvjet", "silu"


def step_of(*gemms_ms: float, first: float = 2.0, scatter: float = 3.0) -> list[TimedKernel]:
    """A gather, then GEMMs with a copy-out of 0.5 ms and a pause of 0.25 behind each but the last, then a scatter.

    The second GEMM runs next to a copy between peers for 60% of its time; a cast is on that stream, too.
    """
    kernels, now = [TimedKernel(GATHER, 0, 1000 * first, 9)], 1000 * first
    for number, ms in enumerate(gemms_ms):
        kernels.append(TimedKernel(MULTIPLY, now, now + 1000 * ms, 7))
        if number == 1:
            kernels += [
                TimedKernel(GATHER, now - 900, now + 300 * ms, 9),
                TimedKernel(COPY, now + 300 * ms, now + 400 * ms, 9),
            ]
            kernels.append(TimedKernel(GATHER, now + 700 * ms, now + 1100 * ms, 8))
        now += 1000 * ms
        if number + 1 < len(gemms_ms):
            kernels.append(TimedKernel(OUT, now, now + 500, 7))
            now += 750
    kernels += [
        TimedKernel(SILU, now, now + 100, 7),
        TimedKernel("ncclDevKernel_ReduceScatter", now, now + 1000 * scatter, 8),
    ]
    return kernels[::-1]


def test_the_stream_of_the_computation_is_the_whole_step() -> None:
    found, floor = summed(step_of(5.0, 4.0, 6.0)), summed(step_of(4.5, 3.0, 6.25, first=1.0, scatter=0.5))
    assert found is not None and floor is not None
    assert found.on_stream["gemm"] == pytest.approx(15) and found.on_stream["copy_out"] == pytest.approx(1)
    assert not found.on_stream["copy_in"] and found.by_group["copy_in"] == pytest.approx(0.4)
    assert (found.first_gather_ms, found.last_scatter_ms, found.waits_ms) == pytest.approx((2, 3, 0.5))
    assert found.whole_ms == pytest.approx(2 + 15 + 1 + 0.5 + 3)
    assert [round(one.beside_ms, 6) for one in found.gemms] == [0.15, 2.4, 0] and found.gemms[1].ms == 4
    assert found.slower_gemms_ms(floor) == pytest.approx((1.0, 0.25))
    fewer = summed(step_of(1.0, 1.0))
    assert fewer is not None and found.slower_gemms_ms(fewer) is None


@pytest.mark.parametrize("seed", range(5))
def test_no_time_is_counted_twice_on_a_stream(seed: int) -> None:
    """Kernels begin before the last one has ended, on three streams: what is on the first is the whole of it."""
    draw = random.Random(seed)
    names, now, kernels = [MULTIPLY, OUT, COPY, GATHER, SILU], 0.0, [TimedKernel(MULTIPLY, 0, 50, 0)]
    for _ in range(60):
        now += draw.uniform(0, 80)
        kernels.append(TimedKernel(draw.choice(names), now, now + draw.uniform(1, 90), draw.randrange(3)))
    kernels += [TimedKernel(MULTIPLY, now + 100, now + 5000, 0)]
    found = summed(draw.sample(kernels, len(kernels)))
    assert found is not None
    begin, end = min(one.begin_us for one in kernels), max(one.end_us for one in kernels)
    assert found.whole_ms == pytest.approx((end - begin) / 1e3)
    assert all(0 <= one.beside_ms <= one.ms + 1e-9 for one in found.gemms)


def test_the_rest_is_a_table_whose_parts_add_up() -> None:
    floor, rows = summed(step_of(4.5, 3.0, 6.25, first=1.0, scatter=0.5)), []
    for name, kernels in {"nccl": summed(step_of(5.0, 4.0, 6.0)), "compute_only_straight": floor}.items():
        assert kernels is not None
        common = ("llama-8b-like", 2, 4096, 1, "bfloat16", False, name, 1.0, *(None,) * 7, True, "")
        rows.append(FsdpRow(*common, **study._figures(kernels, floor)))
    assert [FsdpRow.from_dict(row.to_dict()) for row in rows] == rows
    *_, table = fsdp_tables(rows)
    (line,) = table.lines
    assert "where the rest goes" in table.title and line.cells[0] == "nccl"
    whole, *parts = [float(cell) for cell in line.cells[1:]]
    assert whole == pytest.approx(sum(parts)) == 1 + 2.5 + 1.25
    assert parts == [1.0, 0.0, 0.0, 1.0, 0.25, 0.0, 0.0, 0.0, 2.5]


def test_numbers_do_not_touch_their_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(pictures, "save", lambda figure, *others: drawn.append(figure) or save(figure, *others))
    published = read(Path(__file__).parents[2] / "results" / "h200x2" / "fsdp.json")
    pictures.draw_steps([row for row in published.rows if isinstance(row, FsdpRow)], "here", tmp_path)
    (axes,) = drawn[0].axes
    bars = [bar.get_window_extent() for bar in axes.patches if bar.get_height()]
    numbers = [text.get_window_extent() for text in axes.texts]
    assert len(bars) == len(numbers) and any(bar.get_height() < 0 for bar in axes.patches)
    assert not any(number.padded(2).overlaps(bar) for number in numbers for bar in bars)
