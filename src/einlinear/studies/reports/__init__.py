"""Reports: records of many runs -> fits -> words, figures, tables -> one page."""
