"""A program and its proof, and what the proof says when a command is left out."""

from __future__ import annotations

import dataclasses
import time

from sidelane.errors import ProgramError
from sidelane.program.builders import build
from sidelane.program.collective import all_gather
from sidelane.program.ir import Program, Wait
from sidelane.program.verify import Verification, verify

SHARD_BYTES = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """What was shown.

    Attributes:
        program: a right one.
        verification: of it.
        seconds: that the proof took.
        left_out: the command that the wrong one lacks, in words.
        refusal: the first thing that is wrong with it.
    """

    program: Program
    verification: Verification
    seconds: float
    left_out: str
    refusal: str


def prove(ranks: int = 2) -> Proof:
    """Prove an all-gather, then try it without the wait for the peer's output to be free."""
    program = build(all_gather([SHARD_BYTES] * ranks), "b2b")
    began = time.perf_counter()
    verification = verify(program)
    seconds = time.perf_counter() - began
    first = program.queues[0]
    index = next(index for index, command in enumerate(first.commands) if isinstance(command, Wait))
    mistaken = dataclasses.replace(first, commands=(*first.commands[:index], *first.commands[index + 1 :]))
    wrong = dataclasses.replace(program, queues=(mistaken, *program.queues[1:]))
    try:
        verify(wrong)
    except ProgramError as error:
        refusal = next(line for line in error.violations if "race" in line)
    else:
        raise AssertionError("verify accepts a program without its handshake")
    left_out = f"rank {first.rank} {first.engine}, command {index}"
    return Proof(program, verification, seconds, left_out, refusal)
