"""The factors of ω, ψ and ν, against multipliers that are made of them."""

from math import exp

import numpy as np
import pytest

from einlinear.reproductions.findings.effects import fit_effects
from einlinear.reproductions.findings.layers import LOW_RANK_FAN_IN, STRUCTURES
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse

TRUE = np.array([0.1, -2.0, -1.5, 0.3])  # a constant, and of ω, 1 - ψ and 1 - ν


def exponents():
    found = [taxonomy(parse(name)) for name in STRUCTURES if name != LOW_RANK_FAN_IN]
    return np.array([[1, float(t.omega), 1 - float(t.psi), 1 - float(t.nu)] for t in found])


def made(scatter, noise, seed=0):
    """Multipliers that scatter around their exponents, seen with noise that dense shares."""
    random, x = np.random.default_rng(seed), exponents()
    true = x @ TRUE + scatter * random.normal(size=len(x))
    errors = noise * random.normal(size=(301, len(x))) + noise * random.normal(size=(301, 1))
    y = true + errors[0]
    return x, y, y + errors[1:]


def test_effects_without_noise_are_exact():
    for effect, slope in zip(fit_effects(*made(0.0, 0.0)), TRUE[1:], strict=True):
        assert effect.factor == pytest.approx(exp(slope / 2))
        assert effect.low == pytest.approx(effect.high)


@pytest.mark.parametrize(("scatter", "noise"), [(0.15, 0.05), (0.0, 0.1), (0.2, 0.0)])
def test_intervals_cover(scatter, noise):
    """Of 450 intervals of 90 %, at least 80 %: seven standard deviations (1.4 %) below 90 %."""
    held = [
        effect.low <= exp(slope / 2) <= effect.high
        for seed in range(150)
        for effect, slope in zip(fit_effects(*made(scatter, noise, seed)), TRUE[1:], strict=True)
    ]
    assert np.mean(held) > 0.8


def test_samples_without_a_law_are_left_out():
    x, y, samples = made(0.1, 0.1)
    holed = samples.copy()
    holed[::3, 2] = np.nan
    assert all(np.isfinite(effect.low) for effect in fit_effects(x, y, holed))
