"""Programs of a user's own that are closed around a failure: CPU ranks on the path of GPUs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from made_up_gpus import made_up_gpus
from on_ranks import on_ranks

from sidelane import Communicator, Config
from sidelane.errors import SidelaneError
from sidelane.program import collective as define
from sidelane.program.builders import build


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after", "under way"])
def test_flags_of_a_closed_program_are_let_alone(group: dist.ProcessGroup, when: str) -> None:
    """Their memory may have another owner by the time at which a failure lets all waits go."""
    with made_up_gpus(finish=False) as driver:
        comm = Communicator(group, config=Config(timeout_s=20, profile="builtin"))
        n, errors = comm.world_size, []
        program = build(define.all_gather([64] * n, in_place=True), "b2b")
        for again in range(3 if when == "before" else 1):
            bound = comm.load(program, {"output": comm.empty(64 * n, dtype=torch.uint8)})
            bound()
            comm.synchronize()
            block = bound._block
            assert block is not None
            words = block.tensor.view(torch.int32)  # kept here, where others would find their own bytes
            if again:
                bound.close()
        if when == "before":
            bound.close()
            words.fill_(-7)
        if when == "under way" and comm.rank == 0:
            bound()  # its stream waits for flags that nobody signals
        dist.barrier(group)
        if comm.rank == 1:
            comm.control.abort("a failure", (1,))
        deadline = time.monotonic() + 10
        while comm.backend.executor.watch.failure is None and time.monotonic() < deadline:
            time.sleep(1e-3)
        try:
            comm.synchronize()
        except SidelaneError as error:
            errors.append(str(error))
        if when != "before":
            bound.close()
            words.fill_(-7)
        time.sleep(0.3)  # some five releases
        alone = [bool((words == -7).all())]
        driver.synchronize()
        comm.close()
        alone.append(bool((words == -7).all()))
        assert len(errors) == 1 and "a failure" in errors[0]
        if comm.rank == 0 or when != "under way":  # then the other rank's flags get the signals of this one's last call
            assert alone == [True, True]
