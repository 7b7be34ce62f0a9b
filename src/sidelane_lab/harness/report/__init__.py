"""Studies for readers: tables, pictures and a page."""
