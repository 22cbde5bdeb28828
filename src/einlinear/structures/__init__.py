"""Structures, their sizes, plans and taxonomy: plain values, no torch.

In: text or numbers that a user types, and widths. Out: a Structure (which axes a layer has), a
Plan (its sizes, its order of multiplication, its counts), a Taxonomy (ω, ψ, ν).
May import: errors, files, show.
"""
