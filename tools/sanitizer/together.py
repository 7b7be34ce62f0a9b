"""The kernels of all ranks as one launch, for tools that let kernels run one after the other only.

Rank r is row r of a grid of (blocks, ranks); the arguments of all ranks lie in a table. The kernel's own source runs,
inlined into one that reads its arguments from there: what differs from separate launches is where they come from.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from sidelane.device.launch import Launch

_SOURCE = """\
import triton
import triton.language as tl
from {module} import {inner}

@triton.jit
def {name}(table, {parameters}):
    rank = tl.program_id(1)
    row = (table + rank.to(tl.int64) * {row_bytes}).to(tl.pointer_type(tl.int64))
{branches}
"""


def join(launches: Sequence[Launch], folder: Path) -> tuple[Launch, npt.NDArray[np.int64]]:
    """One launch of as many blocks as each of ``launches`` has, and the table whose address is its only argument.

    Args:
        launches: of the ranks: one kernel, and as many blocks and warps everywhere. Constants may differ.
        folder: for the source, which Triton reads from a file.
    """
    first = launches[0]
    assert all((it.kernel, it.blocks, it.warps) == (first.kernel, first.blocks, first.warps) for it in launches)
    groups: list[dict[str, Any]] = []
    for launch in launches:
        if launch.constants not in groups:
            groups.append(launch.constants)
    ranks = [[rank for rank, it in enumerate(launches) if it.constants == constants] for constants in groups]
    kernel = _wrapper(first, ranks, folder)
    constants = {f"{name}_{index}": value for index, group in enumerate(groups) for name, value in group.items()}
    table = np.array([launch.arguments for launch in launches], np.int64)
    return Launch(kernel, first.blocks, first.warps, (), constants), table


def _wrapper(launch: Launch, groups: list[list[int]], folder: Path) -> Any:
    inner = launch.kernel.__name__
    names = [parameter.name for parameter in launch.kernel.params if parameter.is_constexpr]
    arguments = [f"tl.load(row + {index})" for index in range(len(launch.arguments))]
    branches = []
    for index, ranks in enumerate(groups):
        condition = " | ".join(f"(rank == {rank})" for rank in ranks) if len(groups) > 1 else "True"
        given = ", ".join([*arguments, *(f"{name}={name}_{index}" for name in names)])
        call = f"{inner}({given})"
        branches.append(f"    if {condition}:\n        {call}" if len(groups) > 1 else f"    {call}")
    split = "_".join("".join(map(str, ranks)) for ranks in groups)
    name = f"together_{inner}_{len(launch.arguments)}_{split}"
    source = _SOURCE.format(
        module=launch.kernel.__module__,
        inner=inner,
        name=name,
        parameters=", ".join(f"{each}_{index}: tl.constexpr" for index in range(len(groups)) for each in names),
        row_bytes=8 * len(launch.arguments),
        branches="\n".join(branches),
    )
    return getattr(_module(name, source, folder), name)


def _module(name: str, source: str, folder: Path) -> ModuleType:
    loaded = sys.modules.get(name)
    if loaded is None:
        file = folder / f"{name}.py"
        # Several processes may be at it: whoever comes last replaces the file by the same one.
        scratch = folder / f"{name}.{id(source)}.tmp"
        scratch.write_text(source, encoding="utf-8")
        scratch.replace(file)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded
