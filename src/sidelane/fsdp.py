"""FSDP2 with Sidelane's collectives: ``enable`` and its handle."""

from __future__ import annotations

from sidelane.integrations.fsdp_calls import EnabledFsdp, enable

__all__ = ["EnabledFsdp", "enable"]
