"""The command atlas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from einlinear.cli.terminal import console, write


def atlas(
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    width: int = 1024,
    samples: int = 250,
    seed: int = 0,
) -> None:
    """Draw the taxonomy of all structures, with a table of the named ones, as one HTML page.

    Args:
        out: Folder for the page, atlas.html.
        width: Width at which the named structures are counted.
        samples: Number of random structures in each of four groups.
        seed: Random seed; the same seed gives the same structures.
    """
    from einlinear.structures.atlas import atlas_rows, draw_atlas  # numpy takes a while to load

    with console().status("drawing structures"):
        page = draw_atlas(atlas_rows(samples, seed), width)
    write(out / "atlas.html", page)
