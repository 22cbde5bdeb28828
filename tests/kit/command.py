"""The command line, called in this process."""

from einlinear.cli.main import main


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    try:
        main(list(arguments))
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err
