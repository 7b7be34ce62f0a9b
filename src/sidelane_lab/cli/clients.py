"""The command ``sidelane clients``: other people's programs, by who makes their collectives."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from sidelane_lab.harness.help import HOW
from sidelane_lab.harness.options import StudyOptions, count, names, option, require_file_to_resume, study_command

PROGRAMS = (
    *("ddp", "fsdp", "tensor", "torchtitan"),
    *("megatron", "megatron-tensor", "megatron-sequence", "megatron-experts"),
)
SECONDS: Any = {"group": HOW, "type": click.FloatRange(min=0, min_open=True), "metavar": "SECONDS"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientOptions(StudyOptions):
    """Measure other people's programs with each process group.

    The Llama of transformers at the sizes of five public models, with random weights, is trained under
    DistributedDataParallel and FSDP2, and decodes under DTensor's tensor parallelism: on NCCL's group (Gloo's), on
    Sidelane's, with sidelane.fsdp.enable, and without communication. torchtitan 0.2 trains a Llama, and megatron-core
    GPTs of the same sizes: with its distributed optimizer, tensor parallel, and with experts. Losses are compared with
    those of NCCL. Rows of a program whose package is not installed say so.
    """

    study = "clients"
    examples = (
        ("sidelane clients --json clients.json --resume", "all of it, in several goes if need be"),
        ("sidelane clients --programs fsdp --models llama-3.2-3b --batch 2", "one program, with more tokens"),
        ("sidelane clients --programs megatron --models llama-3.2-1b", "Megatron-core's distributed optimizer"),
        ("sidelane clients --device cpu --ranks 2", "the same between CPU processes, with a tiny model"),
    )

    programs: tuple[str, ...] = names(
        "--programs", PROGRAMS, "Measure only these.", allowed=PROGRAMS, some=True, shown="all"
    )
    models: tuple[str, ...] = names(
        "--models",
        (),
        "Measure only these: qwen2.5-0.5b, llama-3.2-1b, llama-3.2-3b, mistral-7b, llama-3.1-8b, tiny.",
        shown="the first five, on CPUs tiny",
    )
    batch: int | None = option(
        "--batch",
        None,
        "Sequences of a rank in training, of 2,048 tokens (16 on CPUs).",
        type=click.IntRange(min=1),
        metavar="N",
        show_default="8 for the smallest model to 1 for the largest",
    )
    compiled: bool = option(
        "--compiled",
        False,
        "Decode by torch.compile in a graph, too; takes minutes.",
        is_flag=True,
    )
    warmup: int = count("--warmup", 4, "Steps before the measured ones.")
    rounds: int = count("--rounds", 8, "Rounds in which the ways take turns.")
    steps: int = count("--steps", 2, "Steps of a round.")
    pair_s: float = option(
        "--seconds", 20.0, "For the rounds of a program with a model; four are run in any case.", **SECONDS
    )
    budget_s: float = option(
        "--budget", 420.0, "Begin no further model after so much time; --resume goes on.", **SECONDS
    )
    resume: bool = option(
        "--resume", False, "Keep what --json has, and measure what it lacks.", group=HOW, is_flag=True
    )
    done: frozenset[Any] = frozenset()  # keys of rows that are there: the study fills them in

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        require_file_to_resume(self)


clients = study_command("clients", ClientOptions)
