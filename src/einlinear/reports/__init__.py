"""Reports: the results of many runs as one HTML page with figures and tables. No torch.

In: a folder of runs, or a table. Out: a page, figures as SVG and PNG, and CSV files.
figures/ draws the same figures for the page and for papers; templates/ holds the page. Of a search,
it reads the answer.
May import: searches.answer and .words, laws, sweeps.claims, runs, structures, show, files, errors.
"""
