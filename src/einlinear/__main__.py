"""`python -m einlinear`: the command line."""

from einlinear.cli import main

main()
