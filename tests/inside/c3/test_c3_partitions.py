"""Partitions without a device: one split of its SMs, streams of a pair whose GEMM has fewer, and the sweep."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sidelane.c3.partitions import PairStreams, shares
from sidelane.c3.strategies import named
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.partition import NEEDED, UnitSplit
from sidelane.program.collective import Kind
from sidelane_lab.pairs.pair import Pair, Workers
from sidelane_lab.pairs.workload import parse_workload
from sidelane_lab.studies.c3.comparison import PairOutcome, run_workload


class Splitting:
    """A driver whose device has 132 SMs that come in eights; it remembers what exists."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.alive: dict[int, str] = {}
        self.fails = fails
        flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1, CU_STREAM_NON_BLOCKING=1, CU_DEV_RESOURCE_TYPE_SM=7)
        names = dict.fromkeys((*NEEDED, "CUdevResourceType", "CUgreenCtxCreate_flags", "CUstream_flags"), flags)
        self.api = SimpleNamespace(**names)

    def priorities(self) -> tuple[int, int]:
        return 0, -5

    def call(self, function: str, *arguments: Any) -> Any:
        self.calls.append(function)
        if function == self.fails:
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", function)
        match function:
            case "cuCtxGetDevice":
                return 3
            case "cuDeviceGetDevResource":
                assert arguments == (3, 7)
                return resource(range(132))
            case "cuDevSmResourceSplitByCount":
                groups, whole, flags, least = arguments
                assert (groups, flags) == (1, 0)
                count = -(-least // 8) * 8
                return [resource(whole.owned[:count])], 1, resource(whole.owned[count:])
            case "cuDevResourceGenerateDesc":
                ((only,), count) = arguments
                assert count == 1
                return only
            case "cuGreenCtxCreate":
                return self.made(f"context of {arguments[0].sm.smCount}")
            case "cuGreenCtxStreamCreate":
                context, flags, priority = arguments
                return self.made(f"{self.alive[context]}, priority {priority}")
        assert function in ("cuStreamDestroy", "cuGreenCtxDestroy")
        del self.alive[arguments[0]]
        return ()

    def made(self, what: str) -> int:
        handle = len(self.calls)
        self.alive[handle] = what
        return handle


def resource(owned: Sequence[int]) -> Any:
    return SimpleNamespace(owned=owned, sm=SimpleNamespace(smCount=len(owned)))


def test_both_parts_come_out_of_one_split() -> None:
    driver = Splitting()
    split = UnitSplit(driver, driver.api, 16)
    assert driver.calls.count("cuDevSmResourceSplitByCount") == 1
    assert (split.taken.units, split.left.units) == (16, 116)
    for part in (split.taken, split.left):
        assert driver.alive[part.stream] == f"context of {part.units}, priority 0"
        assert driver.alive[part.urgent] == f"context of {part.units}, priority -5"
    split.close()
    split.close()
    assert not driver.alive
    assert driver.calls[-1] == "cuGreenCtxDestroy", "streams go first"


@pytest.mark.parametrize("units", [0, 132, 12])
def test_a_part_of_another_size_is_none(units: int) -> None:
    driver = Splitting()
    with pytest.raises(UnavailableError, match=r"allowed=1\.\.131|132 SMs into 16 and 116, not into 12"):
        UnitSplit(driver, driver.api, units)
    assert not driver.alive


def test_a_split_that_fails_leaves_nothing() -> None:
    driver = Splitting(fails="cuGreenCtxStreamCreate")
    with pytest.raises(DriverError):
        UnitSplit(driver, driver.api, 8)
    assert not driver.alive


def test_an_old_binding() -> None:
    driver = Splitting()
    del driver.api.cuGreenCtxStreamCreate
    with pytest.raises(UnavailableError, match="cuGreenCtxStreamCreate"):
        UnitSplit(driver, driver.api, 8)
    assert not driver.calls


def test_shares_of_a_sweep() -> None:
    assert shares(132) == (8, 16, 32, 64) and shares(15) == ()


class Parts:
    """Partitions of 32 units whose streams are names."""

    units = 32

    def __init__(self, objection: str = "") -> None:
        self.objection = lambda: objection

    def streams(self, units: int, usual: PairStreams, *, confine: bool) -> PairStreams:
        mine = f"own {units}" if confine else usual.collective
        return PairStreams(f"all but {units}", mine, mine)  # type: ignore[arg-type]


def test_a_pair_runs_on_the_lanes_of_its_partition() -> None:
    work = SimpleNamespace(run=lambda: None, start=lambda: None)
    usual = PairStreams("gemm lane", "lane", "urgent lane")  # type: ignore[arg-type]
    with Workers() as workers:
        pairs = Pair(work, usual, workers, Parts())  # type: ignore[arg-type]
        seen: list[Any] = []
        pairs._on_streams = lambda strategy, run, streams, compute: seen.append(streams)  # type: ignore[method-assign]
        for name, units in (("c3_rp", 8), ("c3_rp", 16), ("conccl_rp", 8), ("conccl_rp", 0), ("conccl", 0)):
            pairs.launch(named(name), work, units)()  # type: ignore[arg-type]
    assert [(streams.gemm, streams.collective) for streams in seen] == [
        ("all but 8", "own 8"), ("all but 16", "own 16"), ("all but 8", "lane"), ("gemm lane", "lane"),
        ("gemm lane", "lane"),
    ]  # fmt: skip


@dataclasses.dataclass
class Way:
    label: str
    implementation: str = "nccl"
    in_place: bool = False

    def start(self) -> Callable[[], None]:
        return lambda: None

    def fill(self, seed: int) -> None:
        pass

    def error(self, seed: int) -> str | None:
        return None


class Alone:
    """Instruments of a single rank, with times by name."""

    def __init__(self, times: Mapping[str, float]) -> None:
        self.times, self.asked = times, []  # type: ignore[var-annotated]

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def attempt(self, step: Callable[[], Any]) -> str | None:
        return step()  # type: ignore[no-any-return]

    def finish(self, what: str) -> None:
        pass

    def time(self, runs: Mapping[str, Callable[[], None]]) -> Mapping[str, Sequence[float]]:
        self.asked.append(list(runs))
        return {name: [next((us for key, us in self.times.items() if key in name), 100.0)] for name in runs}

    look = time


def measured(times: Mapping[str, float], objection: str = "") -> tuple[PairOutcome, list[list[str]]]:
    instruments = Alone(times)
    outcome = run_workload(
        parse_workload("8x8x8_1K", Kind.ALL_GATHER, "float32"),
        [Way("first"), Way("second"), Way("engines", "dma")],
        instruments,
        device=torch.device("cpu"),
        partitions=Parts(objection),
        memory_bound=True,
        strategies=[named(name) for name in ("serial", "c3_rp", "conccl_rp")],
    )
    return outcome, instruments.asked


def test_a_sweep_keeps_its_best_and_the_fastest_call() -> None:
    outcome, asked = measured(
        {"partition: second, 8": 90.0, "partition: second, 16": 70.0, "partition": 80.0, "second": 50.0}
    )
    assert asked[0] == ["first", "second", "engines"], "compared alone before anything is swept"
    swept = [label for label in asked[-1] if label.startswith("partition")]
    assert swept == ["partition: second, 8 units", "partition: second, 16 units"]
    found = {row.strategy: (row.note, row.units, row.time_us) for row in outcome.rows}
    assert found["c3_rp"] == ("second", 16, 70.0)
    assert found["conccl_rp"] == ("engines", 8, 80.0)
    assert found["serial"] == ("second", 0, 50.0)


def test_what_the_machine_has_no_means_for_is_a_row_with_the_reason() -> None:
    outcome, _ = measured({}, "not here")
    notes = {row.strategy: row.note for row in outcome.rows if row.time_us is None}
    assert list(notes) == ["c3_rp", "conccl_rp"]
    assert notes["c3_rp"] == "it takes compute units from the GEMM: not here"
