"""Normalisation between layers, by name."""

from torch import nn

NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
