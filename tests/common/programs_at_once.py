"""Programs of a grid that wait for each other, under Triton's interpreter, which runs one after the other.

Here each has a thread, and they take turns: whenever one polls (a load that is volatile), the next one goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from triton.runtime import interpreter
from turns import Turns


@contextlib.contextmanager
def programs_at_once() -> Iterator[None]:
    """Let the programs of grids of one dimension take turns, inside of this context."""
    run = interpreter.GridExecutor.__call__
    load = interpreter.InterpreterBuilder.create_masked_load
    builder = interpreter.interpreter_builder
    here = threading.local()

    def load_in_turn(self: Any, *arguments: Any) -> Any:
        if arguments[-1]:
            here.turn.close()
            take_turn()
        return load(self, *arguments)

    def take_turn() -> None:
        here.turn.enter_context(here.turns.take(here.program))
        builder.grid_dim, builder.grid_idx = (here.programs, 1, 1), (here.program, 0, 0)

    def run_all(self: Any, *arguments: Any, **options: Any) -> None:
        (programs,) = self.grid
        turns = Turns(programs)

        def run_one(program: int) -> None:
            here.turns, here.program, here.programs, here.turn = turns, program, programs, contextlib.ExitStack()
            executor = copy.copy(self)
            executor.grid = (1,)
            try:
                take_turn()
                run(executor, *arguments, **options)
            finally:
                here.turn.close()
                turns.leave(program)

        with concurrent.futures.ThreadPoolExecutor(programs) as threads:
            for _ in threads.map(run_one, range(programs)):
                pass

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", run_all),
        mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", load_in_turn),
        mock.patch.object(interpreter.InterpreterBuilder, "set_grid_dim", return_value=None),
        mock.patch.object(interpreter.InterpreterBuilder, "set_grid_idx", return_value=None),
    ):
        yield
