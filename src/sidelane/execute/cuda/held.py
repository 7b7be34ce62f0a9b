"""Plans that wait for a trigger: everything of an invocation is submitted ahead of it, behind one wait.

    stream 0   wait trigger | the plan as it is ...  | done, finished
    caller                write trigger | wait done

One word holds all of a rank's queues, so that one store fires them: the side streams fork behind the wait. (Programs
made by ``transform.prelaunch`` have a trigger for each queue. The DMA collectives paper names both, in 4.2.5.)
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from sidelane.errors import UnavailableError
from sidelane.execute.cuda.bind import WORD_BYTES
from sidelane.execute.cuda.calls import Gate, HostWord, MemOps, Plan, StreamCall, WaitValue, WriteValue
from sidelane.execute.cuda.driver import Driver
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.plan import MAX_BATCH
from sidelane.program.ir import EPOCH
from sidelane.program.words import WORD_MASK

DEFAULT_CONNECTIONS = 8
"""Hardware channels to which a context maps its streams, unless ``CUDA_DEVICE_MAX_CONNECTIONS`` says otherwise."""


def hold_back(plan: Plan, trigger: Gate) -> Plan:
    """Put a plan behind ``trigger``, and let its end be seen in ``Gate.DONE``.

    Args:
        plan: of a program with epochs that is not prelaunched.
        trigger: the word that fires it.

    Raises:
        ValueError: the plan submits something ahead as it is.
    """
    if plan.ahead:
        raise ValueError("hold_back: the plan has calls ahead of the collective (allowed=programs without triggers)")
    steps = list(plan.steps)
    wait = WaitValue(trigger, EPOCH)
    first = steps[0]
    if not first.stream and isinstance(first.call, MemOps) and len(first.call.ops) < MAX_BATCH:
        steps[0] = StreamCall(0, MemOps((wait, *first.call.ops)))
    else:
        steps.insert(0, StreamCall(0, MemOps((wait,))))
    # In front of the word to the host, which takes a microsecond or two.
    ended = WriteValue(HostWord.FINISHED, EPOCH)
    last = steps[-1].call
    assert isinstance(last, MemOps), "every plan ends with the words to the host"
    assert last.ops[-1] == ended
    done = (*last.ops[:-1], WriteValue(Gate.DONE, EPOCH))
    steps[-1:] = [StreamCall(0, MemOps(ops)) for ops in _cut((*done, ended))]
    return dataclasses.replace(plan, steps=tuple(steps))


def most_connections() -> int:
    """Hardware channels of this process, as the environment sets them for CUDA."""
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(text) if text.isdigit() and int(text) else DEFAULT_CONNECTIONS


def require_free_channel(collective: str, variant: str, streams: int) -> None:
    """Refuse what would wait for a trigger on every hardware channel: no trigger came through.

    Raises:
        UnavailableError: with what is allowed.
    """
    if streams >= most_connections():
        raise UnavailableError(
            f"prelaunch: {collective} {variant} holds {streams} streams back, of {most_connections()} hardware "
            "channels (CUDA_DEVICE_MAX_CONNECTIONS), so that no trigger would get through; allowed: a variant with "
            "fewer engines, such as b2b, or more channels"
        )


class Gates:
    """The words of one executor, for all of its programs that are fired: one is armed at a time, and epochs grow.

    Attributes:
        addresses: where streams and kernels reach them.
    """

    def __init__(self, driver: Driver) -> None:
        first, self._owner = driver.device_words(2)
        self._host = driver.host_words(1)
        self._host_word = self._host.array.data  # a store takes a third of the time
        self.addresses: dict[HostWord | Gate, int] = {
            Gate.TRIGGER: first,
            Gate.DONE: first + WORD_BYTES,
            Gate.HOST_TRIGGER: self._host.address,
        }

    def store(self, epoch: int) -> None:
        """Store an epoch in the trigger that the host reaches."""
        self._host_word[0] = epoch & WORD_MASK


class SharedValueOps:
    """Memory operations that all have one value, bound to the streams they are submitted on.

    Args:
        driver: of the device.
        writes: addresses of words that get the value.
        waits: addresses of words that are waited for, until they have reached the value.
    """

    def __init__(self, driver: Driver, writes: Sequence[int], waits: Sequence[int]) -> None:
        self._driver = driver
        self._ops = driver.memory_ops()
        for address in writes:
            self._ops.write(address, 0)
        for address in waits:
            self._ops.wait(address, 0, equal=False)
        (self._set_all,) = self._ops.setters(range(len(writes) + len(waits)))

    def set(self, value: int) -> None:
        """Give every operation this value; what was submitted keeps its own."""
        self._set_all(value & WORD_MASK)

    def bind(self, stream: int) -> Bound:
        """The call that submits them on ``stream``, which must not be the legacy default stream."""
        return self._driver.bind_memory_ops(self._ops, stream)


def _cut(ops: tuple[WriteValue | WaitValue, ...]) -> list[tuple[WriteValue | WaitValue, ...]]:
    return [ops[start : start + MAX_BATCH] for start in range(0, len(ops), MAX_BATCH)]
