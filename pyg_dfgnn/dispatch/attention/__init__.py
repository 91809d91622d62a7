"""Dispatch of the attention family: one file per schedule."""
