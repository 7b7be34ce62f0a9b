"""The parts that all studies share: running, result files, reports."""
