"""Ends of calls by the names of DeepEP's module ``deep_ep.utils``, from which Megatron-core imports them."""

from sidelane.deep_ep.settings import EventOverlap
from sidelane.deep_ep.settings import record_event as EventHandle

__all__ = ["EventHandle", "EventOverlap"]
