"""What all studies share: running, result files, reports."""
