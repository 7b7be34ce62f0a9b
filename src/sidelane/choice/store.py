"""Places of profiles: the user's files for this machine, a file that the settings name, or a table of this package."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.resources
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sidelane.choice.fused import FusedTime
from sidelane.choice.key import CPU, HOST_MEMORY, MachineKey, key_here, quick_key
from sidelane.choice.profile import Profile, parse
from sidelane.config import BUILTIN, profile_folder
from sidelane.errors import Page, see
from sidelane.log import UnfailingLogger
from sidelane.machine.peers import SHARED, PeerMemory
from sidelane.user_files import bytes_of

logger = UnfailingLogger(logging.getLogger(__name__))

FUSED_FILE = "fused-{}.json"
"""Name of the user's file with times of fused operators, which ``sidelane fused --keep`` writes."""

NO_HOME = "this user has no home"
"""Reason why there is no place for a user's files."""


@dataclasses.dataclass(frozen=True)
class InForce:
    """Profile in force for choices.

    Attributes:
        profile: profile; None if there is none: choices follow a heuristic.
        where: place of the profile, in words.
        notes: reasons why other profiles are not used.
    """

    profile: Profile | None
    where: str
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Return the profile as text for other ranks."""
        text = None if self.profile is None else self.profile.to_text()
        return json.dumps({"profile": text, "where": self.where, "notes": self.notes})

    @staticmethod
    def through_host(peers: PeerMemory, notes: tuple[str, ...] = ()) -> InForce:
        """Return what is in force where host memory is between GPUs, and no file has times for that."""
        return InForce(None, f"a rule of thumb for {peers}", notes)

    @staticmethod
    def by_table(key: MachineKey, ranks: int | None, notes: tuple[str, ...]) -> InForce:
        """Return the table of this package for a machine, or None for a profile if there is none."""
        table = builtin_for(key, ranks)
        if table is not None:
            return dataclasses.replace(table, notes=notes)
        return InForce(None, f"a rule of thumb: no table for {key.device} (sidelane tune makes one)", notes)

    @staticmethod
    def from_text(text: str) -> InForce:
        """Read the result of :meth:`to_text` or :func:`choice_of_rank`."""
        content: dict[str, Any] = json.loads(text)
        if "key" in content:
            return InForce.by_table(MachineKey.from_dict(content["key"]), content["ranks"], tuple(content["notes"]))
        profile = None if content["profile"] is None else parse(content["profile"])
        return InForce(profile, content["where"], tuple(content["notes"]))


def in_force(setting: str | None, key: MachineKey, peers: PeerMemory = SHARED) -> InForce:
    """Find the profile for a machine.

    Args:
        setting: ``Config.profile``: a file, ``builtin``, or None for the user's file of this machine.
        key: key of this machine.
        peers: memory between the GPUs. If it is host memory, no table of this package is for them.

    Raises:
        ValueError: the file that ``setting`` names is missing or is not a profile.
    """
    key = key.between(peers)
    found, notes = users_profile(setting, key, lambda: key)
    return found or (InForce.through_host(peers, notes) if peers.through_host else InForce.by_table(key, None, notes))


def choice_of_rank(setting: str | None, device_type: str, world_size: int, peers: PeerMemory = SHARED) -> str:
    """Return as text, for :meth:`InForce.from_text` on any rank, what is in force between the ranks of this machine.

    A table of this package is named, and each rank reads it. All that is known of the machine is asked for only if a
    file of the user or the choice of a table depends on it: the driver takes a tenth of a second to tell.

    Args:
        setting: see :func:`in_force`.
        device_type: device type of the ranks' tensors.
        world_size: number of ranks.
        peers: see :func:`in_force`.

    Raises:
        ValueError: see :func:`in_force`.
    """

    def whole() -> MachineKey:
        return key_here(device_type, world_size).between(peers)

    key = quick_key(device_type, world_size).between(peers)
    found, notes = users_profile(setting, key, whole)
    if found is None and peers.through_host:
        found = InForce.through_host(peers, notes)
    if found is not None:
        return found.to_text()
    if not any(head.device == key.device and head.count == world_size for head in _heads().values()):
        key = whole()
    return json.dumps({"key": key.to_dict(), "ranks": world_size, "notes": notes})


def users_profile(
    setting: str | None, key: MachineKey, whole: Callable[[], MachineKey]
) -> tuple[InForce | None, tuple[str, ...]]:
    """Return the profile in a file, if it is for this machine, and notes why others are not used.

    Args:
        setting: see :func:`in_force`.
        key: key of this machine, which may lack links and software.
        whole: returns the key with all that is known.

    Raises:
        ValueError: see :func:`in_force`.
    """
    if setting == BUILTIN:
        return None, ()
    path = user_file(key) if setting is None else Path(setting)
    if path is None:
        return None, (f"no profile of this user is looked for: {NO_HOME}",)
    try:
        profile = read_profile(path)
    except ValueError as problem:
        if setting is not None:
            raise
        return None, (f"the profile of this user is not used: {problem}",)
    if profile is None and setting is not None:
        text = f"profile: no such file (value={setting!r}, allowed=a file of sidelane tune, {BUILTIN})"
        raise see(ValueError(text), Page.TUNING)
    if profile is None:
        return None, ()
    if differences := profile.key.differences(whole()):
        other = "measured on another machine or with other software"
        return None, (f"{_shown(path)} is not used: {other}: {'; '.join(differences)} (sidelane tune measures again)",)
    return InForce(profile, f"{_shown(path)}, tuned {profile.date}"), ()


def user_file(key: MachineKey, name: str = "{}.json") -> Path | None:
    """Return the file of ``sidelane tune`` for a machine, or a file of another ``name``; None without a home."""
    folder = profile_folder()
    return None if folder is None else folder / name.format(key.short_name)


def read_profile(path: Path) -> Profile | None:
    """Return the profile in a file; None if there is no such file.

    Raises:
        ValueError: the file is not a profile.
    """
    try:
        text = bytes_of(path).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as problem:
        unread = ValueError(f"profile: cannot be read (value={_shown(path)!r}): {problem}")
        raise see(unread, Page.TUNING) from problem
    try:
        return parse(text)
    except ValueError as problem:
        raise see(ValueError(f"profile: {_shown(path)}: {problem}"), Page.TUNING) from problem


@functools.cache
def builtin(name: str) -> Profile | None:
    """Return the table of this package with that name; None if there is none."""
    text = _texts().get(name)
    return None if text is None else parse(text)


def builtin_names() -> tuple[str, ...]:
    """Return the machines that this package has a table of."""
    return tuple(_texts())


@functools.cache
def _texts(*folders: str) -> dict[str, str]:
    """Return the text of each table of this package, or of a folder of it, by its machine."""
    folder = importlib.resources.files("sidelane.choice").joinpath("builtin", *folders)
    entries = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda one: one.name)
    return {entry.name.removesuffix(".json"): entry.read_text(encoding="utf-8") for entry in entries}


def builtin_fused() -> dict[str, Profile]:
    """Return the tables of this package with times of fused operators, by machine."""
    return {name: parse(text) for name, text in _texts("fused").items()}


def fused_times(setting: str | None, key: MachineKey) -> dict[str, tuple[FusedTime, ...]]:
    """Return the times of fused operators for choices on a machine, by the names of their tables.

    The user's come first, then those of this package for such GPUs, which reached each other's memory. The user's file
    is left out if it was measured on another machine. If it is no profile, the log tells the reason.

    Args:
        setting: ``Config.profile``; ``builtin`` leaves out the user's.
        key: key of this machine, between its GPUs (:meth:`MachineKey.between`).
    """
    found = {}
    path = None if setting == BUILTIN else user_file(key, FUSED_FILE)
    try:
        profile = None if path is None else read_profile(path)
    except ValueError as problem:
        profile = None
        logger.warning("times of fused operators are not used: %s (sidelane fused --keep measures again)", problem)
    if path is not None and profile is not None and not profile.key.differences(key):
        found[path.name] = profile.operators
    alike = (key.device_type, key.device)
    for name, table in builtin_fused().items():
        if (table.key.device_type, table.key.device) == alike and key.links != HOST_MEMORY:
            found[f"built-in {name}"] = table.operators
    return found


@functools.cache
def builtin_digest() -> str:
    """Return a digest of the tables of this package: ranks that name one mean the same."""
    return hashlib.blake2b(repr(_texts()).encode(), digest_size=8).hexdigest()


@functools.cache
def _heads() -> dict[str, MachineKey]:
    """Return the key of each table of this package, which is a line of its own (``Profile.to_text``)."""
    lines = {name: re.search(r'^ "key": (.*),$', text, re.MULTILINE) for name, text in _texts().items()}
    return {name: MachineKey.from_dict(json.loads(line[1])) for name, line in lines.items() if line is not None}


def builtin_for(key: MachineKey, ranks: int | None = None) -> InForce | None:
    """Return the table for a machine: of the same device, whatever its software, and of the nearest count.

    World sizes that it lacks get the times of other tables, those of its device first: two ranks on a machine of
    four GPUs are nearer to two on one of two. A device without a table takes another's of the same vendor, unless no
    links join its GPUs: the fastest way there is a better guess than a heuristic.

    Args:
        key: key of the machine.
        ranks: number of ranks that choose by it; other tables are read only if the nearest lacks it. None: any number.
    """
    on_cpu = key.device_type == CPU
    near = [
        (name, head)
        for name, head in _heads().items()
        if (head.device_type == CPU) == on_cpu and (on_cpu or _alike(head, key))
    ]
    near.sort(key=lambda t: (not on_cpu and t[1].device != key.device, abs(t[1].count - key.count), -t[1].count))
    if not near:
        return None
    nearest = builtin(near[0][0])
    assert nearest is not None, "it has a head"
    curves, sizes = nearest.curves, {curve.world_size for curve in nearest.curves}
    words = [nearest.date[:10]]
    others = () if ranks in sizes else (builtin(name) for name, _ in near[1:])
    for table in filter(None, others):
        more = tuple(curve for curve in table.curves if curve.world_size not in sizes)
        if more:
            curves, new = (*curves, *more), {curve.world_size for curve in more}
            sizes |= new
            words.append(f"{', '.join(map(str, sorted(new)))} ranks by {table.machine}")
    if nearest.key.count != key.count and not on_cpu:
        words.append(f"{key.count} here")
    if nearest.key.device != key.device and not on_cpu:
        words.append(f"none of {key.device}: sidelane tune makes one")
    return InForce(
        dataclasses.replace(nearest, curves=curves), f"the built-in table {nearest.machine} ({'; '.join(words)})"
    )


def _alike(measured: MachineKey, here: MachineKey) -> bool:
    """Return True if one device's times show what is fastest on the other."""
    return measured.device == here.device or (_vendor(measured) == _vendor(here) and here.links != "none")


def _vendor(key: MachineKey) -> str:
    return key.device.partition(" ")[0]


def _shown(path: Path) -> str:
    """Return a path for texts, without the folder of the home."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
