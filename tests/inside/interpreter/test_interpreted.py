"""What is changed about Triton's interpreter, whose functions differ between versions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from triton.runtime import interpreter

from sidelane.device import triton_interpreter


@pytest.mark.parametrize("between", [("cached",), ("cached", "evicted")], ids=["triton 3.9", "triton 3.6"])
@pytest.mark.parametrize("is_volatile", [False, True])
def test_only_volatile_loads_sleep(
    between: tuple[str, ...], is_volatile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(triton_interpreter.time, "sleep", slept.append)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", lambda self, *arguments: arguments)
    builder = interpreter.InterpreterBuilder()
    arguments = "ptrs", "mask", None, *between, is_volatile
    with triton_interpreter.polls_that_sleep(0.25):
        assert builder.create_masked_load(*arguments) == arguments
    assert slept == [0.25] * is_volatile


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_number_is_the_only_element_of_its_tensor(shape: tuple[int, ...]) -> None:
    tensor = SimpleNamespace(handle=SimpleNamespace(data=np.full(shape, 7, np.int32)))
    assert triton_interpreter._only_value(tensor) == 7
