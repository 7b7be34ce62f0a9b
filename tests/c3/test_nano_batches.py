"""Parts of a batch in turn, with collectives that are made up: what is started and waited for, and when."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from sidelane import begin_collective, nano_batches


class Recorder:
    """Starts collectives that double a tensor, and keeps a list of what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, name: str) -> Any:
        def begin(tensor: torch.Tensor) -> tuple[torch.Tensor, MadeUpWork]:
            self.events.append(f"start {name}")
            return 2 * tensor, MadeUpWork(self, name)

        return begin


class MadeUpWork:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait(self) -> bool:
        self.recorder.events.append(f"wait {self.name}")
        return True


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recorder: Recorder, name: str) -> torch.Tensor:
        ctx.note = recorder, name
        recorder.events.append(f"compute {name}")
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        recorder, name = ctx.note
        recorder.events.append(f"compute {name}")
        return gradient.clone(), None, None


def forward(x: torch.Tensor, name: str, recorder: Recorder) -> Generator[Any, Any, torch.Tensor]:
    for layer in range(2):
        x = Layer.apply(x, recorder, f"{name}{layer}")
        x = yield begin_collective(recorder.start(f"{name}{layer}"), x)
    return x


def test_one_part_is_computed_while_the_collective_of_the_other_runs_forward_and_backward():
    recorder, x = Recorder(), torch.ones(3, requires_grad=True)
    a, b = nano_batches(forward(x, name, recorder) for name in "ab")
    assert a.tolist() == b.tolist() == [10.0] * 3 and recorder.events == [
        *("compute a0", "start a0", "compute b0", "start b0"),
        *("wait a0", "compute a1", "start a1", "wait b0", "compute b1", "start b1", "wait a1", "wait b1"),
    ]
    recorder.events.clear()
    (a + b).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [8.0] * 3
    assert recorder.events == [
        *("start b1", "start a1", "wait b1", "compute b1", "start b0", "wait a1", "compute a1", "start a0"),
        *("wait b0", "compute b0", "wait a0", "compute a0"),
    ]


def test_parts_of_different_lengths_and_plain_works() -> None:
    recorder = Recorder()

    def part(steps: int) -> Generator[Any, Any, int]:
        for step in range(steps):
            waited = yield MadeUpWork(recorder, f"{steps}.{step}")
            assert waited is True
        assert (yield None) is None
        return steps

    assert nano_batches(part(steps) for steps in (2, 0, 3)) == [2, 0, 3]
    assert recorder.events == [f"wait {name}" for name in ("2.0", "3.0", "2.1", "3.1", "3.2")]


def test_when_a_part_fails_the_others_collectives_are_waited_for() -> None:
    recorder, closed = Recorder(), []

    def runs() -> Generator[Any, Any, None]:
        try:
            yield MadeUpWork(recorder, "other")
        finally:
            closed.append(True)
            raise LookupError("while it is closed")

    def fails() -> Generator[Any, Any, None]:
        yield from ()
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError, match="no"):
        nano_batches([runs(), runs(), fails()])
    assert recorder.events == ["wait other"] * 2 and closed == [True] * 2


def test_what_is_refused() -> None:
    for parts in ([], [torch.ones(1)]):
        with pytest.raises(ValueError, match="one generator or more"):
            nano_batches(parts)  # type: ignore[arg-type]
    begun = begin_collective(Recorder().start("once"), torch.ones(1))
    assert begun.wait().tolist() == [2.0]
    with pytest.raises(RuntimeError, match="waited for already"):
        begun.wait()


def test_the_gradient_of_a_collective_may_be_another_collective() -> None:
    x = torch.ones(2, requires_grad=True)
    output = begin_collective(lambda tensor: (3 * tensor, None), x, lambda tensor: (7 * tensor, None)).wait()
    output.sum().backward()
    assert output.tolist() == [3.0, 3.0] and x.grad is not None and x.grad.tolist() == [7.0, 7.0]
