"""Watts of a GEMM next to a collective: parts add up, the cap holds, and what is not described is refused."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from sidelane.c3.strategies import named as strategy_named
from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.power import choose_for_energy, dma_power, library_power, pair_power, powered
from sidelane_lab.pairs.workload import Gemm, Workload, parse_gemm, parse_workload
from sidelane_lab.studies.power.predict import main
from sidelane_lab.studies.power.rows import PowerOptions

H200, MI300X = named("h200x2"), named("mi300x8")
PROFILE = Path(__file__).parents[2] / "results" / "h200x2" / "fsdp-profile.json"
PAIRS = PROFILE.with_name("c3-energy.json")


@pytest.mark.parametrize("machine", [H200, MI300X], ids=["h200x2", "mi300x8"])
def test_only_what_lasts_longer_costs_more(machine):
    """The same kernels one after the other and side by side: operations and bytes take the same energy."""
    free = machine.with_value("power.cap_w", 3000)
    pair = parse_workload("cb1_896M", Kind.ALL_GATHER)
    serial, beside = (pair_power(free, pair, name) for name in ("serial", "c3_sp_rp"))
    power = free.power
    waited = power.idle_w * (serial.time_us - beside.time_us)
    on = power.links_on_w * (serial.collective_us - beside.collective_us)
    assert serial.energy_mj - beside.energy_mj == pytest.approx((waited + on) / 1e3, rel=1e-6)
    assert serial.both_us == 0 < beside.both_us
    # One after the other is what each takes alone.
    alone = library_power(free, Kind.ALL_GATHER, pair.nbytes)
    gemm_mj = serial.gemm_w * gemm_us(free, pair.gemm) / 1e3
    assert serial.energy_mj == pytest.approx(gemm_mj + alone.energy_mj, rel=1e-3)


def test_copy_engines_take_less_than_kernels_and_the_cap_holds():
    pair = parse_workload("cb1_896M", Kind.ALL_GATHER)
    serial, kernels, engines = (pair_power(H200, pair, name, ranges=True) for name in ("serial", "c3_rp", "conccl"))
    assert engines.energy_mj < kernels.energy_mj < serial.energy_mj
    assert engines.high_mj < serial.low_mj
    assert engines.wanted_w > engines.cap_w > engines.watts
    uncapped = pair_power(H200.with_value("power.cap_w", 3000), pair, "conccl")
    assert uncapped.energy_mj > engines.energy_mj and uncapped.slower == (0.0, 0.0)
    alone = dma_power(H200, Kind.ALL_GATHER, pair.nbytes, "pcpy")
    assert engines.idle_w + engines.collective_w == pytest.approx(alone.total_w, rel=0.05)


def test_a_strategy_is_chosen_for_its_energy_and_never_one_slower_than_serial():
    for name, kind in (("cb1_896M", Kind.ALL_GATHER), ("cb4_1G", Kind.ALL_TO_ALL)):
        draws = [pair_power(H200, parse_workload(name, kind), one, ranges=True) for one in powered(H200)]
        by_name = {one.name: draw for one, draw in zip(powered(H200), draws, strict=True)}
        found = choose_for_energy(draws)
        chosen, serial = by_name[found.candidate], by_name["serial"]
        assert chosen.energy_mj < serial.energy_mj and chosen.time_us <= serial.time_us
        able = [draw for draw in draws if draw.time_us <= serial.time_us]
        assert chosen.energy_mj <= 1.05 * min(draw.energy_mj for draw in able), found.reason
        assert found.reason.startswith(f"{found.candidate}: ") and "plausible watts" in found.reason
    # Others take less by other watts: of those that may be it, the fastest.
    fast = dataclasses.replace(serial, strategy="fast", time_us=1.0, varied_mj=tuple(0.0 for _ in serial.varied_mj))
    assert choose_for_energy([serial, chosen, fast]).candidate == "fast"
    with pytest.raises(ValueError, match="serial too"):
        choose_for_energy([chosen])


def test_what_was_measured_of_a_capped_gpu():
    """A GEMM alone drew 715 W on a GPU that idles at 138 W; GEMMs of FSDP2 steps are slower beside copies."""
    pair = Workload(parse_gemm("8192x8192x8192"), Kind.ALL_GATHER, 896 << 20)
    draw = pair_power(H200, pair, "conccl")
    assert pair_power(H200, pair, "serial").gemm_w == pytest.approx(715 - 138 + 121, rel=0.05)
    least, most = draw.slower
    rows = [row for row in json.loads(PROFILE.read_text())["rows"] if row["implementation"] == "sidelane"]
    for row in rows:
        beside_ms = row["peer_copy_ms"] * row["gemm_ms"] / row["step_ms"]  # copies run beside other kernels, too
        assert least <= row["gemm_beside_ms"] / beside_ms <= most
    assert len(rows) == 2


def test_what_was_measured_of_pairs_that_run_again_and_again():
    """One figure was fitted to these rows: ``boost_w``. Pairs of 64 rows lost time to more than power (0.31)."""
    errors: dict[str, list[float]] = {}
    stretches = []
    for row in json.loads(PAIRS.read_text())["rows"]:
        if row["energy_mj"] is None:
            continue
        name = "add" if row["gemm"] == "add" else f"{row['m']}x{row['n']}x{row['k']}"
        draw = pair_power(H200, Workload(parse_gemm(name), Kind(row["collective"]), row["bytes"]), row["strategy"])
        errors.setdefault(name, []).append(abs(2 * draw.energy_mj / row["energy_mj"] - 1))
        if row["bound"] == "compute" and row["strategy"] in ("c3_rp", "conccl", "conccl_rp"):
            repeated_us = row["energy_mj"] / 2 / row["watts"] * 1e3
            stretches.append((draw.repeated_us / draw.time_us) / (repeated_us / row["time_us"]))
    worst = {name: max(some) for name, some in errors.items()}
    assert worst.pop("64x57344x8192") < 0.33 and max(worst.values()) < 0.08
    assert len(stretches) == 6 and all(0.95 < one < 1.05 for one in stretches)


def test_parts_are_sound_whatever_the_pair():
    draw_from = random.Random()
    seed = draw_from.randrange(1 << 30)
    draw_from.seed(seed)
    for _ in range(12):
        machine = draw_from.choice([H200, MI300X, named("h200x4")])
        gemm = Gemm(*(draw_from.randrange(1, 20000) for _ in range(3)), "bfloat16")
        kind = draw_from.choice([Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE])
        pair = Workload(gemm, kind, draw_from.randrange(1 << 12, 1 << 31))
        strategy = draw_from.choice(["serial", "c3_base", "c3_sp", "conccl"])
        draw = pair_power(machine, pair, strategy, ranges=True)
        told = (seed, machine.name, pair, strategy, draw)
        assert 0 <= draw.both_us <= min(draw.gemm_us, draw.collective_us) + 1e-6, told
        assert draw.gemm_us + draw.collective_us - draw.both_us <= draw.time_us * (1 + 1e-9), told
        assert draw.idle_w <= draw.watts <= draw.cap_w, told
        assert draw.low_mj <= draw.energy_mj <= draw.high_mj, told
        assert 0 <= draw.slower[0] <= draw.slower[1], told


def test_what_is_not_described_is_refused(capsys):
    pair = parse_workload("cb1_896M", Kind.ALL_GATHER)
    with pytest.raises(ValueError, match=r"a100-40x4 has no power figures \(value=None, allowed=a section \[power\]\)"):
        pair_power(named("a100-40x4"), pair, "conccl")
    ours = strategy_named("nccl_ce")
    with pytest.raises(ValueError, match="no description has watts of the library's other ways"):
        pair_power(H200, pair, ours)
    assert ours not in powered(H200)
    with pytest.raises(ValueError, match="node"):
        pair_power(dataclasses.replace(H200, nodes=2), pair, "conccl")
    with pytest.raises(ValueError, match=r"this collective \(value=broadcast, allowed=all_gather"):
        main("h200x2", PowerOptions(gemms=("cb1",), collectives=(Kind.BROADCAST,), sizes=(1 << 20,)))


def test_the_command_prints_and_writes(tmp_path, capsys):
    options = PowerOptions(
        gemms=("cb1", "512,4096,4096"),
        collectives=(Kind.ALL_TO_ALL,),
        sizes=(64 << 20,),
        report=tmp_path,
    )
    main("h200x4", options)
    shown = capsys.readouterr().out
    assert "plausible" in shown and "the cap 700 W" in shown and "copy_engines" in shown and "conccl" not in shown
    content = json.loads((tmp_path / "power_pairs.json").read_text())
    assert (content["study"], content["machine"], content["predicted"]) == ("power_pairs", "h200x4", True)
    assert {row["gemm"] for row in content["rows"]} == {"cb1", "512,4096,4096"}
    assert all(row["low_mj"] <= row["energy_mj"] <= row["high_mj"] for row in content["rows"])
