"""A device on which nothing runs: it writes down what is queued on which stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


class FakeDevice:
    """Records what is queued on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self
        self.log: list[str] = []
        self.current = "caller"
        self.events = 0
        self.started = False

        class Stream:
            def __init__(self, name: str = "caller") -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                device.log.append(f"{self.name}: wait {event.name}")

            def synchronize(self) -> None:
                pass

            def wait_stream(self, other: Any) -> None:
                device.log.append(f"{self.name}: join {other.name}")

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                device.events += 1
                self.name = f"e{device.events}"

            def record(self, stream: Any = None) -> None:
                device.log.append(f"{stream.name if stream else device.current}: record {self.name}")

            def query(self) -> bool:
                return device.started

            def elapsed_time(self, other: Any) -> float:
                return 2.0

        @contextlib.contextmanager
        def use(stream: Any) -> Iterator[None]:
            before, device.current = device.current, stream.name if stream else device.current
            yield
            device.current = before

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "stream", use)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(device.current))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: device.queue(f"spin {cycles}")())
        self.stream = Stream

    def queue(self, what: str) -> Callable[[], Any]:
        def run() -> Any:
            self.log.append(f"{self.current}: {what}")
            return lambda: None

        return run
