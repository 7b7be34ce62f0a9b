"""Storms: ordinary tensors that come and go while peers reach them, with calls between, every byte checked."""
