"""Attention over edges: the functions, and the launches of each schedule."""
