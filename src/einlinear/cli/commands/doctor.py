"""The command doctor."""

from __future__ import annotations

from einlinear.cli.terminal import print_facts


def doctor() -> None:
    """Show what this installation runs on: versions, threads, the compiled engine."""
    from einlinear.layers.machine import machine_facts  # torch takes a while to load

    print_facts(machine_facts())
