"""``sidelane recorder``: read what the ranks' flight recorders wrote, and say who is behind, and which calls differ."""

from __future__ import annotations

import ast
import collections
import dataclasses
import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.help import LOOK, Command
from sidelane.cli.options import json_option
from sidelane.cli.output import STDOUT, write_json
from sidelane.user_files import bytes_of

LATE_NS = 1_000_000_000
"""Nanoseconds by which a rank that begins a call later than the first one is late, if the call has not ended."""

_TORCHS = ("all_gather_into_tensor", "reduce_scatter_tensor")
SAME_SIZES = frozenset(("all_gather", "all_reduce", "broadcast", "reduce_scatter", *_TORCHS))
"""Collectives whose sizes are the same on all ranks. Those of others may differ."""

Entry = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong in a group.

    Attributes:
        group: name of the group; "" for what concerns a rank alone.
        kind: ``behind``, ``late``, ``missing``, ``differs`` or ``failed``.
        ranks: the ranks concerned, in the world.
        call: number of the call in the group; 0 for none.
        text: description.
    """

    group: str
    kind: str
    ranks: tuple[int, ...]
    call: int
    text: str


@dataclasses.dataclass(frozen=True)
class Dump:
    """The calls of one rank.

    Attributes:
        rank: the rank in the world.
        groups: ranks of the groups that it knows, by name.
        calls: its calls by group, and by their number in the group.
        failures: texts of the errors that it saw.
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    calls: Mapping[str, Mapping[int, Entry]]
    failures: tuple[str, ...]


class _Plain(pickle.Unpickler):
    """Reader of dumps, which consist of plain values: no code of a file runs."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read(path: Path) -> Dump:
    """Read the dump of a rank, of Sidelane or of torch itself.

    Raises:
        ValueError: the file is none.
    """
    try:
        found = _Plain(io.BytesIO(bytes_of(path))).load()
        entries, config = found["entries"], found["pg_config"]
        groups = {name: tuple(ast.literal_eval(of["ranks"])) for name, of in config.items()}
        calls: dict[str, dict[int, Entry]] = collections.defaultdict(dict)
        for entry in entries:
            if not entry["is_p2p"]:
                calls[entry["process_group"][0]][entry["collective_seq_id"]] = entry
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ValueError(f"{path}: no dump of a flight recorder ({type(problem).__name__}: {problem})") from None
    own = found.get("sidelane", {})
    digits = re.search(r"(\d+)$", path.name)
    if "rank" not in own and digits is None:
        raise ValueError(f"{path}: the name does not end with a rank, as torch's dumps do")
    rank = own["rank"] if "rank" in own else int(digits[1] if digits else 0)
    return Dump(rank, groups, calls, tuple(failure["text"] for failure in own.get("failures", ())))


def analyse(dumps: Sequence[Dump]) -> list[Finding]:
    """Return what is wrong, group by group, then the errors of the ranks."""
    by_rank = {dump.rank: dump for dump in dumps}
    groups = {name: ranks for dump in dumps for name, ranks in dump.groups.items()}
    found = [finding for name, ranks in groups.items() for finding in _of_group(name, ranks, by_rank)]
    return found + [
        Finding("", "failed", (dump.rank,), 0, f"rank {dump.rank} raised {text}")
        for dump in sorted(dumps, key=lambda dump: dump.rank)
        for text in dump.failures
    ]


def _of_group(name: str, ranks: Sequence[int], by_rank: Mapping[int, Dump]) -> Iterator[Finding]:
    calls = {rank: by_rank[rank].calls.get(name, {}) for rank in ranks if rank in by_rank}
    last = {rank: max(own, default=0) for rank, own in calls.items()}
    top = max(last.values(), default=0)
    ahead = next((rank for rank, number in last.items() if number == top), None)
    if ahead is None or not top:
        return
    reached = f"rank {ahead} is in call {top}, {describe(calls[ahead][top])}"
    if absent := tuple(rank for rank in ranks if rank not in by_rank):
        text = f"{_ranks(absent)} left no dump (a process that has died, or has not noticed a failure); {reached}"
        yield Finding(name, "missing", absent, top, text)
    for rank, number in last.items():
        if number < top:
            own = f"its last call is {number}, {describe(calls[rank][number])}" if number else "it made no call"
            yield Finding(name, "behind", (rank,), number, f"rank {rank} is behind: {own}; {reached}")
    yield from _late(name, calls)
    yield from _different(name, calls)


def _late(name: str, calls: Mapping[int, Mapping[int, Entry]]) -> Iterator[Finding]:
    """Find the ranks that began the first unfinished call much later than others."""
    numbers = [number for own in calls.values() for number, entry in own.items() if entry["state"] != "completed"]
    if not numbers:
        return
    number = min(numbers)
    begun = {rank: own[number]["time_created_ns"] for rank, own in calls.items() if number in own}
    first = min(begun, key=lambda rank: begun[rank])
    for rank, time_ns in begun.items():
        if (late_ns := time_ns - begun[first]) > LATE_NS:
            text = f"rank {rank} came {late_ns / 1e9:.1f} s after rank {first} to call {number}"
            yield Finding(name, "late", (rank,), number, f"{text}, {describe(calls[rank][number])}")


def _different(name: str, calls: Mapping[int, Mapping[int, Entry]]) -> Iterator[Finding]:
    """Find the first call that is another one on some ranks. Those behind it would all differ."""
    for number in sorted({number for own in calls.values() for number in own}):
        made = {rank: describe(own[number], same=True) for rank, own in calls.items() if number in own}
        if len(set(made.values())) > 1:
            texts = "; ".join(f"rank {rank}: {describe(calls[rank][number])}" for rank in made)
            common = collections.Counter(made.values()).most_common(1)[0][0]
            others = tuple(rank for rank, text in made.items() if text != common)
            yield Finding(name, "differs", others, number, f"call {number} differs: {texts}")
            return


def describe(entry: Entry, *, same: bool = False) -> str:
    """Describe a call: ``all_reduce of Float [4], started``.

    Args:
        entry: the call.
        same: only what is the same on all ranks.
    """
    name = str(entry.get("sidelane_name") or entry["profiling_name"].partition(":")[2])
    dtypes, sizes = entry["input_dtypes"], entry["input_sizes"]
    if same and name not in SAME_SIZES:
        return f"{name} of {', '.join(sorted(set(dtypes)))}"
    tensors = ", ".join(f"{dtype} {size}" for dtype, size in zip(dtypes[:3], sizes[:3], strict=False))
    more = f" and {len(dtypes) - 3} more" if len(dtypes) > 3 else ""
    return f"{name}{' of ' if tensors else ''}{tensors}{more}" + ("" if same else f", {entry['state']}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@click.command(
    cls=Command,
    heading=LOOK,
    examples=(
        ("sidelane recorder trace_rank_0 trace_rank_1", "which rank is behind, in which call; which calls differ"),
    ),
)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
def recorder(files: tuple[Path, ...], json: Path | None) -> None:
    """Say which rank is behind, and which calls differ, from the flight recorders of all ranks.

    FILES: the dumps of one run, one a rank, which SIDELANE_FLIGHT_RECORDER=FOLDER/ lets ranks write when a peer fails.
    torch's own are read, too.
    """
    with plain_errors():
        dumps = [read(path) for path in files]
        found = analyse(dumps)
        if json is not None:
            rows = [dataclasses.asdict(finding) for finding in found]
            write_json(json, {"ranks": sorted(dump.rank for dump in dumps), "findings": rows})
        if json == STDOUT:
            return
        calls = sum(len(own) for dump in dumps for own in dump.calls.values())
        click.echo(f"{calls} calls of {_ranks(sorted(dump.rank for dump in dumps))}")
        for group, findings in _grouped(found):
            title = group if group.startswith("communicator") else f"process group {group}"
            click.echo(f"\n{title if group else 'errors'}")
            for finding in findings:
                click.echo(f"  {finding.text}")
        if not found:
            click.echo("nothing is wrong: all ranks have made the same calls")


def _grouped(found: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    groups: dict[str, list[Finding]] = {}
    for finding in found:
        groups.setdefault(finding.group, []).append(finding)
    return list(groups.items())
