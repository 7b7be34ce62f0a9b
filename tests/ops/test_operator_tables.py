"""Tables of times: those of rank 0 on all ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from on_ranks import on_ranks

from sidelane import Communicator, Config, UnavailableError
from sidelane.ops import operator


@on_ranks(3)
def test_all_ranks_have_what_rank_0_has_measured(group: dist.ProcessGroup) -> None:
    """Rank 0 alone reads them, once."""
    read = iter(({"é" * 1000: ()},) if dist.get_rank(group) == 0 else ())
    with Communicator(group, config=Config(timeout_s=30)) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "fused_times", lambda *given: next(read))
        with pytest.MonkeyPatch.context() as captured:
            captured.setattr(operator, "is_captured", lambda comm: True)
            with pytest.raises(UnavailableError, match="auto in a capture needs an eager call"):
                operator.tables_of(comm)
        for _ in range(2):
            assert operator.tables_of(comm) == {"é" * 1000: ()}
