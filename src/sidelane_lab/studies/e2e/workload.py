"""Form of the workloads of the end-to-end study: a model's step by several ways of communicating."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sidelane.integrations.ledger import SIDELANE
from sidelane.session import Communicator
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.workgroups import resident, stream_gbps
from sidelane_lab.studies.torch_groups import make_group


@dataclass(frozen=True)
class Prepared:
    """One rank's steps of one workload at one size; all ways have the same weights and inputs."""

    steps: Mapping[str, Callable[[], torch.Tensor]]
    """A step by each way; it enqueues its work on the current stream and returns the tensor that is compared. The first
    way is the library's, "nccl", which the study calls "gloo" on CPU ranks; "none" leaves the communication out, and
    its result is not compared."""
    tolerance: float
    """The largest allowed norm of a difference over the norm of the first way's result."""
    units: int
    """Tokens or samples that all ranks finish in a step."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Bytes that leave a GPU, parameters and the like, by name with the unit in it."""


@dataclass(frozen=True)
class EndToEndWorkload:
    """A model's step, at several sizes.

    Attributes:
        name: of the workload, and of its module.
        unit: the word "tokens" or "samples".
        sizes: parameters by the name of a size; "tiny" is what CPU ranks run.
        prepare: makes the steps of one size, with the library's group, on the communicator's device. Collective.
        predicted_us: predicts by how much a step of each way is longer than "none", or of sizes without that how long
            it is: the sum of transfers, and of kernels that a way has for them, one after the other, which is what a
            step exposes that hides none of it. Ways of which the model knows too little are left out. The machine is
            one node, with figures of kernels that compute and send.
    """

    name: str
    unit: str
    sizes: Mapping[str, Any]
    prepare: Callable[[Any, torch.distributed.ProcessGroup, Communicator, torch.device], Prepared]
    predicted_us: Callable[[Any, Machine], Mapping[str, float]]


def moved_us(machine: Machine, nbytes: float) -> float:
    """Return the time of a kernel that reads and writes so many bytes of its GPU's memory, both together."""
    return float(machine.matmul.launch_us) + nbytes / (stream_gbps(machine, resident(machine)) * 1e3)


@functools.cache
def sidelane_group(device: torch.device) -> torch.distributed.ProcessGroup:
    """Return a group of Sidelane's, which lasts as long as this process. Collective where it is new."""
    return make_group(SIDELANE, device)
