"""The study of all-to-alls with a layout."""
