"""Power: an NVML that is made up, the arithmetic of counters, energies, and what is predicted."""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest

from sidelane.errors import SidelaneError, UnavailableError
from sidelane.execute.cuda.driver import REDUCE_BLOCKS
from sidelane.program.builders import algorithms
from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named
from sidelane_lab.model.power import REDUCE_UNITS, hybrid_power
from sidelane_lab.studies.power import predict as power_predict
from sidelane_lab.studies.power import sensors
from sidelane_lab.studies.power.meter import MeanPower, PowerRound, Reading, Recorder, draw_of, figures_of
from sidelane_lab.studies.power.predict import predicted
from sidelane_lab.studies.power.rows import PowerOptions, PowerRow

MB = 1 << 20


class FakeNvml:
    """Two GPUs, of which the environment hides the first: NVML counts both, torch's index 0 is the second."""

    NVML_SUCCESS = 0
    NVML_FI_DEV_POWER_INSTANT = 186
    UUIDS = ("GPU-aaaa", "GPU-bbbb")

    def __init__(self, *, instant: bool = True, energy: bool = True, power: bool = True) -> None:
        self.instant, self.energy, self.power = instant, energy, power
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.UUIDS:
            raise RuntimeError("Not Found")
        return self.UUIDS.index(uuid)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        assert fields == [self.NVML_FI_DEV_POWER_INSTANT]
        status = 0 if self.instant else 3  # not supported
        return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=250_000 + 1000 * handle))]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if not self.power:
            raise RuntimeError("Not Supported")
        return 300_000 + 1000 * handle

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if not self.energy:
            raise RuntimeError("Not Supported")
        return 5_000_000 + handle


def test_the_uuid_finds_the_gpu_whatever_the_environment_hides() -> None:
    nvml = FakeNvml()
    sensor = sensors.NvmlSensor(0, nvml=nvml, uuid="GPU-bbbb")
    assert (sensor.watts(), sensor.energy_mj(), sensor.averaged) == (251.0, 5_000_001.0, False)
    sensor.close()
    assert nvml.opened == 0


def test_torch_is_asked_for_the_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid="bbbb"))
    assert sensors.NvmlSensor(0, nvml=FakeNvml()).watts() == 251.0


@pytest.mark.parametrize("missing", ["unsupported", "unknown to this version"])
def test_without_instant_power_the_mean_over_a_second_is_read_and_said_to_be_one(missing: str) -> None:
    nvml = FakeNvml(instant=False)
    if missing != "unsupported":
        nvml.NVML_FI_DEV_POWER_INSTANT = None  # type: ignore[assignment]
    sensor = sensors.NvmlSensor(0, nvml=nvml, uuid="GPU-aaaa")
    assert (sensor.watts(), sensor.averaged) == (300.0, True)


def test_gpus_without_counters() -> None:
    assert sensors.NvmlSensor(0, nvml=FakeNvml(energy=False), uuid="GPU-aaaa").energy_mj() is None
    with pytest.raises(UnavailableError, match="does not tell its power: Not Supported"):
        sensors.NvmlSensor(0, nvml=FakeNvml(instant=False, power=False), uuid="GPU-aaaa")
    with pytest.raises(UnavailableError, match=r"does not know GPU 1 \(GPU-cccc\): Not Found"):
        sensors.NvmlSensor(1, nvml=FakeNvml(), uuid="GPU-cccc")


def test_no_nvml_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(sensors.importlib, "import_module", missing)
    with pytest.raises(UnavailableError, match="pynvml.*pip install nvidia-ml-py"):
        sensors.load_nvml()
    assert "no GPU" in (sensors.power_problem() or "")
    monkeypatch.setattr(sensors.nvidia, "device_count", lambda: 2)
    assert "pip install nvidia-ml-py" in (sensors.power_problem() or "")


def readings(watts: float, step_s: float = 0.1, every_s: float = 0.005, seconds: float = 2.0) -> list[Reading]:
    """A GPU at constant power whose energy counter moves every ``step_s``."""
    made = []
    for number in range(round(seconds / every_s)):
        now = number * every_s
        energy = 7_000.0 + watts * 1e3 * step_s * int(now / step_s + 1e-9)
        made.append(Reading(now, watts, energy))
    return made


@pytest.mark.parametrize("begin", [0.0, 0.013, 0.05, 0.099, 0.4])
@pytest.mark.parametrize("length", [0.45, 0.5, 0.55, 1.0])
def test_the_steps_of_the_counter_do_not_blur_the_power(begin: float, length: float) -> None:
    """A plain difference over half a second is wrong by up to a fifth when the counter moves every 100 ms."""
    found = draw_of(readings(400.0), begin, begin + length)
    assert found.counted_w == pytest.approx(400.0, rel=0.015)
    assert found.sampled_w == pytest.approx(400.0)


def test_only_the_window_counts() -> None:
    before = readings(100.0, seconds=1.0)
    base = before[-1].energy_mj or 0.0
    after = [Reading(r.time_s + 1.0, r.watts, (r.energy_mj or 0.0) - 7000.0 + base) for r in readings(500.0)]
    found = draw_of([*before, *after], 1.2, 2.8)
    assert found.counted_w == pytest.approx(500.0, rel=0.02)
    assert found.sampled_w == pytest.approx(500.0)


def test_a_counter_that_hardly_moves_is_not_used() -> None:
    assert draw_of(readings(400.0), 0.0, 0.25) == MeanPower(None, 400.0)
    still = [dataclasses.replace(reading, energy_mj=None) for reading in readings(400.0)]
    assert draw_of(still, 0.0, 1.0) == MeanPower(None, 400.0)
    with pytest.raises(ValueError, match="no reading"):
        draw_of(readings(400.0), 5.0, 6.0)


class FakeSensor:
    """Draws what it is told to; fails when it is told to."""

    averaged = False

    def __init__(self, watts: float = 200.0) -> None:
        self.draws, self.fails = watts, False
        self._begin = time.perf_counter()

    def watts(self) -> float:
        if self.fails:
            raise UnavailableError("fell off the bus")
        return self.draws

    def energy_mj(self) -> float:
        return self.draws * 1e3 * int((time.perf_counter() - self._begin) / 0.01) * 0.01

    def close(self) -> None:
        pass


def test_the_recorder_reads_all_the_time_and_forgets_what_was_asked_for() -> None:
    recorder = Recorder(FakeSensor(), interval_s=0.001)
    try:
        for _ in range(2):
            begin = time.perf_counter()
            time.sleep(0.12)
            found = recorder.draw(begin, time.perf_counter())
            assert found.sampled_w == pytest.approx(200.0)
            assert found.counted_w is not None
            assert len(recorder._readings) <= 60
    finally:
        recorder.close()


def test_a_sensor_that_fails_is_an_error_and_no_number() -> None:
    sensor = FakeSensor()
    sensor.fails = True
    recorder = Recorder(sensor, interval_s=0.001)
    try:
        recorder._thread.join(10)
        with pytest.raises(SidelaneError, match="fell off the bus"):
            recorder.draw(0.0, 1.0)
    finally:
        recorder.close()


def test_energy_is_that_of_all_gpus_for_one_call() -> None:
    points = [PowerRound(1000.0, (300.0, 320.0), (303.0, 323.0)), PowerRound(1010.0, (300.0, 320.0), (303.0, 323.0))]
    found = figures_of(points, idle_w=(100.0, 120.0))
    assert found["watts"] == 310.0
    assert found["energy_mj"] == pytest.approx(620.0 * 1.005)  # W x ms = mJ
    assert found["energy_above_idle_mj"] == pytest.approx(400.0 * 1.005)
    assert found["time_us"] == 1005.0
    assert found["counters_agree_percent"] == pytest.approx(100 * 313 / 310)
    assert found["note"] == ""


def test_without_an_energy_counter_readings_stand_in_and_nothing_agrees() -> None:
    found = figures_of([PowerRound(100.0, (None, 320.0), (300.0, 324.0))], (100.0, 100.0))
    assert (found["watts"], found["counters_agree_percent"]) == (310.0, None)
    assert "readings stand in" in found["note"]


def test_rounds_that_differ_are_noted() -> None:
    found = figures_of([PowerRound(100.0, (300.0,), (300.0,)), PowerRound(120.0, (300.0,), (300.0,))], (100.0,))
    assert found["note"] == "energy differs by 20% between rounds"


def test_prediction_is_that_of_the_model() -> None:
    machine = named("mi300x8")
    rows = {row.variant or row.implementation: row for row in predicted(machine, Kind.ALL_GATHER, 256 * MB)}
    assert list(rows) == ["library", "pcpy", "bcst", "b2b"]
    assert rows["pcpy"].watts < rows["library"].watts
    assert rows["bcst"].watts < rows["pcpy"].watts
    for row in rows.values():
        assert row.energy_mj == pytest.approx(row.watts * 8 * row.time_us / 1e3)
        assert row.energy_above_idle_mj == pytest.approx((row.watts - row.idle_watts) * 8 * row.time_us / 1e3)


@pytest.mark.parametrize("kind", [Kind.REDUCE_SCATTER, Kind.ALL_REDUCE])
@pytest.mark.parametrize("name", ["h200x4", "mi300x8"])
def test_reductions_are_predicted_from_the_programs_that_run(kind: Kind, name: str) -> None:
    machine = named(name)
    rows = {row.variant or row.implementation: row for row in predicted(machine, kind, 256 * MB)}
    assert list(rows) == ["library", *(one.name for one in algorithms(kind) if not one.through_host)]
    for row in rows.values():
        assert row.in_place is (kind is Kind.ALL_REDUCE)
        assert row.idle_watts < row.watts < 2 * rows["library"].watts
        assert row.energy_mj == pytest.approx(row.watts * machine.gpus * row.time_us / 1e3)
    assert ("taken for an all_gather" in rows["library"].note) is (kind is Kind.REDUCE_SCATTER)
    assert rows["b2b"].watts < rows["library"].watts, "compute units work only while something is added"


def test_the_power_of_a_hybrid_is_that_of_its_bytes_engines_and_units() -> None:
    machine, n, nbytes = named("h200x4"), 4, 64 * MB
    power = machine.power
    for kind, copied in ((Kind.REDUCE_SCATTER, 1), (Kind.ALL_REDUCE, 2)):
        draw = hybrid_power(machine, kind, nbytes, "b2b")
        # In parts of a rank: a copy reads and writes; a reduction reads n parts and writes one.
        memory = (copied * 2 * (n - 1) + n + 1) * nbytes / n / draw.time_us / 1e3
        wire = copied * (n - 1) * nbytes / n / draw.time_us / 1e3
        rest = power.idle_w - power.compute_idle_w + power.engine_w
        rest += power.memory_w * memory / machine.gpu.memory_gbps
        rest += power.links_on_w + power.links_w * wire / machine.links.usable_gbps
        assert draw.rest_w == pytest.approx(rest)
        share = (draw.compute_w - power.compute_idle_w) / power.compute_w / (REDUCE_UNITS / machine.gpu.units)
        reduction_us = machine.dma.reduce_us + (n + 1) * nbytes / n / machine.dma.reduce_gbps / 1e3
        assert share * draw.time_us == pytest.approx(reduction_us, rel=0.01), "the time in which units add"
    with pytest.raises(ValueError, match=r"hybrid_power: kind \(value=all_gather, allowed=reduce_scatter, all_reduce"):
        hybrid_power(machine, Kind.ALL_GATHER, nbytes, "b2b")
    with pytest.raises(ValueError, match="no power figures"):
        hybrid_power(dataclasses.replace(machine, power=None), Kind.ALL_REDUCE, nbytes, "b2b")


def test_links_draw_power_as_long_as_anything_crosses_them() -> None:
    machine, n = named("h200x4"), 4
    fast, slow = (hybrid_power(machine, Kind.ALL_REDUCE, 256 * MB, variant) for variant in ("b2b", "pcpy"))
    assert slow.time_us > 1.3 * fast.time_us
    # The same bytes through memory and links take the same energy, and what is on while they last takes the rest.
    power, engines = machine.power, [1, n - 1]
    above = [
        (draw.total_w - power.idle_w - power.engine_w * count) * draw.time_us
        for draw, count in zip((fast, slow), engines, strict=True)
    ]
    assert (above[1] - above[0]) / (slow.time_us - fast.time_us) == pytest.approx(float(power.links_on_w), rel=0.02)


def test_a_reduction_takes_the_units_that_the_executor_gives_it() -> None:
    assert REDUCE_UNITS == REDUCE_BLOCKS


def test_the_command_prints_and_writes(tmp_path, capsys) -> None:
    options = PowerOptions(
        collectives=(Kind.ALL_GATHER, Kind.ALL_TO_ALL),
        sizes=(MB, 64 * MB),
        json=tmp_path / "power.json",
        report=tmp_path / "report",
    )
    power_predict.main("mi300x8", options)
    shown = capsys.readouterr().out
    assert "all_gather, in place" in shown and "all_to_all, out of place" in shown and "swap" in shown
    content = json.loads((tmp_path / "power.json").read_text())
    assert (content["study"], content["machine"]) == ("power", "mi300x8")
    assert len([PowerRow.from_dict(row) for row in content["rows"]]) == 16
    assert (tmp_path / "report" / "power-all_gather-in-place.png").stat().st_size > 5000
    reductions = dataclasses.replace(options, collectives=(Kind.REDUCE_SCATTER, Kind.ALL_REDUCE), report=None)
    power_predict.main("mi300x8", reductions)
    shown = capsys.readouterr().out
    assert "all_reduce, in place" in shown and "reduce_scatter, out of place" in shown
    with pytest.raises(ValueError, match=r"no model .* \(value=broadcast, allowed=all_gather, .*without --machine"):
        power_predict.main("mi300x8", dataclasses.replace(options, collectives=(Kind.BROADCAST,)))
