"""The process group as the default group: forms, parts, time-outs and the death of a rank; processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import group_world as scenarios
import pytest
from ranks import crew

ROOT = Path(__file__).resolve().parents[2]


FORMS = scenarios.forms, scenarios.replaced
PARTS = scenarios.parts, scenarios.refused, scenarios.compared
ENDS = scenarios.sent_late, scenarios.timeout_is_set
GIVEN_BACK = scenarios.late, scenarios.given_back


@pytest.mark.parametrize(
    ("several", "ends_by_death"),
    [
        *((FORMS, True), (PARTS, False), (ENDS, True), (GIVEN_BACK, False)),
        pytest.param((*FORMS, *PARTS), True, marks=pytest.mark.long),
        pytest.param((*GIVEN_BACK, *ENDS), True, marks=pytest.mark.long),
    ],
    ids=["forms", "parts", "ends", "given_back", "forms_and_parts", "late_and_ends"],
)
def test_a_world_of_its_own_and_its_end(
    tmp_path: Path, several: Sequence[Callable[..., None]], ends_by_death: bool
) -> None:
    with crew(4) as ranks:
        ranks.run(scenarios.leave)
        for scenario in several:
            ranks.run(scenario, None, str(tmp_path))
        if ends_by_death:
            found = ranks.run(scenarios.dies, None, str(tmp_path), dying=(2,))
            assert found == [None, None, 7, None]


@pytest.mark.long
@pytest.mark.timeout(700)
def test_a_thousand_groups_leave_nothing(tmp_path: Path) -> None:
    """1,000 groups by four ranks on two idle cores take 195 to 230 s; the time-outs are for ranks that hang."""
    with crew(4) as ranks:
        ranks.run(scenarios.leave)
        ranks.run(scenarios.given_back, None, str(tmp_path), 250, timeout_s=600)


def printed_by(script: str, *folders: Path, **environment: str) -> str:
    """Run a program in a Python of its own, which imports from this checkout, too; return what it prints."""
    path = [str(folder) for folder in (*folders, ROOT / "src")]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_the_flight_recorder_of_torch_has_the_calls_of_gloo() -> None:
    """And the report those that Sidelane makes: torch gives Python no way to record one."""
    script = """
import json, torch, torch.distributed as dist
import sidelane
from torch._C import _distributed_c10d as c10d
sidelane.register()
dist.init_process_group("sidelane", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.all_reduce(torch.ones(5, dtype=torch.float64))
if hasattr(c10d, "_dump_fr_trace_json"):  # torch 2.13
    entries = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))["entries"]
    print([(entry["profiling_name"], entry["input_sizes"], entry["process_group"]) for entry in entries])
    assert [(entry["profiling_name"], entry["input_sizes"]) for entry in entries] == [("gloo:all_reduce", [[5]])]
    assert entries[0]["process_group"][0] == dist.group.WORLD.group_name
assert [(row.where, row.nbytes) for row in sidelane.report().rows] == [("sidelane", 12), ("gloo", 40)]
dist.destroy_process_group()
os._exit(0)  # once in some hundred runs the end of the interpreter met a thread of torch's, which ended the process
"""
    printed_by(f"import os\n{script}", TORCH_FR_BUFFER_SIZE="100")


def test_an_installed_package_needs_no_import(tmp_path: Path) -> None:
    """torch calls the entry points of what is installed; here, of what pyproject.toml says."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    servers = {"vllm.general_plugins", "sglang.srt.plugins"}
    assert set(entries) == {"torch.backends", "torch.distributed.backends", *servers}
    folder = tmp_path / "sidelane-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: sidelane-of-this-test\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {at}" for name, at in those.items()) for group, those in entries.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    script = """
import sys, torch, torch.distributed as dist
assert "sidelane.integrations.registration" in sys.modules
assert "sidelane.integrations.process_group" not in sys.modules, "importing torch imports all of it"
dist.init_process_group("sidelane", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
import sidelane
print(sidelane.report())
dist.destroy_process_group()
"""
    assert "all_reduce  float32  cpu     sidelane" in printed_by(script, tmp_path)


def test_importing_torch_costs_few_modules_and_never_fails() -> None:
    """Every ``import torch`` of the environment imports the modules of the entry point of ``torch.backends``."""
    script = """
import sys, warnings
import torch
before = set(sys.modules)
from sidelane.integrations.registration import autoload
autoload()
new = set(sys.modules) - before
assert "sidelane" in torch.distributed.Backend.backend_list
foreign = sorted(name for name in new if name.partition(".")[0] != "sidelane")
assert not foreign and len(new) <= 16, (foreign, sorted(new))

def fails(*args, **options):
    raise OSError("a torch of the future")

torch.distributed.Backend._plugins.clear()
torch.distributed.Backend.register_backend = fails
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    autoload()
assert [str(one.message) for one in seen] == ["sidelane is no backend here: OSError: a torch of the future"]
"""
    printed_by(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
