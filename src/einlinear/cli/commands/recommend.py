"""The command recommend."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from einlinear.cli.progress import case_progress
from einlinear.cli.terminal import columns, console, say, write
from einlinear.errors import EinlinearError, quote
from einlinear.layers.engine.memory import keep_memory_if_possible

if TYPE_CHECKING:
    from einlinear.bench.recommend import Recommendation
    from einlinear.bench.recommend_model import ModelRecommendation


def recommend(
    *,
    d_in: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    d_out: Annotated[int | None, tyro.conf.arg(metavar="M")] = None,
    model: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FACTORY")] = None,
    tokens: int = 2048,
    share: float = 0.25,
    structures: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="S [S ...]")] = None,
    dtype: Literal["float32", "bfloat16", "float64"] | None = None,
    repeats: int | None = None,
    threads: int | None = None,
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None,
) -> None:
    """Recommend structures for one shape, or for each layer of a model, by measured time.

    Nothing is trained: structures take turns with nn.Linear on this machine, forward and backward.

    Args:
        d_in: Width of the input of one layer.
        d_out: Width of its output.
        model: A model in place of one shape: a module that Python can import, also from the current
            folder, and a function in it that returns the model.
        tokens: Number of tokens of a training step: the rows of each layer's input.
        share: The largest share of the FLOPs of nn.Linear that a structure may have.
        structures: Structures to measure, whatever their FLOPs, instead of the usual ones.
        dtype: Type of weights and inputs; by default float32, or that of the model.
        repeats: Number of timed rounds; by default, as many as take about five seconds for each
            shape.
        threads: Number of threads; by default, as many as torch uses.
        plot: Draw time against FLOPs to this .svg or .png file.
        json: Write all measurements to this file.
    """
    if plot is not None:
        _check_plot(plot)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that measures memory logs a lot
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    keep_memory_if_possible()
    import torch  # torch takes a while to load

    from einlinear.bench.recommend import LEGEND
    from einlinear.bench.tradeoff import draw_tradeoff

    options: dict[str, Any] = {"tokens": tokens, "share": share, "structures": structures}
    options |= {"repeats": repeats, "threads": threads}
    if dtype is not None:
        options["dtype"] = getattr(torch, dtype)
    result = _measure(d_in, d_out, model, options)
    if model is not None:
        for shape in result.shapes:
            print(shape.table(columns()) + "\n")
        say(LEGEND)
        print()
    print(result.text(columns()))
    if plot is not None:
        print(f"wrote {draw_tradeoff(result.shapes, plot)}")
    if json is not None:
        write(json, dumps(result.as_dict(), indent=1))


def _measure(
    d_in: int | None, d_out: int | None, model: str | None, options: dict[str, Any]
) -> Recommendation | ModelRecommendation:
    from einlinear.bench.factory import build_model
    from einlinear.bench.recommend import recommend as recommend_shape
    from einlinear.bench.recommend_model import recommend_model

    _check_question(d_in, d_out, model)
    built = None if model is None else build_model(model)
    screen = console()
    with screen.status("") as status:
        show = case_progress("measuring", status)
        if built is not None:
            return recommend_model(built, on_progress=show, **options)
        assert d_in is not None, "there is a shape where there is no model"
        assert d_out is not None, "there is a shape where there is no model"
        return recommend_shape(d_in, d_out, on_progress=show, **options)


def _check_question(d_in: int | None, d_out: int | None, model: str | None) -> None:
    given = {"--d-in": d_in, "--d-out": d_out, "--model": model}
    named = [name for name, value in given.items() if value is not None]
    if named not in (["--d-in", "--d-out"], ["--model"]):
        raise EinlinearError(
            what=f"given: {' and '.join(named) or 'neither a shape nor a model'}",
            rule="einlinear recommend needs a shape, --d-in and --d-out, or a --model",
            fix="--d-in 1024 --d-out 1024, or --model my_project.models:make",
        )


def _check_plot(path: Path) -> None:
    from einlinear.show.plots import check_matplotlib

    check_matplotlib()
    if path.suffix.lower() not in (".svg", ".png"):
        raise EinlinearError(
            what=f"--plot is {quote(path)}",
            rule="a plot is an SVG or PNG file, whose name ends in .svg or .png",
            fix=f"give --plot {path.with_suffix('.svg')}",
        )
