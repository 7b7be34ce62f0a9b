"""The study of phases: measured and predicted."""
