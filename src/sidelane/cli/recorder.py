"""``sidelane recorder``: read what the ranks' flight recorders wrote, and say who is behind, and which calls differ."""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import click

from sidelane.cli.help import LOOK, HelpEntry
from sidelane.cli.output import STDOUT, json_option, plain_errors, write_json
from sidelane.user_files import bytes_of

LATE_NS = 1_000_000_000
"""Nanoseconds by which a rank that begins a call later than the first one is late, if the call has not ended."""

_TORCHS = ("all_gather_into_tensor", "reduce_scatter_tensor")
SAME_SIZES = frozenset(("all_gather", "all_reduce", "broadcast", "reduce_scatter", *_TORCHS))
"""Collectives whose sizes are the same on all ranks. Those of others may differ."""

MOST_NUMBER = 1 << 62
"""Largest number in a dump: nanoseconds since 1970 are a third of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of a rank.

    Attributes:
        name: name of the collective.
        dtypes: types of its inputs, in torch's words.
        sizes: sizes of its inputs.
        state: ``scheduled``, ``started`` or ``completed``.
        begun_ns: time at which the host made it.
    """

    name: str
    dtypes: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    state: str
    begun_ns: int


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
    calls: Mapping[str, Mapping[int, RecordedCall]]
    failures: tuple[str, ...]


class _Plain(pickle._Unpickler):
    """Reader of dumps, which consist of plain values: no code of a file runs.

    It is the one in Python, as that in C allocates whatever memory a damaged file asks for.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4),
            *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
            *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
            *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
            *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
        )
    }

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_dump(path: Path) -> Dump:
    """Read the dump of a rank, of Sidelane or of torch itself.

    Raises:
        OSError: the file can not be read.
        ValueError: the file is none.
    """
    content = bytes_of(path)
    try:
        found = _Plain(io.BytesIO(content)).load()
    except Exception as problem:  # a damaged file is a list of random instructions, and fails in any way
        raise ValueError(f"{path}: no dump of a flight recorder ({type(problem).__name__}: {problem})") from None
    try:
        return _dump(found, path.name)
    except (LookupError, TypeError, ValueError) as problem:
        why = f"needs {problem}" if isinstance(problem, KeyError) else str(problem)
        raise ValueError(f"{path}: no dump of a flight recorder ({why})") from None


def _dump(found: Any, name: str) -> Dump:
    """Return the dump with the values of a file, each of the type that it has in one.

    Raises:
        LookupError, TypeError, ValueError: a value is missing, or is none that a recorder writes.
    """
    groups = {_text(group): _ranks_of(of["ranks"]) for group, of in _mapping(found["pg_config"]).items()}
    calls: dict[str, dict[int, RecordedCall]] = collections.defaultdict(dict)
    for entry in map(_mapping, found["entries"]):
        if not entry["is_p2p"]:
            calls[_text(entry["process_group"][0])][_number(entry["collective_seq_id"])] = _call(entry)
    own = _mapping(found.get("sidelane", {}))
    digits = re.search(r"([0-9]+)$", name)
    if "rank" not in own and digits is None:
        raise ValueError("the name of the file does not end with a rank, as those of torch's dumps do")
    rank = _number(own["rank"] if "rank" in own else int(digits[1] if digits else 0))
    return Dump(rank, groups, calls, tuple(_text(failure["text"]) for failure in own.get("failures", ())))


def _call(entry: Mapping[str, Any]) -> RecordedCall:
    name = _text(entry.get("sidelane_name") or "") or _text(entry["profiling_name"]).partition(":")[2]
    sizes = tuple(tuple(map(_number, shape)) for shape in entry["input_sizes"])
    dtypes = tuple(map(_text, entry["input_dtypes"]))
    return RecordedCall(name, dtypes, sizes, _text(entry["state"]), _number(entry["time_created_ns"]))


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a dictionary is expected (value={type(value).__name__})")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_NUMBER:
        raise TypeError(f"a number is expected (value={_shown(value)}, allowed=0..{MOST_NUMBER})")
    return value


def _text(value: Any) -> str:
    """Return a text as a terminal may show it: without escape codes."""
    if not isinstance(value, str):
        raise TypeError(f"a text is expected (value={type(value).__name__})")
    shown = (sign if sign.isprintable() else " " if sign.isspace() else "\N{REPLACEMENT CHARACTER}" for sign in value)
    return "".join(shown)


def _ranks_of(value: Any) -> tuple[int, ...]:
    """Return the ranks of a group, which dumps have as the text of a list."""
    text = _text(value)
    if not re.fullmatch(r"[\[(][0-9, ]*[\])]", text):
        raise ValueError(f"a list of ranks is expected, for example [0, 1] (value={text[:80]!r})")
    return tuple(_number(int(digits)) for digits in re.findall(r"[0-9]{1,20}", text))


def _shown(value: Any) -> str:
    return str(value) if type(value) is int and abs(value) < 1 << 64 else type(value).__name__


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
    reached = f"rank {ahead} is in call {top}, {describe_recorded(calls[ahead][top])}"
    if absent := tuple(rank for rank in ranks if rank not in by_rank):
        text = f"{_ranks(absent)} left no dump (a process that has died, or has not noticed a failure); {reached}"
        yield Finding(name, "missing", absent, top, text)
    for rank, number in last.items():
        if number < top:
            own = (
                f"its last call is {number}, {describe_recorded(calls[rank][number])}" if number else "it made no call"
            )
            yield Finding(name, "behind", (rank,), number, f"rank {rank} is behind: {own}; {reached}")
    yield from _late(name, calls)
    yield from _different(name, calls)


def _late(name: str, calls: Mapping[int, Mapping[int, RecordedCall]]) -> Iterator[Finding]:
    """Find the ranks that began the first unfinished call much later than others."""
    numbers = [number for own in calls.values() for number, entry in own.items() if entry.state != "completed"]
    if not numbers:
        return
    number = min(numbers)
    begun = {rank: own[number].begun_ns for rank, own in calls.items() if number in own}
    first = min(begun, key=lambda rank: begun[rank])
    for rank, time_ns in begun.items():
        if (late_ns := time_ns - begun[first]) > LATE_NS:
            text = f"rank {rank} came {late_ns / 1e9:.1f} s after rank {first} to call {number}"
            yield Finding(name, "late", (rank,), number, f"{text}, {describe_recorded(calls[rank][number])}")


def _different(name: str, calls: Mapping[int, Mapping[int, RecordedCall]]) -> Iterator[Finding]:
    """Find the first call that is another one on some ranks. Those behind it would all differ."""
    for number in sorted({number for own in calls.values() for number in own}):
        made = {rank: describe_recorded(own[number], same=True) for rank, own in calls.items() if number in own}
        if len(set(made.values())) > 1:
            texts = "; ".join(f"rank {rank}: {describe_recorded(calls[rank][number])}" for rank in made)
            common = collections.Counter(made.values()).most_common(1)[0][0]
            others = tuple(rank for rank, text in made.items() if text != common)
            yield Finding(name, "differs", others, number, f"call {number} differs: {texts}")
            return


def describe_recorded(call: RecordedCall, *, same: bool = False) -> str:
    """Describe a call: ``all_reduce of Float [4], started``.

    Args:
        call: the call.
        same: only what is the same on all ranks.
    """
    if same and call.name not in SAME_SIZES:
        return f"{call.name} of {', '.join(sorted(set(call.dtypes)))}"
    shown = zip(call.dtypes[:3], call.sizes[:3], strict=False)
    tensors = ", ".join(f"{dtype} {list(size)}" for dtype, size in shown)
    more = f" and {len(call.dtypes) - 3} more" if len(call.dtypes) > 3 else ""
    return f"{call.name}{' of ' if tensors else ''}{tensors}{more}" + ("" if same else f", {call.state}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@click.command(
    cls=HelpEntry,
    heading=LOOK,
    examples=(
        ("sidelane recorder trace_rank_0 trace_rank_1", "which rank is late, in which call; which calls differ"),
    ),
)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
def recorder(files: tuple[Path, ...], json: Path | None) -> None:
    """Say which rank is late, and which calls differ, from the flight recorders of all ranks.

    FILES: the dumps of one run, one per rank, which ranks write when a peer fails if SIDELANE_FLIGHT_RECORDER=FOLDER/
    is set. torch's own are read, too.
    """
    with plain_errors():
        dumps = [read_dump(path) for path in files]
        found = analyse(dumps)
        if json is not None:
            rows = [dataclasses.asdict(finding) for finding in found]
            write_json(json, {"ranks": sorted(dump.rank for dump in dumps), "findings": rows})
        if json == STDOUT:
            return
        calls = sum(len(own) for dump in dumps for own in dump.calls.values())
        click.echo(f"{calls} calls of {_ranks(sorted(dump.rank for dump in dumps))}")
        for group, findings in itertools.groupby(found, key=lambda finding: finding.group):
            title = group if group.startswith("communicator") else f"process group {group}"
            click.echo(f"\n{title if group else 'errors'}")
            for finding in findings:
                click.echo(f"  {finding.text}")
        if not found:
            click.echo("nothing is wrong: all ranks have made the same calls")
