"""Proofs of programs of any number of ranks by the ranks that stand for all others, and what large programs take."""
