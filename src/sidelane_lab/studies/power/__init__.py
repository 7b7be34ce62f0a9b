"""The study of power and energy: measured and predicted."""
