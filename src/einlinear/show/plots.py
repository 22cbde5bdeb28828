"""What all matplotlib figures share: colours, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.files.whole import write_whole

INK, FAINT = "#222222", "#dddddd"


def check_matplotlib() -> None:
    """Raise an error if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise EinlinearError(
            what="plots need matplotlib, which is not installed",
            rule="plotting is an extra of the package",
            fix='pip install "einlinear[plot]"',
        ) from error


def save_figure(figure: Any, path: Path, dark: Mapping[str, str] | None = None) -> Path:
    """Write a figure; the same figure gives the same file.

    dark: colours of the figure, such as "#ffffff", and what an SVG shows instead on a dark page.
    """
    from matplotlib import rc_context

    if path.suffix.lstrip(".") not in figure.canvas.get_supported_filetypes():
        raise EinlinearError(
            what=f"cannot write a plot to {path}",
            rule="the suffix of the file gives its format",
            fix=f"call it {path.with_suffix('.svg')} or {path.with_suffix('.png')}",
        )
    kind = path.suffix.lstrip(".")
    data = BytesIO()
    with rc_context({"svg.hashsalt": "einlinear", "svg.fonttype": "none"}):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(data, format=kind, dpi=150, metadata=metadata)
    text = data.getvalue()
    if kind == "svg" and dark:
        text = text.replace(b"</style>", f"{_dark_style(dark)}</style>".encode(), 1)
    write_whole(path, text)
    return path


def _dark_style(colours: Mapping[str, str]) -> str:
    rules = "".join(
        f'[style*="{name}: {light}"]{{{name}:{dark}!important}}'
        for light, dark in colours.items()
        for name in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{rules}}}"
