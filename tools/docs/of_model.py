"""Tables of what the model predicts, next to what was measured."""

from __future__ import annotations

from docs.measured import RESULTS, Cells
from sidelane.bench.claims.steps import judge_steps
from sidelane.bench.results.files import read
from sidelane.machine.load import named

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
    verdicts = judge_steps(named(machine), read(RESULTS / machine / "fsdp.json").rows)
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
