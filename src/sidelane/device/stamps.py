# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Time stamps: the activities of each program of a kernel, with the times at which they begin.

A program writes into its own row the time and the activity that begins *then* and lasts until its next stamp; ``END``
is the last. Without a buffer (None) no code is compiled, so that the kernel is the same as without stamps::

    stamp(stamps, COMPUTE, peer)      # ... a tile for a peer
    stamp(stamps, SEND, peer)         # ... its stores
    stamp(stamps, END)

A buffer is int64: ``most``, then for each program the number of its stamps and ``most`` pairs of a time in nanoseconds
and ``8 * (peer + 1) + what``. Stamps beyond ``most`` are counted only.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from sidelane.device.triton_language import globaltimer, hip, interpreter, tl, triton

KINDS = ("compute", "send", "wait", "add", "end")
"""Names of the activities, in the order of their numbers."""

COMPUTE = tl.constexpr(KINDS.index("compute"))
SEND = tl.constexpr(KINDS.index("send"))
WAIT = tl.constexpr(KINDS.index("wait"))
ADD = tl.constexpr(KINDS.index("add"))
END = tl.constexpr(KINDS.index("end"))


def _host_clock() -> tl.tensor:
    """Return the host's monotonic clock, which all processes of a host share, for interpreted kernels."""
    return tl.tensor(interpreter.TensorHandle(np.array([time.monotonic_ns()], np.int64), tl.int64), tl.int64)


AMD_TICK_NS = tl.constexpr(10)
"""Nanoseconds of a tick of ``s_memrealtime``: it counts at 100 MHz on CDNA GPUs, the same on all dies."""


@triton.jit
def amd_clock_ns():
    """Return the time of an AMD GPU's constant clock in nanoseconds."""
    return hip.memrealtime() * AMD_TICK_NS


_device_clock = globaltimer if torch.version.hip is None else amd_clock_ns
_clock_ns = _host_clock if triton.knobs.runtime.interpret else _device_clock


@triton.jit
def stamp(stamps, WHAT: tl.constexpr, peer=-1, MEETS: tl.constexpr = True):
    """Stamp that this program begins activity WHAT, for ``peer`` or, with -1, for no particular one. Threads meet here.

    ``stamps``: the buffer, or None. MEETS: False to omit the barrier, which would prevent prefetching in a loop.
    """
    if stamps is not None:
        if MEETS:
            tl.debug_barrier()  # all threads have come here
        most = tl.load(stamps)
        row = stamps + 1 + tl.program_id(0) * (1 + 2 * most)
        number = tl.atomic_add(row, 1, sem="relaxed", scope="gpu")
        place = row + 1 + 2 * number
        tl.store(place, _clock_ns(), mask=number < most)
        tl.store(place + 1, 8 * (peer + 1) + WHAT, mask=number < most)
