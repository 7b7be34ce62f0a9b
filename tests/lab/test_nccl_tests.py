"""``sidelane nccl-tests``: sizes, lines and verdicts."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sidelane import cli
from sidelane_lab.harness import running
from sidelane_lab.harness.study import Results, studies, study_of
from sidelane_lab.studies import nccl_tests
from sidelane_lab.studies.collectives import CollectiveRow, bus_gbps

RANKS = 4


def row(collective: str, nbytes: int, in_place: bool, time_us: float | None, **columns: object) -> CollectiveRow:
    values: dict[str, object] = {
        "collective": collective,
        "bytes": nbytes,
        "dtype": "float32",
        "in_place": in_place,
        "launch": "eager",
        "implementation": "auto",
        "variant": "b2b",
        "prelaunch": False,
        "time_us": time_us,
        "p10_us": time_us,
        "p90_us": time_us,
        "bus_gbps": None if time_us is None else bus_gbps(collective, nbytes, RANKS, time_us),
        "energy_mj": None,
        "correct": True,
    }
    return CollectiveRow(**{**values, **columns})


def lines(*rows: CollectiveRow, machine: str = "cpu", dtype: str = "float", sizes: tuple[int, ...] = ()) -> list[str]:
    found = Results("collectives", machine, 4, "4 GPUs", RANKS, "", "", "", {"sidelane": "0"}, rows)
    return list(nccl_tests.lines_of(found, rows, dtype, sizes))


@pytest.mark.parametrize(
    ("collective", "count", "redop", "root", "busbw"),
    [
        ("all_reduce", 1024, "sum", "-1", 6.144),
        ("reduce_scatter", 256, "sum", "-1", 3.072),
        ("all_gather", 256, "none", "-1", 3.072),
        ("all_to_all", 256, "none", "-1", 3.072),
        ("broadcast", 1024, "none", "0", 4.096),
    ],
)
def test_a_line_has_the_columns_of_nccl_tests(collective: str, count: int, redop: str, root: str, busbw: float) -> None:
    found = lines(row(collective, 4096, False, 1.0), row(collective, 4096, True, 2.0))
    (line,) = (line for line in found if not line.startswith("#"))
    first = ["4096", str(count), "float", redop, root]
    places = ["1.00", "4.10", f"{busbw:.2f}", "0", "2.00", "2.05", f"{busbw / 2:.2f}", "0"]
    assert line.split() == [*first, *places]
    heading = next(line for line in found if "algbw" in line)
    for name, value in (("size", "4096"), ("count", str(count)), ("time", "1.00"), ("algbw", "4.10")):
        assert heading.index(name) + len(name) == line.index(f" {value} ") + len(value) + 1
    assert len(heading) == len(line)


def test_what_is_missing_or_wrong_is_said() -> None:
    good, wrong = (
        row("all_reduce", 64, True, 20_000.0),
        row("all_reduce", 64, False, None, correct=False, note="it is 3"),
    )
    found = lines(wrong, good)
    (line,) = (line for line in found if not line.startswith("#"))
    assert line.split()[5:] == ["N/A", "N/A", "N/A", "1", "20000", "0.00", "0.00", "0"]
    assert {"# Out of bounds values : 1 FAILED", "# it is 3"} <= {*found}
    (alone,) = (line for line in lines(good) if not line.startswith("#"))
    # A line for each size asked, though 8 and 16 are 64.
    found = lines(good, sizes=(8, 16, 64, 128))
    assert alone.split()[5:9] == ["N/A"] * 4 and found.count(alone) == 3 and "# Out of bounds values : 0 OK" in found


def test_implementations_have_tables_and_described_machines_a_verdict() -> None:
    rows = [row("all_gather", 1 << 30, False, 3000.0, implementation=name, variant=v) for name, v in
            (("auto", "b2b"), ("dma", "b2b"), ("dma", "pcpy"))]  # fmt: skip
    rows.append(dataclasses.replace(rows[0], bytes=1 << 20, variant="one_shot"))
    found = lines(*rows, machine="h200x4")
    assert [line.rpartition("by ")[2] for line in found if ", by " in line] == ["auto", "dma b2b", "dma pcpy"]
    verdicts = [line for line in found if line.startswith("# Max")]
    assert len(verdicts) == 3
    assert verdicts[0] == "# Max bus bandwidth    : 268.4, 68% of this link (392.2 GB/s, measured for copies on h200x4)"
    eight = next(line for line in lines(*rows, machine="h100x8") if line.startswith("# Max"))
    assert eight.endswith("68% of this link (392.2 GB/s, assumed for copies on h100x8)")
    assert "# Max bus bandwidth    : 268.4 (no share of a link: cpu is not described)" in lines(*rows)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["nccl-tests", *arguments])


class MadeUpRanks:
    """A measurement in place of that of ranks: it sends rows, and then does something else."""

    def __init__(self, *rows: CollectiveRow, after: Callable[[], object] = lambda: None) -> None:
        self._rows, self._after = rows, after
        self.timeout_s = 0.0

    def __call__(self, *_: object, progress: Callable[[str], None], timeout_s: float, **__: object) -> list[int]:
        self.timeout_s = timeout_s
        for one in self._rows:
            progress(json.dumps({"row": one.to_dict()}))
        self._after()
        return [len(self._rows)]


def test_what_was_measured_is_kept_at_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    ranks = MadeUpRanks(row("all_reduce", 4096, False, 1.0), after=end)
    monkeypatch.setattr(running, "run_ranks", ranks)
    out = tmp_path / "out.json"
    result = call("all_reduce", "-g", "2", "--timeout", "7", "--json", str(out))
    assert result.exit_code != 0 and "        4096 " in result.stdout
    assert len(json.loads(out.read_text())["rows"]) == 1 and ranks.timeout_s == 7
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_table_is_printed_though_the_file_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(running, "run_ranks", MadeUpRanks(row("all_reduce", 4096, False, 1.0)))
    monkeypatch.setattr(running.result_files, "write", refuse)
    result = call("all_reduce", "-g", "2", "--json", str(tmp_path / "out.json"))
    assert result.exit_code != 0 and "        4096 " in result.stdout


def test_nothing_measured_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "run_ranks", MadeUpRanks())
    result = call("all_reduce", "-g", "2")
    assert result.exit_code != 0 and "nothing that was asked for can run here (collectives=all_reduce" in result.output


def test_only_reasons_are_an_error_behind_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In every study: rows are shown and written, and a script sees that nothing was measured."""
    out, empty = (
        tmp_path / "out.json",
        row("all_reduce", 4096, False, None, correct=None, note="takes no part: 64 ranks"),
    )
    monkeypatch.setattr(running, "run_ranks", MadeUpRanks(empty))
    result = call("all_reduce", "-g", "2", "--json", str(out))
    assert result.exit_code == 1 and "# Out of bounds values : N/A" in result.stdout
    assert "Error: collectives: nothing was measured (takes no part: 64 ranks)" in result.stderr
    assert len(json.loads(out.read_text())["rows"]) == 1
    out.unlink()
    line = f"collective --ranks 2 --device cpu --collective all_reduce --max-bytes 4K --json {out}"
    result = CliRunner().invoke(cli.main, line.split())
    assert result.exit_code == 1 and "Error: collectives: nothing was measured (takes no part" in result.stderr
    assert len(json.loads(out.read_text())["rows"]) == 1
    monkeypatch.setattr(running, "run_ranks", MadeUpRanks(empty, row("all_reduce", 8192, False, 1.0)))
    assert call("all_reduce", "-g", "2").exit_code == 0


def test_a_wrong_row_ends_every_command_with_1_and_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = [row("all_reduce", size, False, None, correct=False, note="it is 3") for size in range(1, 11)]
    one = (right := row("all_reduce", 8192, False, 1.0, implementation="dma")), wrong[3]
    long = [dataclasses.replace(one, variant="b2b" * 99) for one in wrong]
    ours, named = "nccl-tests all_reduce -g 2", "1 of 2 rows are WRONG: bytes 4, implementation auto"
    for rows, line, told in (
        (one, ours, f"Error: collectives: {named}"),
        (one, "collective --ranks 2 --device cpu --collective all_reduce", f"Error: collectives: {named}"),
        (one, f"tune --ranks 2 --device cpu --output {tmp_path / 'profile.json'}", f"Error: tune: {named}"),
        ((right, *wrong), ours, "10 of 11 rows are WRONG: bytes 1, implementation auto; bytes 2, implementation auto"),
        (wrong[:1], ours, "Error: collectives: 1 of 1 rows are WRONG: collective all_reduce"),
        ((right, *long), ours, "10 of 11 rows are WRONG: bytes 1, implementation auto, variant b2bb2b"),
    ):
        monkeypatch.setattr(running, "run_ranks", MadeUpRanks(*rows))
        out = tmp_path / f"{line[:4]}{len(told)}.json"
        result = CliRunner().invoke(cli.main, [*line.split(), "--json", str(out)])
        # In the end of a log, by which a node's session tells them from a failure.
        assert result.exit_code == 1 and told in result.stderr[-1500:] and out.exists(), result.output
    # Those of heuristics are judgements.
    assert all("correct" in study_of(name).row.__dataclass_fields__ for name in {*studies()} - {"heuristics"})


def test_a_line_of_nccl_tests_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each option that it has; a time-out of theirs is -T, which is refused above."""
    asked: list[Any] = []
    ranks = MadeUpRanks(row("all_reduce", 4096, False, 1.0))
    monkeypatch.setattr(running, "run_ranks", lambda *given, **named: asked.append(given[3]) or ranks(**named))
    line = "all_reduce -b 8 -e 128M -f 4 -g 2 -n 7 -w 3 -c 0 -G 0 -d half -t 1 -o sum -r 0 -m 1 -z 0 -p 0 -a 3 -N 1"
    result = call(*line.split())
    assert result.exit_code == 0, result.output
    assert "note: -c 0: outputs are checked all the same" in result.output
    (options,) = asked
    assert options.sizes == tuple(8 << 2 * power for power in range(13)) and options.ranks == 2
    assert (options.repeats, options.warmup, options.launches, options.dtype) == (7, 3, ("eager",), "float16")


def test_ranks_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = "-b 4 -e 8K -f 2 -g 2 -n 2 -w 0 -d half --json"
    result = call("alltoall", *sizes.split(), str(out))
    assert result.exit_code == 0, result.output
    measured = [line.split() for line in result.stdout.splitlines() if line and line[0] == " "]
    assert [line[:5] for line in measured] == [
        [str(4 << power), str(1 << power), "half", "none", "-1"] for power in range(12)
    ]
    assert all(line[8] == "0" for line in measured)
    rows = json.loads(out.read_text())["rows"]
    assert {(one["implementation"], one["dtype"], one["launch"]) for one in rows} == {("auto", "float16", "eager")}
