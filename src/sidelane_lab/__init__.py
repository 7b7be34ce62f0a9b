"""Sidelane's laboratory: studies, baselines, the simulator, the performance model, the papers' claims.

It imports the library ``sidelane`` and is never imported by it.
"""
