"""Names of variants, such as ``b2b`` or ``two_shot_narrow``, taken apart."""

from __future__ import annotations

import dataclasses
import functools

NARROW = "_narrow"
PUSH = "_push"


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """Parts of a variant's name.

    Attributes:
        algorithm: name of the algorithm without suffixes: ``b2b``, ``one_shot``.
        narrow: the kernel leaves nine tenths of the SMs to other kernels.
        pushes: the kernel stores shards with the ranks that add them up; otherwise those ranks fetch them.
    """

    algorithm: str
    narrow: bool = False
    pushes: bool = False

    @staticmethod
    @functools.cache
    def of(name: str) -> Variant:
        """Split a name into its parts. Suffixes are in the order of ``name``; a name without suffixes is its algorithm.

        >>> Variant.of("two_shot_narrow")
        Variant(algorithm='two_shot', narrow=True, pushes=False)
        """
        rest, found = name, []
        for suffix in (PUSH, NARROW):
            found.append(rest.endswith(suffix))
            rest = rest.removesuffix(suffix)
        pushes, narrow = found
        return Variant(rest, narrow, pushes)

    @property
    def name(self) -> str:
        """Name of the variant with its suffixes; :meth:`of` splits it."""
        suffixes = ((NARROW, self.narrow), (PUSH, self.pushes))
        return self.algorithm + "".join(suffix for suffix, there in suffixes if there)

    @property
    def wide(self) -> str:
        """Name of the same variant with all the SMs that it can use."""
        return dataclasses.replace(self, narrow=False).name
