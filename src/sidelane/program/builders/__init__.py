"""Builders: pure functions from (collective, variant, transport) to a Program. Each file registers its algorithms."""

from sidelane.program.builders.batch import build_batch
from sidelane.program.builders.everything import FILES
from sidelane.program.builders.registry import (
    Algorithm,
    Transport,
    algorithms,
    build,
    find_algorithm,
    list_variants,
    register,
    variants,
    writes_into_outputs,
)

__all__ = [
    "FILES",
    "Algorithm",
    "Transport",
    "algorithms",
    "build",
    "build_batch",
    "find_algorithm",
    "list_variants",
    "register",
    "variants",
    "writes_into_outputs",
]
