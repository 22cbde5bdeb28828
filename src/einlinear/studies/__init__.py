"""Experiments: values that say what to run, runs that can be resumed, analysis of their results."""
