"""Result files: their rows, and where they come from."""
