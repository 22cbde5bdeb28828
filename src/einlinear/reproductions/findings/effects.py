"""What ω, ψ and ν do to the compute that structures need, all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

import numpy as np

from einlinear.laws.observations import Floats
from einlinear.reproductions.findings.samples import LawSamples
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse_structure

_SEED = 0
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
    laws: LawSamples, structures: Mapping[str, str], reference: str, loss: float
) -> tuple[ExponentEffect, ...]:
    """The effects of the three exponents on the ratios over the reference, at one loss.

    structures: by the name of layers in the laws, those to use.
    """
    names = [name for name in laws.names if name in structures]
    places = [laws.names.index(name) for name in names]
    own, drawn = laws.log_ratios(reference, loss)
    x = np.array([_row(structures[name]) for name in names])
    return fit_effects(x, own[places], drawn[:, places])


def fit_effects(x: Floats, y: Floats, samples: Floats) -> tuple[ExponentEffect, ...]:
    """Fit y = c + β_ω ω + β_ψ (1 - ψ) + β_ν (1 - ν) by least squares over structures.

    y: logarithms of multipliers. samples: the same of bootstrap samples of all runs, so that errors
        that structures share, such as those of the reference, are in the intervals. In each sample,
        residuals get random signs (the wild bootstrap), divided by one minus their leverage:
        structures scatter around the fit by more than the noise of runs, because the exponents do
        not say everything.
    Checked by: test_effects.py::test_intervals_cover.
    """
    inverse = np.linalg.pinv(x)
    found = inverse @ y
    leverage = np.clip((x @ inverse).diagonal(), 0, 0.95)
    residual = (y - x @ found) / (1 - leverage)
    usable = samples[np.isfinite(samples).all(1)]
    sign = np.random.default_rng(_SEED).choice([-1.0, 1.0], usable.shape)
    draws = (usable + sign * residual) @ inverse.T
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    return tuple(
        ExponentEffect(name, exp(found[k] / 2), exp(low[k] / 2), exp(high[k] / 2))
        for k, name in enumerate(EXPONENTS, start=1)
    )


def _row(structure: str) -> tuple[float, float, float, float]:
    found = taxonomy(parse_structure(structure))
    return 1.0, float(found.omega), 1 - float(found.psi), 1 - float(found.nu)
