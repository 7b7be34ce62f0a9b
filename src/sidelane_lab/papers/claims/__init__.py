"""What the papers claim and what was measured, held against the model."""
