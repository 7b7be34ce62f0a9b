"""Places of profiles: the user's file for this machine, a file that the settings name, or a table of this package."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

from sidelane.choice.key import CPU, Key
from sidelane.choice.profile import Profile, parse
from sidelane.config import BUILTIN, profile_folder
from sidelane.errors import Page, see
from sidelane.machine.inventory import machine_name

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
    def from_text(text: str) -> InForce:
        """Read the result of :meth:`to_text`."""
        content: dict[str, Any] = json.loads(text)
        profile = None if content["profile"] is None else parse(content["profile"])
        return InForce(profile, content["where"], tuple(content["notes"]))


def in_force(setting: str | None, key: Key) -> InForce:
    """Find the profile for a machine.

    Args:
        setting: ``Config.profile``: a file, ``builtin``, or None for the user's file of this machine.
        key: key of this machine.

    Raises:
        ValueError: the file that ``setting`` names is missing or is not a profile.
    """
    notes = []
    if setting != BUILTIN:
        path = user_file(key) if setting is None else Path(setting)
        try:
            profile = None if path is None else read(path)
            if path is None:
                notes.append(f"no profile of this user is looked for: {NO_HOME}")
            elif profile is not None:
                differences = profile.key.differences(key)
                if not differences:
                    return InForce(profile, f"{_shown(path)}, tuned {profile.date}")
                notes.append(
                    f"{_shown(path)} is not used: measured on another machine or with other software: "
                    f"{'; '.join(differences)} (sidelane tune measures again)"
                )
            elif setting is not None:
                text = f"profile: no such file (value={setting!r}, allowed=a file of sidelane tune, {BUILTIN})"
                raise see(ValueError(text), Page.TUNING)
        except ValueError as problem:
            if setting is not None:
                raise
            notes.append(f"the profile of this user is not used: {problem}")
    table = builtin_for(key)
    if table is not None:
        return dataclasses.replace(table, notes=tuple(notes))
    return InForce(None, f"a rule of thumb: no table for {key.device} (sidelane tune makes one)", tuple(notes))


def user_file(key: Key, name: str = "{}.json") -> Path | None:
    """Return the file of ``sidelane tune`` for a machine, or a file of another ``name``; None without a home."""
    folder = profile_folder()
    return None if folder is None else folder / name.format(name_of(key))


def required(what: str, path: Path | None, instead: str = "") -> Path:
    """Return the place of a file of this user.

    Args:
        what: name of the writer, for the error.
        path: place of the file, if there is one.
        instead: another way to name a place; "" for none.

    Raises:
        ValueError: there is none.
    """
    if path is None:
        allowed = f"{instead}XDG_CONFIG_HOME as an absolute path, or HOME"
        text = f"{what}: a place for files of this user (value=none: {NO_HOME}, allowed={allowed})"
        raise see(ValueError(text), Page.TUNING)
    return path


def name_of(key: Key) -> str:
    """Return the short name of a machine, as in the folders under ``results/``."""
    return CPU if key.device_type == CPU else machine_name(key.device, key.count)


def read(path: Path) -> Profile | None:
    """Return the profile in a file; None if there is no such file.

    Raises:
        ValueError: the file is not a profile.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as problem:
        unread = ValueError(f"profile: cannot be read (value={_shown(path)!r}): {problem}")
        raise see(unread, Page.TUNING) from problem
    try:
        return parse(text)
    except ValueError as problem:
        raise see(ValueError(f"profile: {_shown(path)}: {problem}"), Page.TUNING) from problem


class FileContent(Protocol):
    """Content of a file: a profile, or times of fused operators."""

    def to_text(self) -> str: ...


def write(path: Path, content: FileContent) -> None:
    """Write a file atomically, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content.to_text())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@functools.cache
def builtin(name: str) -> Profile | None:
    """Return the table of this package with that name; None if there is none."""
    if name not in builtin_names():
        return None
    return parse(
        (importlib.resources.files("sidelane.choice") / "builtin" / f"{name}.json").read_text(encoding="utf-8")
    )


def builtin_names() -> tuple[str, ...]:
    """Return the machines that this package has a table of."""
    folder = importlib.resources.files("sidelane.choice") / "builtin"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def builtin_for(key: Key) -> InForce | None:
    """Return the table for a machine: of the same device, whatever its software, and of the nearest count.

    World sizes that it lacks get the times of other tables, those of its device first: two ranks on a machine of
    four GPUs are nearer to two on one of two. A device without a table takes another's of the same vendor, unless no
    links join its GPUs: the fastest way there is a better guess than a heuristic.
    """
    tables = [table for name in builtin_names() if (table := builtin(name)) is not None]
    on_cpu = key.device_type == CPU
    near = [t for t in tables if (t.key.device_type == CPU) == on_cpu and (on_cpu or _alike(t.key, key))]
    near.sort(key=lambda t: (not on_cpu and t.key.device != key.device, abs(t.key.count - key.count), -t.key.count))
    if not near:
        return None
    nearest, *others = near
    curves, sizes = nearest.curves, {curve.world_size for curve in nearest.curves}
    words = [nearest.date[:10]]
    for table in others:
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


def _alike(measured: Key, here: Key) -> bool:
    """Return True if one device's times show what is fastest on the other."""
    return measured.device == here.device or (_vendor(measured) == _vendor(here) and here.links != "none")


def _vendor(key: Key) -> str:
    return key.device.partition(" ")[0]


def _shown(path: Path) -> str:
    """Return a path for texts, without the folder of the home."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
