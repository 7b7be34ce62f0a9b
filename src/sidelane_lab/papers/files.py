"""Result files of this project, as claims and figures read them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sidelane_lab.harness.files import text_of
from sidelane_lab.harness.study import MODEL, studies

Row = Mapping[str, Any]
CLASSES = "c3-classes"
"""Pairs of every class and bound: a file of the study ``c3``."""
BETWEEN_NODES = "fused_between_nodes"
"""Study of fused embeddings on two GPUs as two nodes, whose file is no file of a declared study."""
FILES = {
    "collectives": "collectives.json",
    "prelaunch": "prelaunch.json",
    "c3": "c3.json",
    CLASSES: "c3-classes.json",
    "heuristics": "heuristics.json",
    "isolated": "isolated.json",
    "phases": "phases.json",
    "power": "power.json",
    "chain": "chain.json",
    "fused": "fused.json",
    "occupancy": "occupancy.json",
    BETWEEN_NODES: "nodes.json",
}
"""The usual name of each study's file in a folder of results."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResultFile:
    """Rows of a study of one machine, as they are in the file."""

    path: Path
    study: str
    machine: str
    device: str
    ranks: int
    rows: tuple[Row, ...]

    @property
    def where(self) -> str:
        """The ranks and the device, for titles: ``2 x H200``."""
        return f"{self.ranks} x {self.device.removeprefix('NVIDIA ').removesuffix(' 80GB HBM3')}"

    @property
    def predicted(self) -> bool:
        """The model filled the rows."""
        return self.path == Path()


def read_results(path: Path) -> ResultFile | None:
    """Read a result file; None where the file is JSON of another kind.

    Raises:
        ValueError: there is no such file, or it is no JSON.
    """
    return _read(path, path.stat().st_mtime_ns if path.exists() else 0)


@functools.lru_cache(maxsize=128)
def _read(path: Path, changed_ns: int) -> ResultFile | None:
    try:
        content = json.loads(text_of(path))
    except ValueError as problem:
        raise ValueError(f"results: not a result file (value={str(path)!r}): {problem}") from problem
    if not isinstance(content, dict) or content.get("study") not in (*studies(), BETWEEN_NODES):
        return None
    if content.get("predicted") or not isinstance(content.get("rows"), list):
        return None
    try:
        rows = tuple(row for row in content["rows"] if row.get("correct") is not False and row.get("launch") != MODEL)
        return ResultFile(path, content["study"], content["machine"], content["device"], content["ranks"], rows)
    except KeyError:  # by hand, or of a time before files said where they are from
        return None


def find_results(sources: Sequence[Path], study: str, name: str) -> list[ResultFile]:
    """Return the files of a study among several ranks, the one with the most rows first.

    Args:
        sources: files, which may have any name; and folders, in which and in whose folders files have their usual one.
        study: as the files name it.
        name: the usual name of its file.

    Raises:
        ValueError: a source is no file and no folder, or a named file is no JSON.
    """
    paths: list[Path] = []
    for source in sources:
        if source.is_dir():
            paths += [path for path in (source / name, *sorted(source.glob(f"*/{name}"))) if path.is_file()]
        else:
            paths.append(source)
    read = [file for path in dict.fromkeys(paths) if (file := read_results(path)) is not None]
    found = [file for file in read if file.study == study and file.ranks > 1]
    return sorted(found, key=lambda file: (-len(file.rows), file.machine))


def files_of(key: str, sources: Sequence[Path]) -> list[ResultFile]:
    """Return the result files of a key of ``FILES``, the one with the most rows first."""
    if key != CLASSES:
        return find_results(sources, key, FILES[key])
    return [file for file in find_results(sources, "c3", FILES[key]) if file.path.name == FILES[key]]
