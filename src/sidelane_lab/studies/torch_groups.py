"""Groups and memory of a plain program, which is the same for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sidelane.integrations.ledger import SIDELANE
from sidelane.integrations.ledger import report as report_of_groups
from sidelane.integrations.process_group import SidelaneGroup
from sidelane.integrations.registration import register
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane.session.pools import pool
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.launch import Rank

PIECE_BYTES = 20 << 20
"""Bytes that torch takes at most beyond what a tensor in a pool wants."""


def library_of(device_type: str) -> str:
    """Return the backend that torch takes on such devices."""
    return "gloo" if device_type == "cpu" else "nccl"


@dataclasses.dataclass(frozen=True, slots=True)
class GroupTensors:
    """Tensors of one program. An all-reduce has one, which is both."""

    output: torch.Tensor
    input: torch.Tensor

    @classmethod
    def of(cls, output_bytes: int, input_bytes: int, device: torch.device) -> GroupTensors:
        """New ones, of bytes."""
        return cls(*(torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in (output_bytes, input_bytes)))

    def cut_for(self, case: Case) -> GroupTensors:
        """Return as much of them as a case has."""
        output, input = self.output[: case.output_bytes].view(case.dtype), self.input[: case.input_bytes]
        return GroupTensors(output, output if case.kind is Kind.ALL_REDUCE else input.view(case.dtype))


@dataclasses.dataclass(frozen=True)
class GroupWay:
    """A group, and a kind of memory.

    Attributes:
        implementation: whose group.
        group: that the program has.
        pooled: an output and an input to take tensors from; None for tensors of torch's own.
    """

    implementation: str
    group: dist.ProcessGroup
    pooled: GroupTensors | None = None

    @property
    def name(self) -> str:
        return f"{self.implementation}, {'ordinary' if self.pooled is None else 'pooled'} tensors"

    def buffers(self, case: Case) -> GroupTensors:
        """Tensors for a case."""
        made = self.pooled or GroupTensors.of(case.output_bytes, case.input_bytes, case.device)
        return made.cut_for(case)

    def made_by(self, operation: str) -> tuple[str, str]:
        """Return what made the last call, of an operation or of a form of it, and Sidelane's variant."""
        last = report_of_groups().last
        if self.implementation != SIDELANE:
            return self.implementation, ""
        if last is None or last.operation.removesuffix("_coalesced") not in (operation, LISTS.get(operation)):
            raise RuntimeError(f"the report has {None if last is None else last.operation} for the last {operation}")
        return last.where, last.why.partition(":")[0] if last.where == SIDELANE else ""


LISTS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
"""Calls of ``torch.distributed`` of which one side is a list of tensors, by those of one tensor."""


def plain_call(
    operation: str, group: dist.ProcessGroup, buffers: GroupTensors, launch: str = "eager"
) -> Callable[[], Any]:
    """Return a call of a program that knows nothing of Sidelane, which waits for its end.

    Args:
        operation: name in ``torch.distributed``.
        group: the group.
        buffers: tensors.
        launch: see ``GroupRow``; a functional call returns its output.
    """
    output, input, n, name = buffers.output, buffers.input, group.size(), group.group_name
    is_sum, function = operation == "all_reduce", getattr(dist, operation)
    arguments: Any = (output,) if is_sum else (output, input)
    ops, sizes = torch.ops._c10d_functional, [len(input) // n] * n
    more = {"all_gather_into_tensor": (n,), "reduce_scatter_tensor": ("sum", n), "all_to_all_single": (sizes, sizes)}
    if launch == "list":
        function = getattr(dist, LISTS[operation])
        arguments = [list(one.chunk(n)) if (one is output) == ("gather" in operation) else one for one in arguments]

    def coalesced() -> None:
        start = output.device if output.is_cuda else None  # Gloo has none
        with dist._coalescing_manager(group=group, device=start, async_ops=True) as manager:
            for parts in zip(*(one.chunk(2 if is_sum else 1) for one in arguments), strict=True):
                function(*parts, group=group)
        manager.wait()

    return {
        "async": lambda: function(*arguments, group=group, async_op=True).wait(),
        "future": lambda: function(*arguments, group=group, async_op=True).get_future().wait(),
        "functional": lambda: ops.wait_tensor(getattr(ops, operation)(input, *more.get(operation, ("sum",)), name)),
        "coalesced": coalesced,
    }.get(launch, lambda: function(*arguments, group=group))


def make_group(backend: str, device: torch.device) -> dist.ProcessGroup:
    """Make a group of all ranks for tensors of a device. Collective."""
    if backend == SIDELANE:
        register()
        if device.type == "cpu" and torch.cuda.is_available():  # it would leave tensors of CPUs to Gloo
            backend = "cpu:sidelane,cuda:sidelane"
    made = dist.new_group(backend=backend)
    assert isinstance(made, dist.ProcessGroup)
    return made


class StudyGroups:
    """The groups of a study, each made when it is wanted first. Collective.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._made: dict[str, dist.ProcessGroup] = {}
        self._refused: dict[tuple[str, bool], Exception] = {}
        self._room, self._pooled = (0, 0), list[GroupTensors]()

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        """Say how large pooled tensors are at most: they are made once."""
        self._room = output_bytes, input_bytes

    def way(self, implementation: str, *, pooled: bool) -> GroupWay:
        """Return a group with a kind of memory. What could not be made, as a pool without room, is not tried again."""
        key = implementation, pooled
        if key in self._refused:
            raise self._refused[key]
        try:
            if implementation not in self._made:
                self._made[implementation] = made = self.make(implementation)
                if implementation == SIDELANE:
                    self.communicator_of(made)
            return GroupWay(implementation, self._made[implementation], self._in_pool() if pooled else None)
        except Exception as problem:
            self._refused[key] = problem
            raise

    def make(self, implementation: str) -> dist.ProcessGroup:
        """A new group of all ranks."""
        return make_group(implementation, self._rank.device)

    def communicator_of(self, group: dist.ProcessGroup) -> Communicator:
        """Return what makes the calls of one of Sidelane's groups. Collective where it is new."""
        assert isinstance(group, SidelaneGroup)
        return group.communicator(self._rank.device)

    def close(self) -> None:
        """Destroy them."""
        self._pooled.clear()
        for group in self._made.values():
            dist.destroy_process_group(group)
        self._made.clear()

    def _in_pool(self) -> GroupTensors:
        if not self._pooled:
            room = sum(nbytes + PIECE_BYTES for nbytes in self._room)
            with pool(self.communicator_of(self._made[SIDELANE]), room):
                self._pooled.append(GroupTensors.of(*self._room, self._rank.device))
        return self._pooled[0]
