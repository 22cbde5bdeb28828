"""What ω, ψ and ν do to the compute that structures need, all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from einlinear.laws.observations import Floats
from einlinear.reproductions.findings.verdicts import Ratio
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse

_SAMPLES, _SEED = 4000, 0
EXPONENTS = ("omega", "psi", "nu")


@dataclass(frozen=True, slots=True)
class ExponentEffect:
    """The factor on the multiplier that one exponent has, if the others stay.

    For omega: from 0 to 1/2. For psi: from 1 to 1/2. For nu: from 1 to 1/2.
    """

    exponent: str
    factor: float
    low: float
    high: float


def effects(
    ratios: Mapping[str, Ratio], structures: Mapping[str, str]
) -> tuple[ExponentEffect, ...]:
    """Fit log λ = c + β_ω ω + β_ψ (1 - ψ) + β_ν (1 - ν) to all structures, dense at λ = 1.

    Least squares over structures, each with the same weight: they scatter around the fit by more
    than their intervals, because the exponents do not say everything. Intervals by the wild
    bootstrap, with residuals divided by one minus their leverage.
    Checked by: test_effects.py::test_intervals_cover.

    structures: by name, those without experts and other variations.
    """
    names = [name for name in structures if name == "dense" or name in ratios]
    rows = [_row(structures[name]) for name in names]
    x = np.array(rows)
    y = np.array([0.0 if name == "dense" else np.log(ratios[name].value) for name in names])
    found = np.linalg.lstsq(x, y, rcond=None)[0]
    draws = _draws(x, y, found)
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    return tuple(
        ExponentEffect(name, exp(found[k] / 2), exp(low[k] / 2), exp(high[k] / 2))
        for k, name in enumerate(EXPONENTS, start=1)
    )


def _row(structure: str) -> Sequence[float]:
    found = taxonomy(parse(structure))
    return 1.0, float(found.omega), 1 - float(found.psi), 1 - float(found.nu)


def _draws(x: Floats, y: Floats, found: Floats) -> Floats:
    """Coefficients of resampled residuals: samples x coefficients."""
    random = np.random.default_rng(_SEED)
    leverage = np.clip((x @ np.linalg.pinv(x)).diagonal(), 0, 0.95)
    residual = (y - x @ found) / (1 - leverage)
    sign = random.choice([-1.0, 1.0], (_SAMPLES, len(y)))
    moved = x @ found + sign * residual
    return np.asarray(moved @ np.linalg.pinv(x).T)
