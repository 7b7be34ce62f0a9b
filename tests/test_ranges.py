"""Ranges of calls in profilers: each call has one, by its name, with the fields that tools read."""

from __future__ import annotations

import json
import sys
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.overrides import TorchFunctionMode

import sidelane
from interpreter import Interpreter
from sidelane import Config, ranges
from sidelane.config import from_environment


class Refusing(TorchFunctionMode):
    """A mode of the caller that sees no function of a call."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (torch.ones, torch.empty):
            raise RuntimeError(f"refused {function}")
        return function(*args, **(kwargs or {}))


@on_ranks(2)
def test_each_call_is_one_range(group: dist.ProcessGroup) -> None:
    with sidelane.Communicator(group, config=Config(timeout_s=30)) as comm:
        n = comm.world_size
        with torch.profiler.profile(record_shapes=True) as profiler:
            for _ in range(2):
                comm.all_gather(torch.empty(n, 7), torch.ones(7))
            comm.all_to_all(
                [torch.empty(n), torch.empty(2 * n)], [torch.ones(n), torch.ones(2 * n)], async_op=True
            ).wait()
            comm.all_reduce(tensor=torch.ones(5, dtype=torch.int32))
            with Refusing():
                comm.all_gather(input=torch.ones(3), output=torch.empty(n, 3))
            with comm.batch() as batch:
                batch.all_reduce(torch.ones(4))
            with pytest.raises(ValueError, match="broadcast"):
                comm.broadcast(torch.ones(3), root=n)
            comm.barrier()
        own = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
        with torch.profiler.profile() as grouped:
            dist.all_reduce(torch.ones(3), group=own)
            work = dist.all_reduce(torch.ones(3), group=own, async_op=True)
            assert work is not None
            work.wait()
        dist.destroy_process_group(own)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for one in (profiler, grouped):
            one.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
            found += [(event["name"], event["args"]) for event in events if "sidelane:" in str(event.get("name"))]
    names = [name.removeprefix("sidelane:") for name, _ in found]
    some = ["all_gather", "all_gather", "all_to_all", "all_reduce", "all_gather", "batch", "broadcast", "barrier"]
    assert names == [*some, "all_reduce", "all_reduce"]
    keys = ("dtype", "In msg nelems", "Out msg nelems", "Group size", "Process Group Ranks")
    fields = [tuple(said[key] for key in keys) for _, said in found[:5]]
    assert fields == [
        ("Float", 7, 14, 2, "[0, 1]"),
        ("Float", 7, 14, 2, "[0, 1]"),
        ("Float", 6, 6, 2, "[0, 1]"),
        ("Int", 5, 5, 2, "[0, 1]"),
        ("Float", 3, 6, 2, "[0, 1]"),
    ]
    assert found[0][1]["Input Dims"] == [[2, 7], [7]]


class Domain:
    """A domain of the package ``nvtx``, as far as ranges use it."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, attributes: str) -> None:
        self.marks.append(attributes)

    def pop_range(self) -> None:
        self.marks.append("end")


def test_nvtx_marks_calls_whatever_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = Domain()
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(get_domain={"sidelane": domain}.__getitem__))
    monkeypatch.setattr(ranges, "_domain", None)
    monkeypatch.setattr(ranges, "is_active", ranges.is_active)
    assert not ranges.is_active()
    none = ranges.argument_indices(())
    maker = SimpleNamespace(ranks=(0, 1), name="")
    with ranges.method_call("unseen", none, (), {}, maker):
        assert domain.marks == []
    ranges.mark_by_nvtx()
    assert ranges.is_active()
    with (
        ranges.method_call("barrier", none, (), {}, maker),
        ranges.ObservedCall("all_reduce", [torch.ones(1)], [], (0, 1)),
    ):
        domain.marks.append("within")
    with pytest.raises(KeyError), ranges.method_call("all_gather", (0, 1, -1), (5,), {"input": torch.ones(1)}, maker):
        raise KeyError
    assert domain.marks == ["sidelane:barrier", "within", "end", "sidelane:all_gather", "end"]


PROGRAM = "import sys; sys.path.insert(0, sys.argv[1])\nfrom sidelane import config\nconfig.start_observers()"


def test_the_setting_is_checked(monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SIDELANE_NVTX: not a switch \(value='yes'"):
        from_environment({"SIDELANE_NVTX": "yes"})
    (tmp_path / "nvtx.py").write_text("raise ImportError('no library')")
    monkeypatch.setenv("SIDELANE_NVTX", "1")
    interpreter.start(PROGRAM, tmp_path, (tmp_path,))
    _, _, (errors,) = interpreter.wait()
    assert "ValueError: SIDELANE_NVTX=1 needs the package nvtx: no library" in errors
    (tmp_path / "nvtx.py").write_text("def get_domain(name):\n    print(name)")
    interpreter.start(PROGRAM, tmp_path, (tmp_path,))
    assert interpreter.wait()[:2] == ([0], ["sidelane\n"])


class Noting(ranges.Observer):
    """Observer that writes down what it is told of a call."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def begin(self, call: ranges.ObservedCall) -> str:
        self.said.append("begin")
        return call.name

    def returned(self, call: ranges.ObservedCall, note: str, error: BaseException | None) -> None:
        self.said.append(("returned", note, error))

    def end(self, call: ranges.ObservedCall, note: str, error: BaseException | None) -> None:
        self.said.append(("end", note, error, bool(call.finished_ns), len(call.outputs)))


class Later:
    """Handle of a call that keeps its callbacks, as futures do, after they have been called."""

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def when_ended(self, function: Any) -> bool:
        self.functions.append(function)
        return True


def test_an_observer_is_told_of_the_return_and_of_the_end_and_no_tensor_is_kept() -> None:
    observer, work, problem = Noting(), Later(), ValueError("not so")
    ranges.observe(observer)
    try:
        tensors = [torch.ones(1)]
        gone = weakref.ref(tensors[0])
        with ranges.ObservedCall("late", tensors, (), (0,)) as call:
            call.work = work
        assert observer.said == ["begin", ("returned", "late", None)]
        work.functions[0](None)
        assert observer.said[2:] == [("end", "late", None, True, 1)]
        del tensors, call
        assert gone() is None
        with pytest.raises(ValueError, match="not so"), ranges.ObservedCall("wrong", (), (), (0,)):
            raise problem
        with ranges.ObservedCall("other", (), (), (0,)) as call:  # of a backend whose end the host does not learn of
            call.work = object()
    finally:
        ranges.leave(observer)
    assert observer.said[4:6] == [("returned", "wrong", problem), ("end", "wrong", problem, False, 0)]
    assert observer.said[7:] == [("returned", "other", None), ("end", "other", None, False, 0)]


def test_an_observer_that_raises_fails_no_call(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(ranges.Observer):
        def begin(self, call: ranges.ObservedCall) -> None:
            raise KeyError

        returned = end = failed = begin  # type: ignore[assignment]

    failing, noting = Failing(), Noting()
    ranges.observe(failing)
    ranges.observe(noting)
    with ranges.ObservedCall("fine", (), (), (0,)):
        pass
    ranges.notify("failed", ValueError())
    ranges.leave(failing)
    ranges.leave(noting)
    assert [f"Failing.{event} failed" in caplog.text for event in ("begin", "returned", "end", "failed")] == [True] * 4
    assert len(noting.said) == 3
