"""Every table that is made from results/, by the name that its page gives it.

A page holds a table between two comments::

    <!-- table: broadcasts-h200x4 -->
    ...
    <!-- end of table -->

What stands between them is written by ``python tools/make_docs.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from docs import headline, of_collectives, of_model, of_pytorch, of_studies, of_workloads
from docs.measured import EXCHANGE, GATHER, REDUCED, SCATTERED, Cells

TABLES: dict[str, Callable[[], Cells]] = {
    "headline": headline.headline,
    "readme": headline.over_all_sizes,
    "beside-a-gemm": headline.beside_a_gemm,
    "by-size-h200x4": lambda: of_collectives.by_size("h200x4", *of_collectives.LISTS),
    "by-size-h200x2": lambda: of_collectives.by_size("h200x2", *of_collectives.LISTS),
    "by-size-h100x2": lambda: of_collectives.by_size("h100x2", "collectives"),
    "against-newest-h200x2": lambda: of_collectives.against_newest("h200x2"),
    "newest-times-h200x2": lambda: of_collectives.newest_times("h200x2"),
    "policies-h200x2": lambda: of_collectives.policies("h200x2"),
    "c3-newest-h200x2": lambda: of_studies.c3(
        "h200x2", ("serial", "c3_base", "c3_sp", "nccl_ce", "conccl"), "c3-nccl-2.32.json"
    ),
    "fsdp-newest-h200x2": lambda: of_pytorch.steps("h200x2", "fsdp-nccl-2.32.json"),
    "by-implementation-h200x4": of_collectives.by_implementation,
    "c3-h200x4": lambda: of_studies.c3(
        "h200x4", heads=("compute_first", "collective_first", "nccl_copy_engines", "copy_engines", "auto")
    ),
    "c3-h200x2": lambda: of_studies.c3(
        "h200x2", ("c3_base", "c3_sp", "priority", "c3_rp", "nccl_ce", "conccl", "auto", "conccl_left")
    ),
    "large-ratios-h200x4": of_collectives.large_ratios,
    "broadcasts-h200x4": lambda: of_collectives.broadcasts("h200x4"),
    "broadcasts-h200x2": lambda: of_collectives.broadcasts("h200x2"),
    "relays-h200x4": of_collectives.relays,
    "small-copies-h200x4": of_collectives.small_copies,
    "lists-h200x4": lambda: of_collectives.lists("h200x4"),
    "lists-h200x2": lambda: of_collectives.lists("h200x2"),
    "lists-by-kernels-h200x2": lambda: of_collectives.lists_by_kernels("h200x2"),
    "chain-h200x4": lambda: of_studies.chains("h200x4"),
    "kernel-times-h200x4": of_collectives.kernel_times,
    "two-shots-h200x2": of_collectives.two_shots,
    "host-h200x2": lambda: of_studies.host("h200x2"),
    "host-h200x4": lambda: of_studies.host("h200x4"),
    "energy-moving-h200x4": lambda: of_studies.energies((GATHER, EXCHANGE)),
    "energy-reducing-h200x4": lambda: of_studies.energies((SCATTERED, REDUCED)),
    "ordinary-alone-h200x2": lambda: of_pytorch.alone("h200x2", (GATHER, EXCHANGE, SCATTERED, REDUCED)),
    "ordinary-beside-h200x2": lambda: of_pytorch.beside("h200x2"),
    "ordinary-alone-h100x2": lambda: of_pytorch.alone("h100x2", (GATHER, EXCHANGE, SCATTERED, REDUCED)),
    "ordinary-beside-h100x2": lambda: of_pytorch.beside("h100x2"),
    "fused-h200x2": lambda: of_pytorch.fused("h200x2"),
    "fused-h100x2": lambda: of_pytorch.fused("h100x2"),
    "fsdp-h200x2": lambda: of_pytorch.steps("h200x2"),
    "simulator": of_studies.simulator,
    "steps-predicted-h200x2": lambda: of_model.steps("h200x2"),
    "step-parts-h200x2": lambda: of_model.step_parts("h200x2"),
    "e2e-attention-h200x2": lambda: of_workloads.steps("h200x2", "attention", ("nccl", "group", "ring")),
    "e2e-decode-h200x2": lambda: of_workloads.steps("h200x2", "decode", ("nccl", "group", "gemv")),
    "e2e-experts-h200x2": lambda: of_workloads.steps("h200x2", "experts", ("nccl", "operators, routed")),
    "e2e-recommendation-h200x2": lambda: of_workloads.steps("h200x2", "recommendation", ("nccl",)),
    "halves-h200x2": lambda: of_workloads.halves("h200x2"),
    "e2e-deep-ep-h200x2": lambda: of_workloads.deep_ep("h200x2"),
    "e2e-expert-parts-h200x2": lambda: of_workloads.expert_parts("h200x2"),
    "e2e-exposed-h200x2": lambda: of_workloads.exposed("h200x2"),
    "e2e-errors-h200x2": lambda: of_workloads.errors("h200x2"),
    "e2e-exposed-by-halves-h200x2": lambda: of_workloads.exposed_by_halves("h200x2"),
    "prelaunch-h200x2": lambda: of_studies.prelaunched("h200x2"),
    "fewer-units-h200x2": lambda: of_studies.fewer_units("h200x2"),
}


def lines_of(name: str) -> list[str]:
    """A table in Markdown.

    Raises:
        ValueError: there is no table of that name.
    """
    if name not in TABLES:
        raise ValueError(f"table: name (value={name!r}, allowed={', '.join(TABLES)})")
    cells = TABLES[name]()
    lines = [re.sub(r"\|\s+(?=\|)", "| ", f"| {' | '.join(line)} |") for line in cells]
    return [lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]
