"""Correctness grid, timings and baselines; nothing in the package imports this room."""
