"""Runs as plain data: what decides one, what it did, and the directory that holds it.

In: settings from code, a file or the command line. Out: RunConfig, RunRecord, RunDirectory,
StepTimes.
No torch: sweeps, laws and reports read runs without being able to train one.
May import: layers.scaling, models.choices, data.choices, structures, show, files, errors.
"""
