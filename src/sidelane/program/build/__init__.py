"""Builders: pure functions from (collective, variant, transport) to a Program."""

from sidelane.program.build.alternating import ALTERNATING, ROW_BYTES, Alternation, alternation
from sidelane.program.build.batched import build_batch
from sidelane.program.build.catalog import INTO_OUTPUTS, build, list_variants, variants
from sidelane.program.build.moving import Transport
from sidelane.program.build.relayed import RELAY

__all__ = [
    "ALTERNATING",
    "INTO_OUTPUTS",
    "RELAY",
    "ROW_BYTES",
    "Alternation",
    "Transport",
    "alternation",
    "build",
    "build_batch",
    "list_variants",
    "variants",
]
