"""Parts of a communicator: the caller's group and device, the backend, and the measured times to choose by."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import config as settings
from sidelane.choice.store import InForce, builtin_digest, choice_of_rank
from sidelane.collectives.backend import Backend
from sidelane.config import CHOSEN, DEFAULT_TIMEOUT_S, Config
from sidelane.errors import Page, see
from sidelane.machine.peers import SHARED, PeerMemory
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange, ranks_of
from sidelane.program.collective import MAX_NODE_RANKS


def resolve_arguments(
    group: dist.ProcessGroup | None, device: torch.device | str | int | None, config: Config | None
) -> tuple[dist.ProcessGroup, str, torch.device, Config]:
    """Return group, device and settings in use, and a name for observers of calls, the same on all ranks.

    Raises:
        Exception: as the making of a :class:`sidelane.Communicator`; errors of device and settings are told to the
            peers.
    """
    chosen = group_for("Communicator", group)
    if chosen.size() > MAX_NODE_RANKS:
        raise ValueError(
            f"Communicator: ranks of the group (value={chosen.size()}, allowed=1..{MAX_NODE_RANKS}); a process "
            "group of the backend 'sidelane' may have more, and hands their calls to NCCL or Gloo"
        )
    ranks = ranks_of(chosen)
    # Numbered before anything can fail on one rank, so that a failed attempt counts on all of them.
    named, number = chosen.group_name, next(_numbers[chosen.group_name, ranks])
    whose = "" if chosen is dist.group.WORLD else f"group {named}, "
    try:
        found = choose_device(device)
        settings.start_observers()
        used = settings.current() if config is None else config
        if not isinstance(used, Config):
            raise TypeError(f"Communicator: config (value={config!r}, allowed=a sidelane.Config, None)")
    except Exception as error:
        Exchange(chosen, DEFAULT_TIMEOUT_S).refuse(error)
        raise
    return chosen, f"communicator {number} of {whose}ranks {list(ranks)}", found, used


_numbers: dict[tuple[str, tuple[int, ...]], Iterator[int]] = collections.defaultdict(itertools.count)


def choose_device(device: torch.device | str | int | None) -> torch.device:
    """Return the caller's device with its index; for None, the current GPU or else the CPU.

    Raises:
        ValueError: there is no executor for this device type, or this machine has no such device.
    """
    try:
        chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):  # names that torch does not know
        raise ValueError(f"Communicator: device (value={device!r}, allowed=cpu, cuda, cuda:N)") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cpu, cuda)")
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        why = "finds no GPU" if torch.version.cuda or torch.version.hip else "was built without CUDA and ROCm"
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cpu): this torch {why}")
    if chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if chosen.index >= torch.cuda.device_count():
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cuda:0..{torch.cuda.device_count() - 1}, cpu)")
    return chosen


def make_backend(
    exchange: Exchange,
    device: torch.device,
    control: ControlBlock,
    timeout_s: float,
    *,
    like: Backend | None = None,
    peers: str = CHOSEN,
    memory_bytes: int | None = None,
) -> Backend:
    """Make memory and executor for ``device``. Collective.

    Args:
        exchange: connection of the ranks.
        device: device of this rank.
        control: control block in which the ranks post their calls.
        timeout_s: time-out of calls in seconds.
        like: backend of the same ranks and device, whose probed features are taken over.
        peers: see ``Config.peers``.
        memory_bytes: see ``Config.memory_bytes``.
    """
    if device.type == "cpu":
        from sidelane.collectives.backend_cpu import CpuBackend

        return CpuBackend(exchange, control, timeout_s)
    from sidelane.collectives.backend_cuda import CudaBackend

    assert like is None or isinstance(like, CudaBackend)
    if torch.version.hip is not None:
        from sidelane.collectives.backend_hip import HipBackend

        return HipBackend(exchange, device, control, timeout_s, like=like, peers=peers, memory_bytes=memory_bytes)
    return CudaBackend(exchange, device, control, timeout_s, like=like, peers=peers, memory_bytes=memory_bytes)


def agree_on_profile(exchange: Exchange, device_type: str, setting: str | None, peers: PeerMemory = SHARED) -> InForce:
    """Return the profile of rank 0 on every rank. Collective: one exchange of its text, or of what it is read from.

    Args:
        exchange: connection of the ranks.
        device_type: device type of the ranks' tensors.
        setting: ``Config.profile``; that of rank 0 counts.
        peers: memory between the ranks' devices. If it is host memory, no table of this package is for them.

    Raises:
        ValueError: on every rank, if the setting of rank 0 names a file that is missing or is not a profile, or if the
            ranks' packages have different tables.
        PeerError, PeerTimeoutError: a rank did not take part.
    """

    def own() -> tuple[str, str, str]:
        if exchange.rank:
            return "", "", builtin_digest()
        try:
            return choice_of_rank(setting, device_type, exchange.world_size, peers), "", builtin_digest()
        except ValueError as error:
            return "", str(error), builtin_digest()

    (text, problem, _), *_ = found = exchange("the profile to choose by", own)
    if len({digest for _, _, digest in found}) > 1:
        problem = problem or "packages of the ranks with different tables of times; install one package on all ranks"
    if problem:
        raise ValueError(f"Communicator: {problem}")
    return InForce.from_text(text)


def group_for(what: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the caller's group, or the default one for None.

    Args:
        what: name of the caller's function, for errors.
        group: the caller's argument.

    Raises:
        TypeError: it is no group.
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # from dist.new_group
    if group is not None and group != outside and not isinstance(group, dist.ProcessGroup):
        hint = ""
        if isinstance(group, str):
            hint = ": names of backends go to torch.distributed.init_process_group"
        elif callable(getattr(group, "get_group", None)):
            hint = ": a mesh has one for each dimension, mesh.get_group(0)"
        text = f"{what}: group (value={group!r}, allowed=a torch.distributed.ProcessGroup, None)"
        raise see(TypeError(text + hint), Page.ERRORS)
    if group is None and not dist.is_initialized():
        text = f"{what}: torch.distributed is not initialised (call torch.distributed.init_process_group first)"
        raise see(RuntimeError(text), Page.ERRORS)
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    if chosen == outside:
        raise see(ValueError(f"{what}: this process is not in the group"), Page.ERRORS)
    if chosen not in c10d._world.pg_map:
        text = f"{what}: the group was destroyed, or was not made by torch.distributed"
        raise see(ValueError(text), Page.ERRORS)
    return chosen
