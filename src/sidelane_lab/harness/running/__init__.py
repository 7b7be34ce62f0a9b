"""Starting ranks, following them, and timing what they do."""
