"""Plans that wait for one trigger: all calls of an invocation are submitted ahead of it, behind one wait.

    caller                write trigger, wait done
    stream 1   wait trigger | the plan as it is ...  | done, finished

One word holds all of a rank's queues, so that one store fires them: the other streams fork behind the wait. (Programs
made by ``transform.prelaunch`` have a trigger for each queue. The DMA collectives paper names both, in 4.2.5.)

Armed streams hold hardware channels until they are fired: the work on which the trigger depends needs a free channel.
They cannot be disarmed, only fired.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from sidelane.errors import UnavailableError
from sidelane.execute.cuda.calls import (
    MAX_BATCH,
    DeviceWord,
    HostWord,
    MemOps,
    StreamCall,
    StreamPlan,
    WaitValue,
    WriteValue,
)
from sidelane.program.ir import EPOCH, Flag


@dataclasses.dataclass(frozen=True, slots=True)
class HardwareChannels:
    """The hardware channels to which a vendor's driver maps the streams of a process.

    Attributes:
        variable: environment variable that sets their number.
        default: number of them without it.
    """

    variable: str
    default: int

    def count(self) -> int:
        """Return the number of channels of this process."""
        text = os.environ.get(self.variable, "")
        return int(text) if text.isdigit() and int(text) else self.default


CUDA_CHANNELS = HardwareChannels("CUDA_DEVICE_MAX_CONNECTIONS", 8)


def hold_back(plan: StreamPlan, trigger: Flag) -> StreamPlan:
    """Put a plan behind ``trigger``, on streams of its own, and let its end be seen in ``DeviceWord.DONE``.

    Args:
        plan: plan of a program with epochs that is not prelaunched.
        trigger: flag of the rank that fires it.
    """
    assert not plan.ahead, "what has triggers is released first"
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
    done = (*last.ops[:-1], WriteValue(DeviceWord.DONE, EPOCH))
    steps[-1:] = [StreamCall(0, MemOps(ops)) for ops in _cut((*done, ended))]
    ahead = tuple(StreamCall(step.stream + 1, step.call) for step in steps)
    fire = MemOps((WriteValue(trigger, EPOCH), WaitValue(DeviceWord.DONE, EPOCH)))
    return StreamPlan(plan.streams + 1, plan.events, plan.signal_words, ahead, (StreamCall(0, fire),))


def require_free_channel(
    collective: str, variant: str, streams: int, channels: HardwareChannels = CUDA_CHANNELS
) -> None:
    """Refuse a program that would wait for its trigger on every hardware channel, so that it could not be set.

    Raises:
        UnavailableError: it needs too many channels; the allowed number is named.
    """
    if streams >= channels.count():
        raise UnavailableError(
            f"prelaunch: {collective} {variant} holds {streams} streams back, of {channels.count()} hardware "
            f"channels ({channels.variable}), so that no trigger would get through; allowed: a variant with "
            "fewer engines, such as b2b, or more channels"
        )


def _cut(ops: Sequence[WriteValue | WaitValue]) -> list[tuple[WriteValue | WaitValue, ...]]:
    return [tuple(ops[start : start + MAX_BATCH]) for start in range(0, len(ops), MAX_BATCH)]
