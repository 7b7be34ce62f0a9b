"""Calls of collectives: from the tensors of a call to a verified program that runs at their addresses."""
