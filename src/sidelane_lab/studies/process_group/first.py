"""What the first use costs: a group with its first calls, and a model whose FSDP2 is Sidelane's with its first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sidelane.cli.launch import Rank
from sidelane.collectives.allocator import MemoryUse
from sidelane.integrations import fsdp
from sidelane.integrations.ledger import SIDELANE
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.fsdp.cases import parse_case
from sidelane_lab.studies.fsdp.step import Stepper
from sidelane_lab.studies.process_group.rows import EAGER, FIRST, FIRST_CALLS, FIRST_STEP, ORDINARY, GroupRow
from sidelane_lab.studies.process_group.ways import KINDS, Buffers, Groups, library_of, plain_call

STEP, STEP_LAYERS = "8b:1x1024", 2
"""The model of the first step: few layers, since what is first comes once for each size."""


def first_uses(rank: Rank, meter: Meter, groups: Groups, cases: Sequence[Case], seed: int) -> list[GroupRow]:
    """Rows of first uses, the library's first. Collective; before anything else of the study.

    The library is warm: a group of its own, and a step of the same model, come ahead and are not counted.
    """
    library = library_of(rank.device.type)
    rows = []
    with meter.on_stream():
        _first_calls(rank, meter, groups, library, cases)
        for name in (library, SIDELANE):
            rows.append(_first_calls(rank, meter, groups, name, cases))
        _first_step(rank, meter, library, seed)
        for name in (library, SIDELANE):
            rows.append(_first_step(rank, meter, name, seed))
    return rows


def _first_calls(rank: Rank, meter: Meter, groups: Groups, name: str, cases: Sequence[Case]) -> GroupRow:
    made: list[dist.ProcessGroup] = []
    tensors = [Buffers.of(case.output_bytes, case.input_bytes, case.device).cut_for(case) for case in cases]

    def use() -> None:
        made.append(groups.make(name))
        for case, buffers in zip(cases, tensors, strict=True):
            operation = next(one for one, kind in KINDS.items() if kind is case.kind)
            plain_call(operation, made[0], buffers, EAGER)()

    took_us = _slowest(rank, meter, f"first calls of {name}", use)
    held = groups.communicator_of(made[0]).memory() if name == SIDELANE else None
    dist.destroy_process_group(made[0])
    return _row(FIRST_CALLS, str(cases[0].dtype).removeprefix("torch."), name, took_us, held)


def _first_step(rank: Rank, meter: Meter, name: str, seed: int) -> GroupRow:
    case = parse_case(STEP, STEP_LAYERS)
    stepper = Stepper(
        case.small() if rank.device.type == "cpu" else case, rank, meter, torch.bfloat16, optimizer=False, seed=seed
    )
    enabled: list[fsdp.EnabledFsdp] = []

    def use() -> None:
        if name == SIDELANE:
            enabled.append(fsdp.enable(stepper.model))
        stepper.step()

    took_us = _slowest(rank, meter, f"first step of {name}", use)
    held = enabled[0].memory() if enabled else None
    stepper.forget()
    for one in enabled:
        one.disable()
    return _row(FIRST_STEP, "bfloat16", name, took_us, held)


def _slowest(rank: Rank, meter: Meter, what: str, use: Callable[[], None]) -> float:
    """Microseconds of the slowest rank, from idle devices to idle devices."""
    meter.finish(what)
    meter.agree(None)
    began = time.perf_counter()
    use()
    meter.finish(what)
    return max(one for (one,) in meter.of_all_ranks([(time.perf_counter() - began) * 1e6]))


def _row(operation: str, dtype: str, name: str, took_us: float, held: MemoryUse | None) -> GroupRow:
    return GroupRow(
        operation=operation,
        bytes=None,
        dtype=dtype,
        implementation=name,
        tensors=ORDINARY,
        launch=FIRST,
        time_us=took_us,
        p10_us=None,
        p90_us=None,
        host_us=None,
        made_by=name,
        variant="",
        held_mb=None if held is None else (held.reserved + held.own) / 1e6,
        correct=None,
    )
