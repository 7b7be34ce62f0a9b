"""Descriptions of machines that need not be here, and the catalogue of them."""
