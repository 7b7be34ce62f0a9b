"""Tables of times: those of rank 0 on all ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import RankPool

from sidelane import Communicator, Config, UnavailableError
from sidelane.choice.fused import FusedTimes
from sidelane.ops import operator


def tables(group: dist.ProcessGroup) -> list[FusedTimes]:
    """Rank 0 alone reads them, once."""
    read = iter(({"é" * 1000: ()},) if dist.get_rank(group) == 0 else ())
    with Communicator(group, config=Config(timeout_s=30)) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "fused_times", lambda *given: next(read))
        with pytest.MonkeyPatch.context() as captured:
            captured.setattr(operator, "is_captured", lambda comm: True)
            with pytest.raises(UnavailableError, match="auto in a capture needs an eager call"):
                operator.tables_of(comm)
        return [operator.tables_of(comm) for _ in range(2)]


def test_all_ranks_have_what_rank_0_has_measured(pool: RankPool) -> None:
    assert pool.run(tables, 3) == [[{"é" * 1000: ()}] * 2] * 3
