"""What the name of a variant says, such as ``b2b``, ``two_shot_narrow`` or ``pcpy+prelaunch``."""

from __future__ import annotations

import dataclasses
import functools

PRELAUNCH = "+prelaunch"
NARROW = "_narrow"
PUSH = "_push"


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """A name, taken apart once.

    Attributes:
        algorithm: how the bytes go: ``b2b``, ``one_shot``. No suffix is part of it.
        narrow: the kernel leaves nine tenths of the SMs to others.
        pushes: the kernel stores shards with the ranks that add them up, where others let these fetch them.
        prelaunched: everything is submitted behind a trigger, ahead of the call.
    """

    algorithm: str
    narrow: bool = False
    pushes: bool = False
    prelaunched: bool = False

    @staticmethod
    @functools.cache
    def of(name: str) -> Variant:
        """Take a name apart. Suffixes are in the order of ``name``; a name that has none is its algorithm.

        >>> Variant.of("two_shot_narrow")
        Variant(algorithm='two_shot', narrow=True, pushes=False, prelaunched=False)
        """
        rest, found = name, []
        for suffix in (PRELAUNCH, PUSH, NARROW):
            found.append(rest.endswith(suffix))
            rest = rest.removesuffix(suffix)
        prelaunched, pushes, narrow = found
        return Variant(rest, narrow, pushes, prelaunched)

    @property
    def name(self) -> str:
        """What :meth:`of` takes apart."""
        suffixes = ((NARROW, self.narrow), (PUSH, self.pushes), (PRELAUNCH, self.prelaunched))
        return self.algorithm + "".join(suffix for suffix, there in suffixes if there)

    @property
    def called(self) -> str:
        """The name of the same without a trigger."""
        return dataclasses.replace(self, prelaunched=False).name

    @property
    def wide(self) -> str:
        """The name of the same with all the SMs that it can use."""
        return dataclasses.replace(self, narrow=False).name
