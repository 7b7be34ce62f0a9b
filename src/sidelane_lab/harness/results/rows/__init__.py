"""Rows of result files, a type a study. They are flat and their names are fixed, since other tools read them.

A time that does not exist is null and ``note`` says why: a variant that is wrong or could not run
is a row that says so.
"""
