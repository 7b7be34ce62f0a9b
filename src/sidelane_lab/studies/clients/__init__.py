"""The study of programs that other people wrote."""
