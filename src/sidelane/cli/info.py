"""Findings of ``sidelane info``: what this machine offers, and what Sidelane uses of it."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import rich.console
import rich.table
import torch
import torch.distributed as dist
import torch.multiprocessing

from sidelane import config as settings
from sidelane.choice.key import key_here
from sidelane.choice.store import in_force
from sidelane.cli.output import STDOUT, write_json
from sidelane.errors import last_line
from sidelane.machine import local
from sidelane.machine.inventory import Accelerators, Inventory
from sidelane.machine.local import commit, installed_version, processor_name, software_versions
from sidelane.machine.peers import SHARED, PeerMemory, between
from sidelane.native import load_replays
from sidelane.native.build import compiler_version
from sidelane.version import VERSION

GIB = 1 << 30
PROBE_TIMEOUT_S, GRACE_S = 120.0, 5.0
PIPED_COLUMNS = 10_000
"""Width in columns of output that is no terminal."""

LINES = "lines"
"""Name of the file with the lines of rank 0."""


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


def show_machine(json: Path | None = None, *, probe: bool = True) -> None:
    """Examine the machine, and print the findings.

    Args:
        json: file for one JSON object, or ``output.STDOUT``; None writes none.
        probe: try the driver on every GPU, with a process each; takes seconds.
    """
    findings = look(probe=probe)
    if json is not None:
        write_json(json, findings.to_dict())
    print_findings(findings, stdout_console(json))


def stdout_console(json: Path | None = None) -> rich.console.Console:
    """Return the console of stdout, silent if ``json`` goes there. Readers of a pipe fold lines as they like."""
    found = rich.console.Console(quiet=json == STDOUT)
    if not found.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        found.width = PIPED_COLUMNS
    return found


def show_versions(json: Path | None = None) -> None:
    """Print the versions that a bug report needs.

    Args:
        json: file for one JSON object, or ``output.STDOUT``; None writes none.
    """
    found = versions()
    if json is not None:
        write_json(json, found)
    shown = stdout_console(json)
    for name, version in found.items():
        shown.print(f"{name + ':':<15}{version or 'none'}", markup=False, highlight=False, soft_wrap=True)


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
    device_type, gpus = local.device_type_and_count()
    if gpus < 2:
        device_type, ranks = "cpu", 4 if local.cores() >= 4 else 2
    else:
        ranks = gpus
    peers = SHARED
    if device_type != "cpu" and machine.accelerators is not None:
        peers = between(machine.accelerators, settings.current().peers)
    driver: tuple[str, ...] = ()
    if probe and machine.accelerators is not None:
        # Alone, a GPU's own stream operations can still be tried; operations on peers are reported as not tried.
        try:
            job = (machine.accelerators.device_type, peers.through_host)
            driver = tuple(from_ranks(_probe, max(1, gpus), *job))
        except (RuntimeError, OSError) as problem:
            driver = (f"trying the driver failed: {last_line(str(problem))}",)
    uses = (*_uses(machine, device_type, ranks, peers), *_choice(device_type, ranks, peers))
    return Findings(machine, software_versions(), driver, uses)


def from_ranks(
    function: Callable[..., list[str]], ranks: int, *args: Any, timeout_s: float = PROBE_TIMEOUT_S
) -> list[str]:
    """Call ``function(store, rank, ranks, *args)`` in a process for each rank, and return the lines of rank 0.

    Args:
        function: function importable from its module; ``store`` is one in which the ranks can meet.
        ranks: number of processes.
        args: further arguments.
        timeout_s: seconds after which the processes are killed.

    Raises:
        RuntimeError: a process raised, died, or did not end in time; the text ends with its error.
    """
    with tempfile.TemporaryDirectory(prefix="sidelane-info-") as folder:
        started: Any = torch.multiprocessing.start_processes(
            _rank_main, (function, ranks, folder, args), ranks, join=False, daemon=True, start_method="spawn"
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not started.join(max(0.0, deadline - time.monotonic()), grace_period=GRACE_S):
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"not finished within {timeout_s:g} s")
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as problem:
            raise RuntimeError(str(problem)) from problem
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        return Path(folder, LINES).read_text(encoding="utf-8").splitlines()


def _rank_main(rank: int, function: Callable[..., list[str]], ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    lines = function(dist.FileStore(os.path.join(folder, "store"), ranks), rank, ranks, *args)
    if rank == 0:
        Path(folder, LINES).write_text("\n".join(lines), encoding="utf-8")


def print_findings(findings: Findings, console: rich.console.Console) -> None:
    """Print the findings on a console."""
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
    lines += [
        ("driver", found.driver),
        (
            "library",
            f"{found.library}, copy engines {'possible' if found.library_uses_copy_engines else 'not possible'}",
        ),
        ("symmetric memory", "yes" if found.symmetric_memory else "no"),
    ]
    return lines + [("note", note) for note in found.notes]


def _uses(machine: Inventory, device_type: str, ranks: int, peers: PeerMemory) -> list[tuple[str, str]]:
    found = machine.accelerators
    if device_type != "cpu" and found is not None:
        engines = " with its kernels and with copy engines" if found.library_uses_copy_engines else ""
        return [
            ("ranks", f"one process a GPU, {ranks} in all"),
            ("between GPUs", str(peers)),
            ("moves", "the GPUs' copy engines, through the driver, or a kernel where that is faster"),
            ("repeated calls", _repeats()),
            ("signals", "stream memory operations where the driver lets them reach a peer, else 4-byte copies"),
            ("reductions", "kernels on as few compute units as it takes: copy engines cannot add"),
            (
                "memory",
                "tensors through staging in host memory"
                if peers.through_host
                else "symmetric tensors directly; ordinary ones through a staging buffer",
            ),
            ("baseline", f"{found.library}{engines}"),
        ]
    reason = "a single GPU has no peers" if found is not None and len(found.gpus) == 1 else "no GPUs here"
    return [
        ("ranks", f"CPU processes ({reason}); studies start {ranks} unless told otherwise"),
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


def _choice(device_type: str, ranks: int, peers: PeerMemory) -> list[tuple[str, str]]:
    """Describe the profile by which ``auto`` chooses, and why other ones are not used."""
    try:
        by = in_force(settings.current().profile, key_here(device_type, ranks), peers)
    except ValueError as problem:
        return [("choice", f"communicators will fail: {problem}")]
    return [("choice", f"auto uses {by.where}"), *(("note", note) for note in by.notes)]


def _block(title: str, lines: Sequence[tuple[str, ...]]) -> rich.table.Table:
    table = rich.table.Table(title=f"\n{title}", title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for line in lines:
        table.add_row(*line)
    return table


def _probe(store: dist.Store, rank: int, gpus: int, device_type: str, through_host: bool) -> list[str]:
    """Try the driver features that the executor of this device relies on, on every rank."""
    from sidelane.execute.cuda import probe
    from sidelane.execute.vendor import make_driver
    from sidelane.memory.exchange import Exchange
    from sidelane.memory.pinned import PinnedMemory
    from sidelane.memory.torch_symm import TorchSymmetricMemory

    # Without this, Gloo resolves its own address by the name service, and both listen to other machines.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    device = torch.device(device_type, rank)
    torch.get_device_module(device_type).set_device(rank)
    backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    timeout = timedelta(seconds=PROBE_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=gpus, timeout=timeout, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    exchange = Exchange(group, settings.current().timeout_s)
    memory = PinnedMemory(exchange, device) if through_host else TorchSymmetricMemory(exchange, device)
    features = probe(exchange, device, memory, make_driver)
    memory.close()
    dist.destroy_process_group()
    return features.lines()
