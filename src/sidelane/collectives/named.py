"""The named buffers of a program of one's own: what this rank was given, checked, and how peers reach it."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping

import torch

from sidelane.collectives.arguments import Arguments, check_tensors
from sidelane.collectives.heap import Region
from sidelane.program.contract import Contract
from sidelane.program.ir import Program, writes


@dataclasses.dataclass(frozen=True)
class NamedBuffers:
    """The tensors of one rank for a program.

    Attributes:
        program: whose.
        tensors: by name of the buffer.
        regions: of the tensors.
        remote: names of the buffers that engines of peers touch.
    """

    program: Program
    tensors: Mapping[str, torch.Tensor]
    regions: Mapping[str, Region]
    remote: frozenset[str]

    @staticmethod
    def check(program: Program, given: Mapping[str, torch.Tensor], arguments: Arguments) -> NamedBuffers:
        """Find the tensors in memory.

        Raises:
            TypeError: not a program, or not tensors by name.
            ValueError: another number of ranks, a buffer that is missing or that the program does not have, too small,
                not contiguous, on another device, overlapping another one, or out of reach of the peers that touch it.
        """
        if not isinstance(program, Program):
            raise TypeError(f"load: program (value={type(program).__name__}, allowed=sidelane.program.ir.Program)")
        if program.world_size != arguments.world_size:
            raise ValueError(f"load: ranks of the program (value={program.world_size}, have={arguments.world_size})")
        if not isinstance(given, Mapping):
            raise TypeError(f"load: buffers (value={type(given).__name__}, allowed=a mapping from names to tensors)")
        definition = program.collective
        names = definition.bound if isinstance(definition, Contract) else definition.names
        remote = program.remote_buffers().intersection(names)
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"load: {program.collective} has no such buffers (value={unknown}, allowed={names})")
        sizes = {name: program.buffer_bytes(arguments.rank, name) for name in names}
        needed = [name for name in names if sizes[name] or name in remote]
        missing = [name for name in needed if name not in given]
        if missing:
            raise ValueError(f"load: buffers of rank {arguments.rank} are missing (value={missing}, needed={needed})")
        tensors = {name: given[name] for name in needed}
        check_tensors("load", *tensors.values())
        regions = dict(zip(needed, arguments.regions("load", *tensors.values()), strict=True))
        for name, region in regions.items():
            if region.nbytes < sizes[name]:
                raise ValueError(f"load: buffer {name!r} (value={region.nbytes} bytes, allowed={sizes[name]} and more)")
            if name in remote and not region.symmetric:
                raise ValueError(
                    f"load: buffer {name!r} is touched by peers, so that it must be symmetric memory on every rank "
                    "(allowed=tensors of Communicator.empty)"
                )
        for (a, one), (b, other) in itertools.combinations(regions.items(), 2):
            if arguments.overlap(one, other):
                raise ValueError(f"load: buffers {a!r} and {b!r} overlap")
        return NamedBuffers(program, tensors, regions, remote)

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the program writes on some rank."""
        names = {span.buffer for queue in self.program.queues for command in queue.commands for span in writes(command)}
        return tuple(tensor for name, tensor in self.tensors.items() if name in names)

    @property
    def signature(self) -> str:
        """What all ranks must have alike."""
        places = {name: self.regions[name].place for name in sorted(self.remote)}
        text = f"{self.program!r} {places}"
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        return f"{self.program.collective} {self.program.variant} #{digest}"
