"""Layers: weights, and how they are multiplied."""
