"""Programs of a user's own that are closed around a failure: CPU ranks on the path of GPUs."""

from __future__ import annotations

import closed_cases
import pytest
from ranks import RankPool


@pytest.mark.parametrize("when", ["before", "after", "under way"])
def test_flags_of_a_closed_program_are_let_alone(pool: RankPool, when: str) -> None:
    """Their memory may have another owner by the time at which a failure lets all waits go."""
    for rank, (errors, alone) in enumerate(pool.run(closed_cases.stores_behind_close, 2, when)):
        assert len(errors) == 1 and "a failure" in errors[0]
        if rank == 0 or when != "under way":  # then the other rank's flags get the signals of this one's last call
            assert alone == [True, True]
