"""Metrics: sums of calls in a text file, each call to a subscriber, nothing while they are off."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

import sidelane
from interpreter import Interpreter
from sidelane import Config, metrics, ranges
from sidelane.integrations import ledger
from sidelane.metrics import CallMetrics


def samples(text: str) -> dict[str, float]:
    """The lines of a file by name and labels; the format is checked on the way."""
    found: dict[str, float] = {}
    typed: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name.partition("{")[0] in typed
            assert name not in found
            found[name] = float(value)
    return found


@on_ranks(2)
def test_calls_are_summed_up(group: dist.ProcessGroup, tmp_path: Path) -> None:
    rank, calls = dist.get_rank(group), []
    metrics.start(f"{tmp_path}/calls-{{rank}}.prom")
    leave = metrics.subscribe(calls.append)
    try:
        with sidelane.Communicator(group, config=Config(timeout_s=30)) as comm:
            n = comm.world_size
            for _ in range(3):
                comm.all_gather(torch.empty(n, 7), torch.ones(7))
            work = comm.all_reduce(torch.ones(5, dtype=torch.int32), async_op=True)
            assert work is not None
            work.wait()
            if rank:
                time.sleep(0.2)
            comm.barrier()
            with comm.batch(async_op=True) as batch:
                batch.all_reduce(torch.ones(3))
            assert batch.work is not None
            batch.work.wait()
            with pytest.raises(ValueError, match="broadcast"):
                comm.broadcast(torch.ones(3), root=n)
        own = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
        dist.all_reduce(torch.ones(3), group=own)
        dist.all_reduce(torch.ones(3, dtype=torch.float64), op=dist.ReduceOp.PRODUCT, group=own)
        dist.destroy_process_group(own)
    finally:
        leave()
        metrics.stop()
    assert not metrics.text()
    found = samples((tmp_path / f"calls-{dist.get_rank()}.prom").read_text())

    def total(name: str, *labels: str) -> float:
        rows = [value for key, value in found.items() if key.startswith(f"sidelane_{name}{{")]
        assert rows, name
        return sum(
            value
            for key, value in found.items()
            if key.startswith(f"sidelane_{name}{{") and all(label in key for label in labels)
        )

    gathers = ('collective="all_gather"', 'dtype="float32"', 'device="cpu"', f'rank="{rank}"')
    assert total("calls_total", *gathers) == total("timed_calls_total", *gathers) == 3
    assert total("bytes_total", *gathers) == 3 * 2 * 7 * 4
    assert 0 < total("host_microseconds_total", *gathers) == total("duration_microseconds_total", *gathers) < 60e6
    assert total("calls_total", 'collective="all_reduce"', 'dtype="int32"') == 1
    assert total("calls_total", 'group="communicator ', 'collective="barrier"') == 1
    assert total("errors_total", 'collective="broadcast"', 'error="ValueError"') == 1
    assert total("fallbacks_total", 'collective="all_reduce"', 'backend="gloo"') == 1
    if not rank:
        assert total("late_peer_waits_total", 'peer="1"') >= 1
        assert total("late_peer_microseconds_total", 'peer="1"') > 1e5
    names = [call.collective for call in calls]
    assert names == [*["all_gather"] * 3, "all_reduce", "barrier", "batch", "broadcast", "all_reduce", "all_reduce"]
    assert [call.duration_us is None for call in calls] == [*[False] * 6, True, False, True]  # an error; Gloo's
    assert calls[3].duration_us is not None and calls[3].duration_us > 0
    assert calls[6].error == "ValueError"


def test_a_subscriber_fails_no_call(caplog: pytest.LogCaptureFixture) -> None:
    def fails(call: CallMetrics) -> None:
        raise KeyError(call.collective)

    leave = metrics.subscribe(fails)
    with caplog.at_level(logging.ERROR, "sidelane"), ranges.ObservedCall("all_gather", [], [], (0,)) as call:
        call.work = None
    leave()
    assert "_Subscription.end failed" in caplog.text and "KeyError: 'all_gather'" in caplog.text
    assert not ranges.observers and ranges.is_active is torch.autograd._profiler_enabled


def test_the_name_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranges, "world_rank", lambda: 3)
    named = metrics.Sums(None)
    assert metrics.path_of("a/b.prom") == Path("a/b-3.prom")
    assert metrics.path_of("{rank}/b.prom") == Path("3/b.prom")
    assert "{" not in str(metrics.path_of("{host}-{pid}.prom"))
    (tmp_path / "file").write_text("")
    named._file = str(tmp_path / "file" / "calls.prom")
    named.write()  # warns, and raises nothing
    named.fell_back("all_reduce", "gloo", 'a "reason"\nof two lines')
    assert r'reason="a \"reason\"\nof two lines"} 1' in named.text()


FORKING = """
import os, sys, torch
from sidelane import flight_recorder, metrics, ranges
metrics.start(sys.argv[1] + "/{pid}.prom")
flight_recorder.start(sys.argv[1] + "/dump")
with ranges.ObservedCall("all_reduce", [torch.ones(3)], [], (0,)):
    pass
if os.fork():
    os.wait()
else:
    assert not ranges.observers and not metrics.text() and flight_recorder.dump() is None
    sys.exit()
assert "calls_total" in metrics.text()
"""


def test_a_forked_copy_counts_nothing(interpreter: Interpreter, tmp_path: Path) -> None:
    interpreter.start(FORKING, tmp_path, (tmp_path / "found",))
    codes, _, errors = interpreter.wait()
    assert codes == [0], errors
    (file,) = (tmp_path / "found").iterdir()  # of the parent, at its exit
    assert 'collective="all_reduce"' in file.read_text()


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups come and go, and reasons have sizes in them."""
    monkeypatch.setattr(ranges, "MOST_ROWS", 3)
    sums = metrics.Sums(None)
    for number in range(10):
        sums.end(ranges.ObservedCall("all_reduce", [torch.ones(1)], [], (0,), f"group {number}"), None, ValueError())
        sums.fell_back("all_reduce", "gloo", f"{number} bytes")
    sums.end(ranges.ObservedCall("all_reduce", [torch.ones(1)], [], (0,), "group 0"), None, None)
    found = {name.replace('rank="0",', ""): value for name, value in samples(sums.text()).items()}
    calls = {name: value for name, value in found.items() if name.startswith("sidelane_calls_total")}
    assert len(calls) == 4 and sum(calls.values()) == 11
    others = 'group="others",collective="others"'
    assert found[f'sidelane_calls_total{{{others},dtype="others",device="others"}}'] == 7
    assert found['sidelane_calls_total{group="group 0",collective="all_reduce",dtype="float32",device="cpu"}'] == 2
    assert found[f'sidelane_errors_total{{{others},error="others"}}'] == 7
    assert found['sidelane_fallbacks_total{collective="others",backend="others",reason="others"}'] == 7


def test_rows_of_the_report_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ranges, "MOST_ROWS", 3)
    ledger.reset()
    calls = ledger.Ledger([0])
    try:
        for number in range(10):
            calls.note(("all_reduce", "float32", "cpu", "gloo", f"{number} bytes"), "", 4)
        calls.note(("all_reduce", "float32", "cpu", "sidelane", "b2b"), "fastest", 4)
        rows = [(row.operation, row.where, row.why, row.calls) for row in ledger.report().rows]
    finally:
        ledger._ledgers.remove(calls)
    assert rows[3:] == [("others", "gloo", "others", 7), ("others", "sidelane", "others", 1)]
    assert len(caplog.records) <= 4, "what is new is logged once"
