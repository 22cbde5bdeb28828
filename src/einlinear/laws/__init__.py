"""Scaling laws: frontiers, power laws and compute multipliers, with intervals. No torch.

In: RunRecords, or any table of compute and loss. Out: Fit, PowerLaw, Multiplier.
May import: runs, structures, show, files, errors.
"""
