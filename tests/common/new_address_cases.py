"""Counts of the work that the first call of a shape makes."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sidelane import Communicator, Config
from sidelane.collectives import call_forms, plan, prepare
from sidelane.collectives.arguments import Arguments
from sidelane.execute.cuda import CudaProgram, loaded

STAGED = Config(timeout_s=30)
KINDS = ("all_gather", "all_to_all", "broadcast", "gather", "scatter", "reduce_scatter", "all_reduce")

WORKED_OUT = {*KINDS, "check_variant", "choose", "verify", "prepare"}
"""What the first call of a shape does, and others of it do not."""

LOADED = {"Frame", "create_event", "memory_ops"}
"""Likewise, of what is loaded."""


@contextlib.contextmanager
def derived(driver: Any = None) -> Iterator[collections.Counter[str]]:
    """How often calls do what only the first of a shape has to."""
    found: collections.Counter[str] = collections.Counter()
    watched: list[tuple[Any, str]] = [(Arguments, kind) for kind in KINDS]
    watched += [(call_forms, "check_variant"), (plan, "choose"), (plan, "verify"), (prepare.Preparer, "prepare")]
    watched += [(loaded, "Frame"), (CudaProgram, "at")]
    watched += [(driver, "create_event"), (driver, "memory_ops")] if driver is not None else []
    with contextlib.ExitStack() as stack:
        for owner, name in watched:
            real = getattr(owner, name)

            def count(*given: Any, real: Any = real, name: str = name, **options: Any) -> Any:
                found[name] += 1
                return real(*given, **options)

            stack.enter_context(mock.patch.object(owner, name, count))
        yield found


def prepared(comm: Communicator) -> int:
    """How many calls are remembered by their addresses."""
    return sum(entry.prepared is not None for entry in comm.preparer.cache)
