"""The command doctor."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import tyro

from einlinear.cli.progress import case_progress
from einlinear.cli.terminal import columns, console, print_facts, say, write
from einlinear.errors import EinlinearError

_Skipped = Literal[
    "project",
    "backward",
    "compile",
    "export",
    "onnx",
    "save",
    "pretrained",
    "mup",
    "speed",
    "speed-training",
]


def doctor(
    model: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FACTORY")
    ] = None,
    /,
    *,
    structure: Annotated[str | None, tyro.conf.arg(metavar="STRUCTURE")] = None,
    inputs: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FUNCTION")] = None,
    skip: Annotated[tuple[_Skipped, ...], tyro.conf.arg(metavar="CHECK [CHECK ...]")] = (),
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None,
) -> None:
    """Check what works: this installation; with a model, everything you may do with it.

    Without arguments, it shows versions, threads and the compiled engine. With a model and a
    structure, it converts the model and checks fresh and projected weights, forward, backward,
    torch.compile, export, ONNX, saving and loading, parameter groups of µP, and the speed before
    and after. The exit code is 0 if all checks pass and 1 if one fails; a check that needs a
    package you do not have is skipped.

    Args:
        model: A module that Python can import, also from the current folder, and a function in it
            that returns the model.
        structure: What its linear layers become, such as "btt(rank=2)".
        inputs: A function that returns what the model is called with: a tensor, a tuple of
            arguments, or a dict of keyword arguments. By default, 8 sequences of up to 128 random
            tokens for a model with embeddings, and random numbers as wide as its linear layers for
            others: the first that the model takes.
        skip: Checks to leave out: project, backward, compile, export, onnx, save, pretrained, mup,
            speed, speed-training.
        json: Write all results to this file.
    """
    if model is None:
        _show_installation(structure, inputs, skip, json)
        return
    if structure is None:
        raise EinlinearError(
            what="--structure is missing",
            rule="the doctor converts the model to a structure and checks the result",
            fix=f'einlinear doctor {model} --structure "btt(rank=2)"',
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from einlinear.bench.doctor.examine import checks_for, conclusion, diagnose, results_table
    from einlinear.bench.doctor.subject import read_subject
    from einlinear.layers.machine import machine_facts

    subject = read_subject(model, structure, inputs)
    with console().status("") as status:
        results = diagnose(
            checks_for(subject, skip), subject, partial(case_progress, status=status)
        )
    facts = machine_facts()
    say(", ".join(f"{name} {value}" for name, value in facts.items()))
    print()
    setting = {"model": f"{model} ({subject.kind})", "structure": structure}
    setting["input"] = str(subject.inputs)
    print_facts(setting)
    print("\n" + results_table(results, columns()) + "\n")
    say(conclusion(results))
    if json is not None:
        checks = [asdict(result) for result in results]
        write(json, dumps({"machine": facts, **setting, "checks": checks}, indent=1))
    if any(result.status == "failed" for result in results):
        raise SystemExit(1)


def _show_installation(
    structure: str | None, inputs: str | None, skip: tuple[str, ...], json: Path | None
) -> None:
    given = {"--structure": structure, "--inputs": inputs, "--skip": skip, "--json": json}
    for flag, value in given.items():
        if value:
            raise EinlinearError(
                what=f"{flag} without a model",
                rule="the flags of einlinear doctor are about a model",
                fix=f"name the model, einlinear doctor my_project.models:make ..., or leave {flag} "
                "out",
            )
    from einlinear.layers.machine import machine_facts  # torch takes a while to load

    print_facts(machine_facts())
