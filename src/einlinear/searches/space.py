"""SearchSpace: the candidates that a search may try, listed and sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from itertools import count
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.files.whole import parse_object
from einlinear.runs.config import RunConfig
from einlinear.runs.settings import ExpertsOf
from einlinear.structures.named import named_call
from einlinear.structures.plan import make_plan
from einlinear.structures.sampling import sample_structures
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse_structure
from einlinear.structures.values import true_or_false, whole_number

SPEC = "search.json"
"""Where the directory of a search holds its space, with all else that decides it."""

_DENSE = "dense"
FIRST_TRIED = (
    "btt",
    "low_rank",
    "kronecker",
    "tensor_train(rank_exponent=1/4)",
    "btt(rank_exponent=1/4)",
)
"""What a search tries first if nothing is listed."""

_LENGTH = 0.35  # candidates this far apart in omega, psi and nu have little in common
_OWN = 0.3  # share of the variance of offsets that no other candidate tells about
_WIDTH = 4096  # at which fixed sizes and exponents are compared
_MOST = 10_000
_EXPERTS_SCALE = 0.1  # per doubling of the experts
_LONGEST = 32  # a structure that takes more characters to write has a number for a name


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A structure, perhaps with experts, that a search compares with others.

    name: what its space calls the structure; candidates that differ in nothing else are equal.
    """

    structure: str = _DENSE
    num_experts: int = 0
    num_active: int = 2
    experts: ExpertsOf = "linear"
    head_aligned: bool = False
    name: str = field(default="", compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its runs."""
        found: dict[str, Any] = {"structure": self.structure}
        if self.num_experts:
            found |= {"num_experts": self.num_experts, "num_active": self.num_active}
            found |= {"experts": self.experts} if self.experts != "linear" else {}
        return found | ({"head_aligned": True} if self.head_aligned else {})

    @property
    def label(self) -> str:
        """A short name for tables: of the structure, and what else sets the candidate apart."""
        parts = [self.name or _short_name(self.structure)]
        if self.num_experts:
            kind = "ffn-moe" if self.experts == "ffn" else "moe"
            parts.append(f"{kind} {self.num_active}/{self.num_experts}")
        return " ".join(parts + ["head-aligned"] * self.head_aligned)

    @property
    def key(self) -> str:
        """A text that is the same for all spellings of the candidate, and for no other."""
        own = self.structure if self.structure == _DENSE else str(parse_structure(self.structure))
        active = self.num_active if self.num_experts else 0
        rest = (self.num_experts, active, self.experts, self.head_aligned)
        return " ".join(map(str, (own, *rest)))

    @property
    def taxonomy(self) -> tuple[float, float, float]:
        """omega, psi and nu."""
        if self.structure == _DENSE:
            return 0.0, 1.0, 1.0
        found = taxonomy(parse_structure(self.structure))
        return float(found.omega), float(found.psi), float(found.nu)

    @property
    def exponents(self) -> tuple[float, float, float]:
        """omega, psi and nu at a large width, where fixed sizes count too."""
        if self.structure == _DENSE:
            return 0.0, 1.0, 1.0
        plan = make_plan(parse_structure(self.structure), _WIDTH, _WIDTH)
        scale = log(_WIDTH)
        omega = log(plan.macs / plan.params) / scale
        return omega, log(plan.rank) / scale, log(plan.macs / _WIDTH) / scale

    @classmethod
    def of(cls, config: RunConfig) -> Candidate:
        """The candidate that a run is of."""
        return cls(
            config.structure,
            config.num_experts,
            config.num_active if config.num_experts else 2,
            config.experts,
            bool(config.head_aligned),
        )


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Which candidates a search may try; dense is always one of them.

    Args:
        structures: tried first.
        sample: how many more structures may be proposed; 0 for none.
        omega: a value or a range of the structures that are proposed; None for any.
        psi: the same for the rank.
        nu: the same for the cost.
        factors: how many factors proposed structures have.
        num_experts: mixtures of experts to try with every structure, dense too; 0 for none.
        num_active: experts that each token uses.
        head_aligned: also try every structure aligned with attention heads.
        seed: of the sample.
    """

    structures: tuple[str, ...] = FIRST_TRIED
    sample: int = 200
    omega: float | tuple[float, float] | None = None
    psi: float | tuple[float, float] | None = None
    nu: float | tuple[float, float] | None = None
    factors: tuple[int, ...] = (2,)
    num_experts: tuple[int, ...] = (0,)
    num_active: int = 2
    head_aligned: bool = False
    seed: int = 0
    candidates: tuple[Candidate, ...] = field(init=False, repr=False, compare=False)
    num_listed: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("structures", "factors", "num_experts"):
            value = getattr(self, name)
            values = (value,) if isinstance(value, str | int) else value
            if not isinstance(values, list | tuple) or (not values and name != "structures"):
                raise EinlinearError(
                    what=f"{name} is {quote(value)}",
                    rule=f"{name} is a list of one value or more",
                    fix=f"give a list, or leave {name} out",
                )
            object.__setattr__(self, name, tuple(values))
        for name in ("omega", "psi", "nu"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        true_or_false(self.head_aligned, "head_aligned")
        whole_number(self.sample, "sample", 0, _MOST)
        for number in self.num_experts:
            whole_number(number, "num_experts", 0)
        found: dict[str, Candidate] = {}
        for candidate in self._listed():
            found.setdefault(candidate.key, candidate)
        object.__setattr__(self, "num_listed", len(found))
        for text in self._sampled():
            for candidate in self._variants(text):
                found.setdefault(candidate.key, candidate)
        if len(found) < 2:
            raise EinlinearError(
                what="the space has no candidate except dense",
                rule="a search compares dense with one structure or more",
                fix='give structures = ["btt"], or sample = 20',
            )
        named = _named(found.values(), self.num_listed)
        object.__setattr__(self, "candidates", tuple(named))

    def _listed(self) -> Iterator[Candidate]:
        yield Candidate()
        for number in self.num_experts:
            if number:
                yield Candidate(_DENSE, number, self.num_active)
        for text in self.structures:
            if text != _DENSE:
                yield from self._variants(text)

    def _variants(self, text: str) -> Iterator[Candidate]:
        for number in self.num_experts:
            for aligned in (False, True) if self.head_aligned else (False,):
                yield Candidate(text, number, self.num_active, head_aligned=aligned)

    def _sampled(self) -> Iterator[str]:
        """Structures of all numbers of factors in turn."""
        if not self.sample:
            return
        each = -(-self.sample // len(self.factors))
        lists = [
            sample_structures(
                each,
                num_factors=whole_number(number, "factors", 1, 4),
                omega=self.omega,
                psi=self.psi,
                nu=self.nu,
                seed=self.seed,
            )
            for number in self.factors
        ]
        for row in zip(*lists, strict=True):
            yield from map(str, row)

    def as_dict(self) -> dict[str, Any]:
        """The space as a JSON object."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchSpace:
        """Build a space from a table."""
        known = [f.name for f in fields(cls) if f.init]
        for name in values:
            if name not in known:
                raise EinlinearError(
                    what=f"unknown key {quote(name)} in a space",
                    rule=f"a space has {', '.join(known)}",
                    fix=did_you_mean(name, known, "leave it out"),
                )
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**plain)


def read_names(out: Path) -> dict[str, str]:
    """The labels of all candidates of a search, by key; none if its space cannot be read."""
    try:
        space = SearchSpace.from_dict(parse_object((out / SPEC).read_bytes())["space"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {candidate.key: candidate.label for candidate in space.candidates}


def _named(candidates: Iterable[Candidate], num_listed: int) -> Iterator[Candidate]:
    """The candidates with their names.

    A listed structure is called as it is written if that is short, the others s1, s2 and so on, in
    the order in which they are proposed.
    """
    names: dict[str, str] = {}
    numbers = (f"s{number}" for number in count(1))
    for k, candidate in enumerate(candidates):
        text = candidate.structure
        if text not in names:
            is_short = k < num_listed and len(text) <= _LONGEST
            names[text] = text if is_short else next(numbers)
        yield replace(candidate, name=names[text])


def _short_name(structure: str) -> str:
    """A short text: the structure as it is written, or its seven exponents, rounded."""
    if len(structure) <= _LONGEST:
        return structure
    parsed = parse_structure(structure)
    call = named_call(parsed)
    if call != str(parsed):
        return call.removesuffix("()")
    if parsed.num_factors > 2 or not all(isinstance(v, Fraction) for v in parsed.theta):
        return call
    return "(" + "|".join(_digits(value) for value in parsed.theta) + ")"


def _digits(value: object) -> str:
    """An exponent with two digits: .25, 1 or 0."""
    assert isinstance(value, Fraction), "it is checked"
    return f"{float(value):.2f}".rstrip("0").rstrip(".").removeprefix("0") or "0"


def features_of(candidates: tuple[Candidate, ...]) -> NDArray[np.float64]:
    """What offsets may depend on: omega, psi, nu and experts, all 0 for dense layers."""
    rows = []
    for candidate in candidates:
        omega, psi, nu = candidate.exponents
        experts = np.log2(max(1, candidate.num_experts)) * _EXPERTS_SCALE
        rows.append((omega, 1 - psi, 1 - nu, experts))
    return np.array(rows)


def kernel_of(candidates: tuple[Candidate, ...]) -> NDArray[np.float64]:
    """How alike candidates are, from 0 to 1."""
    at = features_of(candidates)
    apart = ((at[:, None] - at[None]) ** 2).sum(-1)
    alike = np.exp(-apart / (2 * _LENGTH**2))
    return np.asarray((1 - _OWN) * alike + _OWN * np.eye(len(at)))
