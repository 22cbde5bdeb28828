"""`python -m einlinear`: the command line."""

from einlinear.cli.main import main

main()
