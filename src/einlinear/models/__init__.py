"""Whole models: their conversion, their learning rates and how to check them."""
