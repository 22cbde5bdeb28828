"""Synthetic runs that follow a known power law, for the tests of scaling laws."""

import numpy as np

import einlinear as el

A, B, LINF = 0.3, 300.0, 1.5


def law(compute, a=A, b=B, linf=LINF):
    return linf + b * compute**-a


def optima(random, runs, noise, *, name="dense", factor=1.0, decades=(6, 10)):
    """One point for each run, at the law; with `factor` times less compute."""
    compute = np.geomspace(10.0 ** decades[0], 10.0 ** decades[1], runs)
    compute = compute * np.exp(0.1 * random.normal(size=runs))
    loss = law(compute) * np.exp(noise * random.normal(size=runs))
    return [f"{name} {i}" for i in range(runs)], compute / factor, loss, [name] * runs


def together(*parts):
    return el.Observations(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def curves(random, sizes, noise, *, seeds=3, name="dense", factor=1.0, span=30.0):
    """Whole curves of several sizes: L = 1.5 + 60 (N^-1/2 + D^-1/2) at C = N D / factor.

    The best size at C is N = C^1/2, so the law is L = 1.5 + 120 C^-1/4. Noise is that of a run, a
    tenth of it that of each point.
    """
    many = np.repeat(np.geomspace(1e4, 1e7, sizes), seeds)[:, None]
    data = many * np.geomspace(1 / span, span, 20)
    loss = 1.5 + 60 * (many**-0.5 + data**-0.5)
    shape = loss.shape
    loss = loss * np.exp(noise * random.normal(size=(shape[0], 1)))
    loss = loss * np.exp(0.1 * noise * random.normal(size=shape))
    runs = np.repeat([f"{name} {i}" for i in range(shape[0])], shape[1])
    groups = np.repeat([f"{name} {i // seeds}" for i in range(shape[0])], shape[1])
    seed = np.repeat(np.arange(shape[0]) % seeds, shape[1])
    names = np.full(loss.size, name, object)
    return runs, (many * data / factor).ravel(), loss.ravel(), names, seed, groups


CURVES_LAW = (1.5, 120.0, 0.25)  # linf, b, a of `curves`
