"""Generators of docs/: reference pages from the code, tables from the files in results/, and the site."""
