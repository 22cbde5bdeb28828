"""The findings: the paper's claims against the records of our study, with intervals and verdicts.

In: a folder of packed records, the times of steps, a landscape and a replay. Out: findings.md, its
figures and findings.json, in which every number of the page is.
May import: laws, landscapes, bench.replay, runs, structures, show, files, errors.
"""
