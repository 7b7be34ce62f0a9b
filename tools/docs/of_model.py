"""Tables of predictions next to measurements."""

from __future__ import annotations

from docs.measured import RESULTS, Cells
from sidelane_lab.harness.study import read
from sidelane_lab.machines.load import named
from sidelane_lab.model.layer import parts_us
from sidelane_lab.model.training import compute_us, sustained
from sidelane_lab.papers.results import STEPS as STEP_JUDGE
from sidelane_lab.studies.fsdp.cases import FLOORS, step_of
from sidelane_lab.studies.fsdp.rows import FsdpRow

STEPS = {
    "nccl": "NCCL",
    "nccl_ce": "NCCL, copy engines",
    "sidelane_ag": "Sidelane, gathers",
    "sidelane": "Sidelane",
    "sidelane_copies": "Sidelane, copied out",
    "compute_only": "nothing",
    "compute_only_straight": "nothing, no copy-out",
}


def steps(machine: str) -> Cells:
    """Milliseconds of training steps and what Sidelane gains, measured and predicted in brackets."""
    verdicts = STEP_JUDGE.verdicts(named(machine), read(RESULTS / machine / "fsdp.json").rows, "fsdp")
    shown: dict[str, dict[str, str]] = {}
    for verdict in verdicts:
        kind, _, rest = verdict.claim_id.partition("/")[2].partition("/")
        case, _, implementation = rest.partition("/")
        if implementation:
            numbers = f"{verdict.claimed / 1e3:.1f} ({verdict.predicted / 1e3:.1f})"
            shown.setdefault(case.replace("b x", "B x"), {})[f"{kind} {implementation}"] = numbers
    wanted = [*(f"steps {name}" for name in STEPS), "gains sidelane"]
    cells = [["", *STEPS.values(), "gain by Sidelane"]]
    return cells + [[case, *(of_case[name] for name in wanted)] for case, of_case in shown.items()]


def step_parts(machine: str) -> Cells:
    """Milliseconds of steps without communication by kernels, profiled and predicted in brackets."""
    described = named(machine)
    shown = []
    for row in read(RESULTS / machine / "fsdp-profile.json").rows:
        assert isinstance(row, FsdpRow)
        if row.implementation not in FLOORS:
            continue
        step, straight = step_of(row), FLOORS[row.implementation]
        parts = parts_us(sustained(described), step, straight=straight)
        whole, gemm, attention = row.profiled_ms or 0.0, row.gemm_ms or 0.0, row.attention_ms or 0.0
        rest = parts["elementwise"] + parts["copies"]
        pairs = [(gemm, parts["gemm"]), (attention, parts["attention"]), (whole - gemm - attention, rest)]
        pairs.append((whole, compute_us(described, step, straight=straight)))
        name = f"{row.model.split('-')[1].upper()} x {row.layers}, {row.batch}x{row.seq}, {STEPS[row.implementation]}"
        shown.append([name, *(f"{ms:.1f} ({us / 1e3:.1f})" for ms, us in pairs)])
    return [["", "GEMMs", "attention", "everything else", "step"], *shown]
