"""DeepSpeed with its flat parameters in Sidelane's symmetric memory: the engine is made inside of a pool.

torchrun --nproc-per-node 2 tests/clients/deepspeed_pool.py sidelane
"""

from collections.abc import Iterable
from typing import Any

import client
import deepspeed
from deepspeed.utils.groups import _get_data_parallel_group as data_parallel_group

import sidelane

initialize, finish, flat = deepspeed.initialize, client.finish, []


def initialize_in_a_pool(**options: Any) -> tuple[Any, ...]:
    """Make an engine; what it allocates lies in a pool of the group that DeepSpeed makes for data parallelism."""
    with sidelane.pool(data_parallel_group().communicator(client.DEVICE), 16 << 20):
        made = initialize(**options)
    flat.extend(getattr(made[1], "bit16_groups_flat", []))  # stages 1 and 2
    return made


def finish_and_look(values: Iterable[float]) -> None:
    """Look how calls reach the flat parameters, before the group ends."""
    comm = data_parallel_group().communicator(client.DEVICE)
    reached = [comm.reach(tensor).how for tensor in flat]
    assert reached == ["symmetric"] * len(flat) and flat, reached
    finish(values)


if client.BACKEND == "sidelane":
    deepspeed.initialize, client.finish = initialize_in_a_pool, finish_and_look
import deepspeed_zero  # noqa: F401 (the program itself)
