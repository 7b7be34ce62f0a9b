"""The study of fused operators, from end to end on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from marks import long, needs_triton

from sidelane import cli
from sidelane.choice.profile import parse
from sidelane_lab.harness.study import read
from sidelane_lab.studies.fused.rows import FusedRow


@needs_triton
@pytest.mark.parametrize(
    ("op", "sizes", "orders"),
    [
        ("gemv_all_reduce", (20, 16, 1), ("cells",)),
        long("embedding_all_to_all", (4, 2, 2), ("remote_first", "oblivious")),
    ],
)
def test_times_are_kept_for_auto_and_calls_are_drawn(
    op: str, sizes: tuple[int, ...], orders: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    line = f"fused --device cpu --ranks 2 --ops {op} --repeats 1 --keep --timeline {tmp_path} --json"
    told = CliRunner().invoke(cli.main, [*line.split(), str(tmp_path / "x.json")], prog_name="sidelane")
    assert told.exit_code == 0, told.output
    results = read(tmp_path / "x.json")
    (file,) = tmp_path.rglob("fused-cpu.json")
    (time,) = parse(file.read_text()).operators
    mine = [row for row in results.rows if isinstance(row, FusedRow)]
    assert (time.op, time.world_size, time.captured, time.sizes) == (op, 2, False, sizes)
    fused = min(row.time_us or 0.0 for row in mine if row.implementation == "fused" and row.schedule in orders)
    unfused = next(row.time_us for row in mine if row.schedule == "as the operator has it")
    rounded = {"fused": pytest.approx(fused, rel=1e-3), "unfused": pytest.approx(unfused, rel=1e-3)}
    assert time.times == rounded
    names = {made.name for made in tmp_path.iterdir()}
    assert {f"{op}-{order}.{end}" for order in orders for end in ("trace.json", "png", "svg")} <= names
