"""Files: written atomically, and checked when they are read.

In: paths, and plain values to store. Out: values, checked field by field, or an error.
JSON, TOML, safetensors and .npz; checksums that show whether a file has changed.
May import: errors.
"""
