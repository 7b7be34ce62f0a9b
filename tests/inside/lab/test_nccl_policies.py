"""NCCL's collectives with a CTA policy for each call: what is handed to the library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane_lab.baselines import nccl_policies
from sidelane_lab.baselines.nccl_policies import POLICIES, call_with_policy, policies_of

COMMUNICATOR, STREAM = 0x7000, 0x9000
RANKS = 2


class Library:
    """Takes the arguments of a call for itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], int, int, int]] = []
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            *plain, config = arguments
            given = config._obj
            values = [one.value if isinstance(one, ctypes._SimpleCData) else one for one in plain]
            self.calls.append((name, values, given.size, given.version, given.cta_policy))
            return self.status

        return function


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(nccl_policies, "_library", lambda: made)
    monkeypatch.setattr(nccl_policies, "nccl_version", lambda: (2, 32, 3))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    return made


def group(pointer: int | None = COMMUNICATOR) -> Any:
    backend = SimpleNamespace() if pointer is None else SimpleNamespace(_comm_ptr=lambda: pointer)
    return SimpleNamespace(size=lambda: RANKS, _get_backend=lambda device: backend)


def test_the_structure_is_that_of_the_header() -> None:
    """Offsets of ``ncclCollConfig_v23200`` with C's alignment."""
    config = nccl_policies._Config
    assert ctypes.sizeof(config) == 72
    offsets = (0, 8, 12, 16, 24, 28, 32, 36, 40, 48, 52, 56, 64)
    assert tuple(getattr(config, name).offset for name, _ in config._fields_) == offsets


@pytest.mark.parametrize(
    ("kind", "name", "output", "input", "count", "operation"),
    [
        (Kind.ALL_GATHER, "ncclAllGatherConfig", 16, 8, 8, []),
        (Kind.ALL_TO_ALL, "ncclAlltoAllConfig", 16, 16, 8, []),
        (Kind.REDUCE_SCATTER, "ncclReduceScatterConfig", 8, 16, 8, [0]),
        (Kind.ALL_REDUCE, "ncclAllReduceConfig", 16, 16, 16, [0]),
    ],
)
def test_calls(
    library: Library, kind: Kind, name: str, output: int, input: int, count: int, operation: list[int]
) -> None:
    written, read = torch.empty(output, dtype=torch.bfloat16), torch.empty(input, dtype=torch.bfloat16)
    call_with_policy(kind, written, read, "efficiency", group())()
    expected = [read.data_ptr(), written.data_ptr(), count, 9, *operation, COMMUNICATOR, STREAM]
    assert library.calls == [(name, expected, 72, 23203, POLICIES["efficiency"])]


def test_errors_of_the_library_are_raised(library: Library) -> None:
    library.status = 5
    data = torch.empty(4)
    with pytest.raises(RuntimeError, match="ncclAllGatherConfig: zero: NCCL's error 5"):
        call_with_policy(Kind.ALL_GATHER, data, data, "zero", group())()


@pytest.mark.parametrize("pointer", [None, 0])
def test_without_a_communicator(library: Library, pointer: int | None) -> None:
    data = torch.empty(4)
    with pytest.raises(UnavailableError, match="address of NCCL's communicator"):
        call_with_policy(Kind.ALL_GATHER, data, data, "zero", group(pointer))


def test_which_policies_there_are() -> None:
    newest = {kind: policies_of(kind, (2, 32, 3)) for kind in Kind}
    assert newest[Kind.ALL_GATHER] == newest[Kind.ALL_TO_ALL] == ("efficiency", "zero")
    assert newest[Kind.ALL_REDUCE] == newest[Kind.REDUCE_SCATTER] == ("efficiency",)
    assert newest[Kind.BROADCAST] == policies_of(Kind.ALL_GATHER, (2, 31, 2)) == ()
