"""What tests of ``verify`` share: programs to start from, and a check that a refusal finds the right words."""

from __future__ import annotations

import pytest
from listings import parse

from sidelane.errors import ProgramError
from sidelane.program.collective import all_gather
from sidelane.program.ir import Program
from sidelane.program.verify import verify, verify_sequence

# An all_gather of two shards of 8 bytes, pushed. Flag 0 or 1 is the entry by rank 0 or 1, flag 2 or 3 the exit by them.
GATHER = """
rank 0 dma:0
  signal rank 1 flag 0 set epoch
  wait flag 1 >= epoch
  copy output@1[0:8] <- input@0[0:8]
  signal rank 1 flag 2 set epoch
  wait flag 3 >= epoch
rank 0 local:0
  copy output@0[0:8] <- input@0[0:8]
rank 1 dma:0
  signal rank 0 flag 1 set epoch
  wait flag 0 >= epoch
  copy output@0[8:16] <- input@1[0:8]
  signal rank 0 flag 3 set epoch
  wait flag 2 >= epoch
rank 1 local:0
  copy output@1[8:16] <- input@1[0:8]
"""

# Each rank tells the others that it has come, and resets what it has seen. There is no entry handshake.
RESET_BARRIER = """
rank 0 dma:0
  signal rank 1 flag 0 set 1
  wait flag 1 == 1
  signal rank 0 flag 1 set 0
rank 1 dma:0
  signal rank 0 flag 1 set 1
  wait flag 0 == 1
  signal rank 1 flag 0 set 0
"""

# The same with epochs, which nobody resets.
EPOCH_BARRIER = """
rank 0 dma:0
  signal rank 1 flag 0 set epoch
  wait flag 1 >= epoch
rank 1 dma:0
  signal rank 0 flag 1 set epoch
  wait flag 0 >= epoch
"""

# Everybody waits before he signals the next one.
CYCLE = """
rank 0 dma:0
  wait flag 0 >= epoch
  signal rank 1 flag 0 set epoch
rank 1 dma:0
  wait flag 0 >= epoch
  signal rank 2 flag 0 set epoch
rank 2 dma:0
  wait flag 0 >= epoch
  signal rank 0 flag 0 set epoch
"""


def gather(listing: str = GATHER, **options: object) -> Program:
    """A program that claims to gather two shards of 8 bytes."""
    return parse(all_gather((8, 8)), listing, **options)


def nothing(world_size: int, listing: str, **options: object) -> Program:
    """A program that claims to gather nothing: all that it does is wait and signal."""
    return parse(all_gather((0,) * world_size), listing, **options)


def refused(*programs: Program, words: str | tuple[str, ...], rounds: int = 3) -> tuple[str, ...]:
    """Check that verify refuses the programs, run one after the other, with all ``words`` in one of its lines.

    Returns:
        All lines of the refusal.
    """
    words = (words,) if isinstance(words, str) else words
    with pytest.raises(ProgramError) as refusal:
        if len(programs) == 1:
            verify(programs[0], invocations=rounds)
        else:
            verify_sequence(programs, rounds=rounds)
    lines = refusal.value.violations
    assert any(all(word in line for word in words) for line in lines), f"{words} in none of\n" + "\n".join(lines)
    return lines
