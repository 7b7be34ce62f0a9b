"""A folder of results that grows from call to call: what has been measured of what, and on which machine.

folder/collectives.json, ...     what is published: rows of all parts that have ended, or were ended
folder/parts/NAME.json           the rows of each part
folder/parts/NAME.log            what it said
folder/parts/state.json          how each part ended, and what all of them were measured on
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from node.parts import PARTS_FOLDER, ROWS, TEXT, Part
from sidelane.cli.output import write_json, write_text

DONE, UNFINISHED, FAILED, NOT_YET = "done", "unfinished", "failed", "not yet"
STATES = (DONE, UNFINISHED, FAILED, NOT_YET)
SAME = ("study", "machine", "ranks", "commit", "software")
"""What rows of one file have in common."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What is measured, and by which code.

    Attributes:
        machine: short name, such as ``h200x4``.
        device: full name.
        ranks: processes.
        commit: see ``provenance.commit``.
        software: versions, by name.
    """

    machine: str
    device: str
    ranks: int
    commit: str
    software: dict[str, str]

    def differences(self, other: dict[str, Any]) -> list[str]:
        """What another one, or a result file, has otherwise. Only what it names is compared."""
        found = []
        for name, ours in dataclasses.asdict(self).items():
            theirs = other.get(name)
            if theirs is None or theirs == ours or (name == "commit" and is_same_commit(theirs, ours)):
                continue
            if name == "software":
                pairs = {key: (theirs.get(key), ours.get(key)) for key in {*theirs, *ours}}
                changed = [f"{key} {old}, now {new}" for key, (old, new) in sorted(pairs.items()) if old != new]
                found.append(f"software: {'; '.join(changed)}")
            else:
                found.append(f"{name}: {theirs}, now {ours}")
        return found


@dataclasses.dataclass(frozen=True)
class State:
    """How a part ended.

    Attributes:
        state: of ``STATES``.
        tries: that did not end well, or brought nothing.
        seconds: of all calls together.
        needed_s: that it had when it was ended because a call was over: it takes more.
        rows: in its file.
        wrong: rows whose output was not right.
        problem: of the last call, if any.
    """

    state: str = NOT_YET
    tries: int = 0
    seconds: float = 0.0
    needed_s: float = 0.0
    rows: int = 0
    wrong: int = 0
    problem: str = ""


class Folder:
    """The folder of one place.

    Args:
        path: it is made with the first part.
        parts: that write into it.
        place: of this call.
    """

    def __init__(self, path: Path, parts: Sequence[Part], place: Place) -> None:
        self.path, self.parts, self.place = path, tuple(parts), place
        self._states: dict[str, State] = {}
        self._found: dict[str, Any] = {}
        if self._state_file.exists():
            try:
                self._found = json.loads(self._state_file.read_text(encoding="utf-8"))
                self._states = {name: State(**kept) for name, kept in self._found["parts"].items()}
            except (ValueError, TypeError, KeyError, AttributeError) as problem:
                raise ValueError(f"{self._state_file}: it cannot be read ({problem}); --again starts anew") from None

    @property
    def _state_file(self) -> Path:
        return self.path / PARTS_FOLDER / "state.json"

    def objections(self) -> list[str]:
        """Why nothing may be added: files of another machine, commit or software. A line each."""
        found = [f"{PARTS_FOLDER}: {text}" for text in self.place.differences(self._found.get("place", {}))]
        for name in dict.fromkeys(part.file for part in self.parts if part.kind != TEXT):
            path = self.path / name
            if not path.exists() or PARTS_FOLDER in Path(name).parts:
                continue
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                found += [f"{name}: {text}" for text in self.place.differences(content)]
            except (ValueError, AttributeError):
                found.append(f"{name}: not a result file")
        for name in dict.fromkeys(part.file for part in self.parts if part.kind == TEXT):
            path = self.path / name
            if path.exists():
                text = path.read_text(encoding="utf-8", errors="replace")
                known = [dict(re.findall(r"^(machine|commit): +(\S+)", part, re.MULTILINE)) for part in _runs(text)]
                found += dict.fromkeys(f"{name}: {text}" for one in known for text in self.place.differences(one))
        return found

    def set_aside(self, parts: Iterable[Part]) -> Path | None:
        """Forget parts, and move what they wrote to a folder ``earlier-N``: returns it; None if there was nothing."""
        names = {part.name for part in parts}
        files = {part.file for part in self.parts if part.name in names}
        alike = [part for part in self.parts if part.file in files]  # a file is of all its parts, or of none
        moved = [self.path / name for name in sorted(files)]
        moved += [found for part in alike for found in (self._rows_file(part), self.log(part))]
        if not (there := list(dict.fromkeys(path for path in moved if path.exists()))) and not self._states:
            return None
        number = 1
        while (earlier := self.path / f"earlier-{number}").exists():
            number += 1
        for path in there:
            target = earlier / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
        for part in alike:
            self._states.pop(part.name, None)
        if not self._states:
            self._found = {}
            self._state_file.unlink(missing_ok=True)
        else:
            self._write_states()
        return earlier if there else None

    def state(self, part: Part) -> State:
        """How a part stands."""
        return self._states.get(part.name, State())

    def has(self, part: Part) -> bool:
        """There is something of a part."""
        return self._rows_file(part).exists()

    def log(self, part: Part) -> Path:
        """What a part said."""
        return self.path / PARTS_FOLDER / f"{part.name}.log"

    def target(self, part: Part) -> Path:
        """The file that a part is told to write: its own, if it grows, and else a new one."""
        kept = self._rows_file(part)
        return kept if part.budget else kept.with_name(f"new-{kept.name}")

    def keep(self, part: Part, *, is_whole: bool) -> tuple[int, int]:
        """Take over what a part wrote, and put the file together anew.

        What was there stays if the part has not ended well and has fewer rows.

        Returns:
            Rows, or lines, of the part, and those of them that were wrong.
        """
        kept, new = self._rows_file(part), self.target(part)
        if new != kept and new.exists():
            if is_whole or _count(part, new)[0] >= _count(part, kept)[0]:
                new.replace(kept)
            else:
                new.unlink()
        self._put_together(part)
        return _count(part, kept)

    def note(self, part: Part, state: State) -> None:
        """Write down how a part ended."""
        self._states[part.name] = state
        self._write_states()

    def _write_states(self) -> None:
        parts = {name: dataclasses.asdict(state) for name, state in self._states.items()}
        write_json(self._state_file, {"place": dataclasses.asdict(self.place), "parts": parts})

    def _rows_file(self, part: Part) -> Path:
        if Path(part.file).parent.name == PARTS_FOLDER:
            return self.path / part.file
        return self.path / PARTS_FOLDER / f"{part.name}{Path(part.file).suffix}"

    def _put_together(self, part: Part) -> None:
        paths = [self._rows_file(one) for one in self.parts if one.file == part.file]
        found = [path for path in paths if path.exists()]
        target = self.path / part.file
        if not found or target in found:
            return
        if part.kind == ROWS:
            write_json(target, merge([json.loads(path.read_text(encoding="utf-8")) for path in found], part.study))
        elif part.kind == TEXT:
            write_text(target, "\n".join(path.read_text(encoding="utf-8") for path in found))
        else:
            shutil.copyfile(found[0], target)


def is_same_commit(one: str, other: str) -> bool:
    """Two names of one commit: older files have the first digits.

    >>> is_same_commit("7876871", "7876871d0a"), is_same_commit("7876871", "7876871d0a-dirty")
    (True, False)
    """
    short, long = sorted((one, other), key=len)
    return len(short) >= 7 and long.startswith(short) and "-" not in long[len(short) :]


def merge(found: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """One result of several: all rows, all commands, each of which ended with a file of its own.

    Raises:
        ValueError: they are not of one study, machine and commit.
    """
    first = found[0]
    for key in SAME:
        if any(other.get(key) != first.get(key) for other in found):
            values = ", ".join(str(other.get(key)) for other in found)
            raise ValueError(f"merge: {key} of {name} (value={values}, allowed=the same everywhere)")
    commands = [" ".join([*each["command"].split()[:-1], f"{name}.json"]) for each in found]
    last = max(found, key=lambda each: str(each.get("date", "")))
    return {**last, "command": "; ".join(commands), "rows": [row for each in found for row in each["rows"]]}


def _runs(text: str) -> list[str]:
    """The runs of a file of tests: each begins with its machine."""
    return re.split(r"^(?=machine: )", text, flags=re.MULTILINE)


def _count(part: Part, path: Path) -> tuple[int, int]:
    if not path.exists():
        return 0, 0
    text = path.read_text(encoding="utf-8")
    if part.kind == TEXT:
        lines = text.splitlines()
        return sum(line.startswith("passed ") for line in lines), 0
    rows = json.loads(text).get("rows", [])
    return len(rows), sum(row.get("correct") is False for row in rows)
