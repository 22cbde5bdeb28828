"""Structures, sizes, plans and their taxonomy: plain values, nothing here imports torch."""
