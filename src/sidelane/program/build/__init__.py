"""Builders: pure functions from (collective, variant, transport) to a Program."""

from sidelane.program.build.alternating import ALTERNATING, ROW_BYTES, Alternation, alternation
from sidelane.program.build.batched import build_batch
from sidelane.program.build.catalog import build, variants
from sidelane.program.build.moving import Transport

__all__ = ["ALTERNATING", "ROW_BYTES", "Alternation", "Transport", "alternation", "build", "build_batch", "variants"]
