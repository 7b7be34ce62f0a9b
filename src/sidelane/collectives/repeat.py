"""Repeated calls on GPUs: compiled code (``native/replay.c``) remembers them and makes them again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch

from sidelane.collectives.arguments import Arguments
from sidelane.collectives.backend import KernelRunnable
from sidelane.collectives.call_cache import MOST_BYTES, Key, PreparedCall, Shape, ShapeProgram
from sidelane.collectives.call_forms import SingleCall
from sidelane.collectives.calls import Calls, count_writes
from sidelane.collectives.pool_offsets import PlacedStorage
from sidelane.collectives.prepare import Preparer
from sidelane.execute.base import CallerStream, Questions
from sidelane.memory import heap
from sidelane.native import Effect
from sidelane.program.caching import loaded_bytes

if TYPE_CHECKING:
    from sidelane.collectives.backend_cuda import CudaBackend

MOST_TENSORS = 128
"""Largest number of tensors, in all lists together, of a remembered call: ``MOST_TENSORS`` of ``native/replay.c``."""

MOST_MOVED = 2
"""Largest number of tensors of a call that is remembered by its shape."""

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, type(None))

Guard = tuple[object, str, object]
"""Object, attribute, and the very object that lets a call pass."""


class Repeats:
    """Passes calls to compiled code, which makes them again after two calls.

    Threads may share it, as they share a communicator.

    Args:
        module: ``native/replay.c``.
        questions: the queries that tell the caller's stream and whether it is captured.
        backend, calls, arguments, preparer: those of the communicator, which is between two calls.

    Attributes:
        backend: backend of the communicator.
        replay: the calls in compiled code; it counts those that it has made.
        run: makes a call again: ``run(kind, tensors, details, variant, beside)``; with one argument more on a stream
            beside the caller's, and returns its ``Mark``. It returns False, without doing anything, if the call is not
            remembered or has changed; and None if it cannot run now: after a failure, inside a capture, or while
            another thread submits. Python makes the call then, or raises the error.
    """

    def __init__(
        self,
        module: ModuleType,
        questions: Questions,
        backend: CudaBackend,
        calls: Calls,
        arguments: Arguments,
        preparer: Preparer,
    ) -> None:
        self.backend = backend
        self._calls, self._arguments, self._preparer = calls, arguments, preparer
        control, own, lock = calls.control, calls.control.own, backend.executor.lock
        guards = (
            (calls, "closed", False),
            (calls, "failure", None),
            (calls, "armed", None),
            (backend.executor.watch, "failure", None),
        )
        self.replay = module.Replay(
            guards,
            *(questions.stream_of, questions.capturing, questions.current_device, questions.device),
            *(heap.generation_cell, (backend, "last_stream"), (calls, "numbers")),
            *(tuple(own.slots), tuple(record.address for record in own.slots), own.begun_address),
            *(control, control.post_call, control.lock, lock.acquire, lock.release),
            *(count_writes, torch.Tensor, *((questions.streams,) if questions.streams else ())),
        )
        self.run = self.replay.run
        self._nbytes = 0  # of what was passed since all was forgotten
        preparer.cache.keepers.append(self.forget)

    def forget(self) -> None:
        """Forget all calls."""
        self._nbytes = 0
        self.replay.forget()

    def remember(
        self,
        key: Key,
        prepared: PreparedCall,
        caller: CallerStream,
        *,
        call_form: SingleCall | None = None,
        storages: Sequence[PlacedStorage] = (),
        shape: Shape | None = None,
        program: ShapeProgram | None = None,
    ) -> None:
        """Remember a call that has just been made, if it will be made the same way again.

        Args:
            key: kind, variant, beside, details, frozen, generation, identities of the tensors, and more in pools.
            prepared: the prepared call that ran.
            caller: the stream on which it ran.
            call_form: the caller's arguments, for a call with lists; the details in ``key`` hold more than these then.
            storages: storages of its tensors, if any of them lies in a pool.
            shape: shape of the call, to make calls of it again at any addresses; None: only at these.
            program: program of the shape.
        """
        kind, variant, beside, details, frozen, made_at, identities = key[:7]
        known = cast("tuple[tuple[Any, ...], ...]", identities)
        if frozen or not 0 < len(known) <= MOST_TENSORS or not all(map(_is_ordinary, known)):
            return
        form: object = None
        if shape is not None and program is not None:
            if not shape.ordinary or len(shape.addresses) > MOST_MOVED:
                return
            tensor_of = dict(program.tensor_indices)
            repetition = prepared.loaded.repetition(caller, [*tensor_of])
            rows = tuple((tensor_of[each.buffer], *each[1:]) for each in repetition.followers) if repetition else ()
            index = self._arguments.device.index
            place = heap.symmetric_ranges(), -1 if index is None else index
            form = *place, shape.distance is not None, shape.distance or 0, rows
        else:
            repetition = prepared.loaded.repetition(caller)
        payload = self._calls.control.payload(prepared.signature)
        generation = heap.generation_cell[0]  # the number itself, not an equal one: it is compared by identity
        if repetition is None or payload is None or generation != made_at:
            return  # it cannot be repeated, or memory was allocated since it was looked up
        lists = 0
        tensors = tuple(
            identity[:3] if each is None else (*identity[:3], each[0].cdata, each[1])
            for identity, each in itertools.zip_longest(known, storages)
        )
        if call_form is not None:
            details, lists = call_form.details, len(call_form.tensors)
        notes = (*repetition.notes, (Effect.SET, self._calls, "last_choice", prepared.choice))
        if self._nbytes > MOST_BYTES:
            self.forget()  # all: those that come again are passed again
        self._nbytes += loaded_bytes(prepared.loaded.program)
        self.replay.remember(
            *(kind, tensors, lists, details, variant, beside, generation, caller[0]),
            *(prepared.signature, payload, repetition.steps, repetition.words, notes, repetition.failed),
            *((prepared, storages), form),
        )
        preparer = self._preparer
        is_there = preparer.cache.prepared(key) is prepared if shape is None else preparer.program_of(shape) is program
        if not is_there:  # another thread has moved staging, maybe before it was remembered
            self.forget()

    def launch(
        self,
        prepared: PreparedCall,
        caller: CallerStream,
        tensors: Sequence[torch.Tensor | None],
        arguments: Sequence[int],
        guards: tuple[Guard, ...],
    ) -> Callable[..., bool | None] | None:
        """Return a function that makes a launch again on other tensors of the same layouts; None if only Python can.

        It makes it on the stream of ``caller``, and returns False or None as :attr:`run` does. It does not compare
        layouts: only types, and addresses modulo 16 bytes, for which kernels are compiled.

        Args:
            prepared: the launch, which has just been made.
            caller: the stream on which it ran.
            tensors: those of its tensors that may be others, plain ones; None for arguments that stay None.
            arguments: their numbers among the kernel's arguments.
            guards: while they pass, the launch can be made.
        """
        payload = self._calls.control.payload(prepared.signature)
        found = cast("KernelRunnable", prepared.loaded).following(caller, arguments)
        if payload is None or found is None or not all(type(tensor) in _PLAIN_TYPES for tensor in tensors):
            return None
        repetition, words = found
        places = tuple(
            (type(tensor), 0 if tensor is None else tensor.data_ptr(), word)
            for tensor, word in zip(tensors, words, strict=True)
        )
        notes = (*repetition.notes, (Effect.SET, self._calls, "last_choice", prepared.choice))
        launch = self.replay.launch(
            *(caller[0], prepared.signature, payload, repetition.steps, notes, repetition.failed, guards, places)
        )
        run: Callable[..., bool | None] = launch.run
        return run


def _is_ordinary(identity: tuple[Any, ...]) -> bool:
    """Return True for the identity (``collectives/arguments.py``) of a plain tensor.

    A plain tensor has an address, is contiguous and real, and is no negated view.
    """
    match identity:
        case (address, _, dtype, True, False) | (address, _, dtype, True):
            return bool(address) and not dtype.is_complex
    return False
