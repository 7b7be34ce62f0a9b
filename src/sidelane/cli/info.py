"""Findings of ``sidelane info``: what this machine offers, and what Sidelane uses of it."""

from __future__ import annotations

import dataclasses
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table
import torch.distributed as dist

from sidelane import config as settings
from sidelane.choice.key import key_here
from sidelane.choice.store import in_force
from sidelane.cli.launch import LaunchTarget, Rank, choose_target, run_ranks
from sidelane.cli.output import write_json
from sidelane.cli.provenance import commit, installed_version, processor_name, software_versions
from sidelane.cli.terminal import tables_console
from sidelane.errors import SidelaneError, last_line
from sidelane.machine import local
from sidelane.machine.inventory import Accelerators, Inventory
from sidelane.native import load_replays
from sidelane.native.build import compiler_version
from sidelane.version import VERSION

GIB = 1 << 30
PROBE_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """Findings that ``sidelane info`` shows.

    Attributes:
        machine: inventory of the machine.
        software: versions, by name.
        driver: results of trying the driver, one line each; empty if it was not tried.
        uses: choices of Sidelane on this machine: (part, choice) in words.
    """

    machine: Inventory
    software: dict[str, str]
    driver: tuple[str, ...]
    uses: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as one JSON object."""
        return {**dataclasses.asdict(self), "uses": dict(self.uses)}


def main(json: Path | None = None, *, probe: bool = True) -> None:
    """Examine the machine, and print the findings.

    Args:
        json: file for one JSON object, or ``output.STDOUT``; None writes none.
        probe: try the driver on every GPU, with a process each; takes seconds.
    """
    findings = look(probe=probe)
    if json is not None:
        write_json(json, findings.to_dict())
    show(findings, tables_console(json))


def show_versions(json: Path | None = None) -> None:
    """Print the versions that a bug report needs.

    Args:
        json: file for one JSON object, or ``output.STDOUT``; None writes none.
    """
    found = versions()
    if json is not None:
        write_json(json, found)
    console = tables_console(json)
    for name, version in found.items():
        console.print(f"{name + ':':<15}{version or 'none'}", markup=False, highlight=False, soft_wrap=True)


def versions() -> dict[str, str | None]:
    """Return the versions of all that Sidelane stands on, by name; None for what is missing."""
    counted = Counter(local.device_names())
    return {
        "sidelane": VERSION,
        "commit": commit(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        **{name: installed_version(name) for name in ("torch", "triton", "cuda-bindings", "nvidia-ml-py", "numpy")},
        **local.reported_versions(),
        "gpus": ", ".join(f"{count} x {name}" for name, count in counted.items()) or None,
        "processor": processor_name(),
        "os": _system(),
        "compiler": compiler_version(),
    }


def _system() -> str:
    """Return the names of the distribution and of the kernel."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = ""
    return ", ".join(filter(None, (name, platform.platform())))


def look(*, probe: bool) -> Findings:
    """Find everything that :class:`Findings` holds."""
    machine = local.inspect()
    place = choose_target()
    driver: tuple[str, ...] = ()
    if probe and machine.accelerators is not None:
        # Alone, a GPU's own stream operations can still be tried; operations on peers are reported as not tried.
        try:
            lines = run_ranks(
                _probe,
                1 if place.on_cpu else place.world_size,
                device_type=machine.accelerators.device_type,
                timeout_s=PROBE_TIMEOUT_S,
            )
            driver = tuple(lines or ())
        except SidelaneError as problem:
            driver = (f"trying the driver failed: {last_line(str(problem))}",)
    uses = (*_uses(machine, place.on_cpu, place.world_size), *_choice(place))
    return Findings(machine, software_versions(), driver, uses)


def show(findings: Findings, console: rich.console.Console) -> None:
    """Print the findings on a terminal."""
    machine = findings.machine
    lines = [
        ("processor", f"{machine.processor}, {machine.cores} cores"),
        ("memory", f"{machine.memory_bytes / GIB:.0f} GiB; {machine.shared_memory_bytes / GIB:.0f} GiB can be shared"),
        ("software", ", ".join(f"{name} {version}" for name, version in findings.software.items())),
    ]
    if machine.accelerators is None:
        lines.append(("GPUs", "none that Sidelane drives"))
    else:
        lines += _accelerator_lines(machine.accelerators)
    console.print(_block("This machine", lines))
    if findings.driver:
        console.print(_block("Its driver, tried", [tuple(line.partition(": ")[::2]) for line in findings.driver]))
    console.print(_block("Sidelane uses", findings.uses))


def _accelerator_lines(found: Accelerators) -> list[tuple[str, str]]:
    lines = []
    for gpu in found.gpus:
        parts = [gpu.name, f"{gpu.memory_bytes / GIB:.0f} GiB", f"{gpu.compute_units} compute units"]
        if gpu.copy_engines is not None:
            parts.append(f"{gpu.copy_engines} copy engines")
        if gpu.links is not None:
            switch = {True: " to a switch", False: " to peers", None: ""}[gpu.through_switch]
            parts.append(f"{gpu.links} links{switch}")
        if gpu.power_cap_w is not None:
            parts.append(f"{gpu.power_cap_w:.0f} W at most")
        lines.append((f"GPU {gpu.index}", ", ".join(parts)))
    without = [f"{i}->{j}" for i, row in enumerate(found.peer_access) for j, reaches in enumerate(row) if not reaches]
    if len(found.gpus) > 1:
        lines.append(("peer access", f"missing for {', '.join(without)}" if without else "between all pairs"))
    if found.pair_links is not None:
        pairs = [f"{i}-{j}: {n}" for i, row in enumerate(found.pair_links) for j, n in enumerate(row) if i < j]
        lines.append(("links of pairs", ", ".join(pairs)))
    lines += [
        ("driver", found.driver),
        (
            "library",
            f"{found.library}, copy engines {'possible' if found.library_uses_copy_engines else 'not possible'}",
        ),
        ("symmetric memory", "yes" if found.symmetric_memory else "no"),
    ]
    return lines + [("note", note) for note in found.notes]


def _uses(machine: Inventory, on_cpu: bool, world_size: int) -> list[tuple[str, str]]:
    found = machine.accelerators
    if not on_cpu and found is not None:
        engines = " with its kernels and with copy engines" if found.library_uses_copy_engines else ""
        return [
            ("ranks", f"one process a GPU, {world_size} in all"),
            ("moves", "the GPUs' copy engines, through the driver, or a kernel where that is faster"),
            ("repeated calls", _repeats()),
            ("signals", "stream memory operations where the driver lets them reach a peer, else 4-byte copies"),
            ("reductions", "kernels on as few compute units as it takes: copy engines cannot add"),
            ("memory", "symmetric tensors directly; ordinary ones through a staging buffer"),
            ("baseline", f"{found.library}{engines}"),
        ]
    reason = "a single GPU has no peers" if found is not None and len(found.gpus) == 1 else "no GPUs here"
    return [
        ("ranks", f"CPU processes ({reason}); studies start {world_size} unless told otherwise"),
        ("moves", "a thread for each engine, real bytes through shared memory"),
        ("signals", "words in shared memory"),
        ("reductions", "torch on the CPU"),
        ("baseline", "Gloo"),
    ]


def _repeats() -> str:
    """Describe how the host repeats calls."""
    if not settings.current().native:
        return "in Python (SIDELANE_NATIVE=0)"
    found = load_replays()
    return f"in C ({found.words})" if found.module is not None else f"in Python, slower: {found.words}"


def _choice(place: LaunchTarget) -> list[tuple[str, str]]:
    """Describe the profile by which ``auto`` chooses, and why other ones are not used."""
    try:
        by = in_force(settings.current().profile, key_here(place.device_type, place.world_size))
    except ValueError as problem:
        return [("choice", f"communicators will fail: {problem}")]
    return [("choice", f"auto goes by {by.where}"), *(("note", note) for note in by.notes)]


def _block(title: str, lines: Sequence[tuple[str, ...]]) -> rich.table.Table:
    table = rich.table.Table(title=f"\n{title}", title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for line in lines:
        table.add_row(*line)
    return table


def _probe(rank: Rank) -> list[str]:
    """Try the driver features that the executor of this device relies on, on every rank."""
    from sidelane.execute.cuda import probe
    from sidelane.execute.vendor import make_driver
    from sidelane.memory.exchange import Exchange
    from sidelane.memory.torch_symm import TorchSymmetricMemory

    group = dist.group.WORLD
    assert group is not None
    exchange = Exchange(group, settings.current().timeout_s)
    memory = TorchSymmetricMemory(exchange, rank.device)
    features = probe(exchange, rank.device, memory, make_driver)
    memory.close()
    return features.lines()
