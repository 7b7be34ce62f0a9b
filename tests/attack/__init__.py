"""The attack: an interpreter of programs that shares no code with ``verify``, and mutants that try to get past it."""
