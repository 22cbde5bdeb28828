"""The factors of ω, ψ and ν, against structures whose multipliers are made of them."""

from math import exp

import numpy as np
import pytest

from einlinear.reproductions.findings.effects import effects
from einlinear.reproductions.findings.evidence import plain_structure
from einlinear.reproductions.findings.layers import DENSE_LAYERS as DENSE
from einlinear.reproductions.findings.layers import STRUCTURES
from einlinear.reproductions.findings.verdicts import Ratio
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse

PLAIN = {name: plain_structure(name) for name in STRUCTURES}
TRUE = np.array([-2.0, -1.5, 0.3])  # of ω, 1 - ψ and 1 - ν


def made(noise, seed=0):
    random = np.random.default_rng(seed)
    found = {}
    for name, structure in PLAIN.items():
        if name != DENSE:
            t = taxonomy(parse(structure))
            x = np.array([float(t.omega), 1 - float(t.psi), 1 - float(t.nu)])
            value = exp(float(TRUE @ x) + noise * random.normal())
            found[name] = Ratio(name, DENSE, value, value / 1.1, value * 1.1)
    return found


def test_effects_without_noise_are_exact():
    for effect, slope in zip(effects(made(0.0), PLAIN), TRUE, strict=True):
        assert effect.factor == pytest.approx(exp(slope / 2))
        assert effect.low <= effect.factor * (1 + 1e-9)
        assert effect.high >= effect.factor * (1 - 1e-9)


def test_intervals_cover():
    """Of 300 intervals of 90 %, at least 80 %: five standard deviations (1.7 %) below 90 %."""
    held = [
        effect.low <= exp(slope / 2) <= effect.high
        for seed in range(100)
        for effect, slope in zip(effects(made(0.15, seed), PLAIN), TRUE, strict=True)
    ]
    assert np.mean(held) > 0.8


def test_the_structure_in_a_label():
    assert plain_structure("low_rank fan-in factors") == "low_rank"
    assert plain_structure("btt moe 2/8 in V and O") == "btt"
    for name in STRUCTURES:
        parse(plain_structure(name))
