"""Pages of docs/ that are made: reference pages from the code, tables from the files in results/."""
