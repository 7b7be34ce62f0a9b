"""End-to-end study: whole steps of models by several ways of communicating."""
