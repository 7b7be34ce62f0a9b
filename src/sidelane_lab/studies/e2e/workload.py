"""The protocol of the end-to-end study's workloads: a model's step by several ways of communicating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sidelane.session import Communicator


@dataclass(frozen=True)
class Prepared:
    """One rank's steps of one workload at one size; all ways have the same weights and inputs."""

    steps: Mapping[str, Callable[[], torch.Tensor]]
    """A step by each way; it enqueues its work on the current stream and returns the tensor that is compared. The first
    way is the library's (NCCL or Gloo); "none" leaves the communication out, and its result is not compared."""
    tolerance: float
    """The largest allowed norm of a difference over the norm of the first way's result."""
    units: int
    """Tokens or samples that all ranks finish in a step."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Bytes that leave a GPU, parameters and the like, by name with the unit in it."""
    uncapturable: frozenset[str] = frozenset()
    """Ways that a CUDA graph cannot hold."""


class Workload(Protocol):
    """A model at several sizes."""

    name: str
    unit: str
    """Noun of the units: tokens or samples."""
    sizes: Mapping[str, object]
    """Parameters by the name of a size; "tiny" is what CPU ranks run."""

    def prepare(
        self, size: object, group: torch.distributed.ProcessGroup, comm: Communicator, device: torch.device
    ) -> Prepared: ...
