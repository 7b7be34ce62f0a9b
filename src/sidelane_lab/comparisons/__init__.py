"""Figures and tables of the papers: published, predicted and measured values in one picture."""
