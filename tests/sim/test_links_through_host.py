"""Collectives through host memory in virtual time: links, root complexes and memory that GPUs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidelane.program import collective as define
from sidelane.program.builders import Transport, build
from sidelane.program.collective import Collective, Kind, ReduceOp, Reduction
from sidelane.program.ir import Program
from sidelane_lab.harness.study import read
from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.kernels import host_kernel_us, own_gang
from sidelane_lab.model.split import ours_us
from sidelane_lab.sim import simulate
from sidelane_lab.studies.collectives import CollectiveRow

ROOT = Path(__file__).parents[2]
SUM = Reduction(ReduceOp.SUM, "bfloat16")
NBYTES = 512 << 20


def us(machine: Machine, collective: Collective, variant: str) -> float:
    return simulate(build(collective, variant, Transport.STAGED), machine).time_us


def gather(ranks: int) -> Collective:
    return define.all_gather([NBYTES // ranks] * ranks)


@pytest.mark.parametrize("name", ["4090x2", "5090x4"])
def test_pieces_hide_one_way_behind_the_other(name: str) -> None:
    machine = named(name)
    assert machine.through_host and machine.host is not None
    n, host = machine.gpus, machine.host
    part = NBYTES / n
    exchange, total = define.all_to_all([[NBYTES // n] * n] * n), define.all_reduce([NBYTES // n] * n, SUM)
    for collective in (gather(n), exchange, total):  # of what is gathered GPUs write a part, and read all
        pieces, whole = us(machine, collective, "chunked"), us(machine, collective, "b2b")
        assert pieces < (0.97 if collective is not exchange and n > 2 else 0.9) * whole, collective
    # Of an all-gather each GPU writes a part and reads the others.
    floor = max(part * n / host.duplex_gbps, n * n * part / host.memory_gbps, (n - 1) * part / host.gpu_gbps) / 1e3
    assert floor < us(machine, gather(n), "chunked") < 1.25 * floor


MEASURED = tuple(
    row for row in read(ROOT / "results" / "h200x2" / "no-peers.json").rows if isinstance(row, CollectiveRow)
)
OFF = {("all_gather", 4 << 20, "one_shot"): 0.3, ("all_to_all", 64 << 10, ""): 0.32, ("all_to_all", 16 << 10, ""): 0.25}
"""Calls whose times no smooth line has: all others are within 20%."""


def test_kernels_and_the_library_take_what_was_measured_between_two_gpus() -> None:
    machine, seen = named("h200x2-host"), set()
    for row in MEASURED:
        kind, key = Kind(row.collective), (row.collective, row.bytes, row.variant)
        if row.time_us is None or row.variant not in ("", "one_shot") or row.implementation not in ("nccl", "sm"):
            continue
        predict = host_kernel_us if row.implementation == "sm" else library_us
        assert predict(machine, kind, row.bytes) == pytest.approx(row.time_us, rel=OFF.get(key, 0.2)), key
        seen.add((row.collective, row.implementation))
    assert len(seen) == 6


def test_kernels_share_what_gpus_share() -> None:
    machine, kind = named("5090x4"), Kind.ALL_REDUCE
    for nbytes in (4096, 16 << 20):
        alone = host_kernel_us(machine, kind, nbytes)
        assert own_gang(machine, kind, nbytes, captured=True).alone_us == alone >= ours_us(machine, kind, nbytes)
        for name in ("memory", "root"):
            assert host_kernel_us(machine.with_value(f"host.{name}_gbps", 12), kind, nbytes) > alone
    assert host_kernel_us(machine, Kind.BROADCAST, 4096) > host_kernel_us(machine, Kind.ALL_GATHER, 4096)


def test_what_gpus_share_holds_them_all() -> None:
    machine = named("5090x4")
    alone = us(machine, gather(4), "chunked")
    for name, value in (("memory", 60), ("root", 60), ("gpu", 10), ("duplex", 20)):
        path = f"host.{name}_gbps"
        assert us(machine.with_value(path, value), gather(4), "chunked") > 1.5 * alone, path
    split = machine.with_value("host.root_gbps", 60).with_value("host.root_gpus", 2)
    assert us(split, gather(4), "chunked") < us(machine.with_value("host.root_gbps", 60), gather(4), "chunked")


def test_copies_between_gpus_pass_host_memory_where_there_are_no_peers() -> None:
    pushed: Program = build(gather(2), "b2b", Transport.PUSH)
    machine = named("4090x2").with_value("host.memory_gbps", 20)
    with_peers = machine.with_value("host.peers", 1)
    assert not with_peers.through_host
    assert simulate(pushed, machine).time_us > 1.5 * simulate(pushed, with_peers).time_us
