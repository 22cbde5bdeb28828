"""Devices: a run on a GPU, or on many devices.

In: the model and the batches of a run. Out: its place among the processes, the model spread over
them, and batches on their way to the device.
May import: runs, data, errors.
"""
