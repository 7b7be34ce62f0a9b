"""The command ``sidelane pg``: calls of ``torch.distributed``, by the process group."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.options import StudyOptions, count, names, option, size_list, study_command

OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOptions(StudyOptions):
    """Measure calls of torch.distributed with NCCL's group (Gloo's) and Sidelane's.

    all_reduce, all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single: eager, asynchronous and in a graph,
    on ordinary tensors, on such that Sidelane learns, and on pooled ones.
    """

    study = "process_group"
    examples = (
        ("sidelane pg --json process-group.json", "four operations, four sizes, and what the first use costs"),
        ("sidelane pg --device cpu --ranks 2", "the same between CPU processes, next to Gloo"),
    )

    operations: tuple[str, ...] = names(
        "--operations", OPERATIONS, "Measure only these.", allowed=OPERATIONS, some=True, shown="all four"
    )
    sizes: tuple[int, ...] = size_list(
        "--bytes",
        "Gathered bytes of an all-gather, the buffer of the others. May be repeated.",
        gpus=("64K", "1M", "16M", "256M"),
        cpus=("16K", "1M"),
    )
    implementations: tuple[str, ...] = names(
        "--implementations", (), "Measure only these: nccl (gloo), sidelane.", shown="both"
    )
    first: bool = option("--first/--no-first", True, "What the first use costs, of FSDP2 too.")
    warmup: int = count("--warmup", 2, "Rounds before the measured.", 0)
    repeats: int = count("--repeats", 9, "Measured rounds.")


pg = study_command("pg", GroupOptions)
