"""How a parameter is initialised and how fast it learns, from its fan-in and fan-out.

Learning rates follow µP, so that the best learning rate of a small model is best for a wide one.
Ref: [Y22, Y23, P24 §4, App. C].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from typing import Literal, get_args

from einlinear.errors import EinlinearError, quote
from einlinear.structures.plan import Plan

Optimizer = Literal["adam", "sgd"]
ParameterKind = Literal["matrix", "vector", "embedding"]
Parametrization = Literal["naive", "mup"]
"""How a model is initialised, and how its learning rates depend on the width.

naive: every matrix and factor is drawn from N(0, 1 / fan_in), so that outputs have unit variance;
    all parameters share one learning rate.
mup: every matrix and factor is drawn with `init_std`; learning rates follow `adam_rate` or
    `sgd_rate`.

Vectors and embeddings start the same way in both. Which layers start at zero is a separate choice:
the coordinate check starts the same ones at zero in both, the landscape only under µP.
"""

ExpertNorm = Literal["each", "together"]
"""What the rms of a normalised factor of experts is over: each expert, or all of them together."""

HeadInit = Literal["zero", "small", "usual"]
"""How the head of a model starts.

zero: zeros, so that all outputs are zero.
small: standard deviation sqrt(base_width) / fan_in, so that outputs have unit variance at the base
    width and shrink as 1 / sqrt(width); in a structured head the last factor has
    sqrt(base_width / in_features) / sqrt(fan_in). Ref: [Y22 Table 3].
usual: standard deviation 1 / sqrt(fan_in) for every matrix, so that outputs have unit variance.
"""

EMBEDDING_STD = 0.02
"""The standard deviation of a fresh embedding at every width, as in the paper's GPT."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What structure-aware µP needs to know about a parameter.

    fan_in: how many terms each output sums; 1 for vectors and embeddings.
    fan_out: how many outputs each input feeds; for vectors and embeddings their width.
    init_std: standard deviation at initialisation; 0 for a parameter that starts at a constant.
    num_factors: how many factors the layer multiplies; Adam's learning rate is divided by it.
    repeats: how often the layer uses the matrix for one token; only SGD's learning rate needs it.
    kind: "matrix"; "vector" for biases, gains and norms; "embedding" for a table of vectors.
    init_mean: the mean at initialisation, for example 1 for the gain of a norm; None for a
        parameter that `init_` leaves unchanged.
    head_width: out_features of the layer if it is the model's head, whose output does not grow
        with the width of the model; 0 for all other layers. Only SGD's learning rate needs it.
    d_in, d_out: widths of the whole layer if the parameter is a factor, which may sum over a part
        of them only; 0 if fan_in and fan_out are those of the layer.
    """

    fan_in: int
    fan_out: int
    init_std: float
    num_factors: int = 1
    repeats: int = 1
    kind: ParameterKind = "matrix"
    init_mean: float | None = 0.0
    head_width: int = 0
    d_in: int = 0
    d_out: int = 0

    def __post_init__(self) -> None:
        counts = (self.fan_in, self.fan_out, self.num_factors, self.repeats)
        widths = (self.head_width, self.d_in, self.d_out)
        if min(counts) < 1 or min(widths) < 0 or self.init_std < 0:
            raise EinlinearError(
                what=f"the scaling of a parameter is given as {self}",
                rule="fan_in, fan_out, num_factors and repeats are 1 or more, "
                "head_width, d_in, d_out and init_std are 0 or more",
                fix="count the axes that the layer sums over and those that it makes",
            )
        if self.kind not in get_args(ParameterKind):
            raise EinlinearError(
                what=f"the scaling of a parameter has the kind {quote(self.kind)}",
                rule=f"the kind is one of {', '.join(get_args(ParameterKind))}",
                fix='use "matrix" for what multiplies the input, "vector" for biases and gains',
            )


@dataclass(frozen=True, slots=True)
class BaseShape:
    """The layer of a parameter in the base model, the one on which lr was tuned, kept dense.

    fan_in: in_features of that layer; 1 for vectors and embeddings.
    fan_out: out_features of that layer, for vectors and embeddings their width; 0 if it is not
        known, which is enough for Adam.
    """

    fan_in: int
    fan_out: int


def uniform_base(scaling: Scaling, base_width: int) -> BaseShape:
    """The shape in a base whose layers all have base_width inputs and outputs, except the head."""
    fan_in = base_width if scaling.kind == "matrix" else 1
    return BaseShape(fan_in, scaling.head_width or base_width)


def init_std(fan_in: int, fan_out: int) -> float:
    """The standard deviation of a fresh factor; keeps the spectral norm near sqrt(out / in).

        sqrt(min(fan_in, fan_out)) / fan_in

    Ref: [P24 App. C].  Checked by: test_linear.py::test_initial_weights_have_the_planned_deviation.
    """
    return sqrt(min(fan_in, fan_out)) / fan_in


def matrix_scaling(fan_in: int, fan_out: int) -> Scaling:
    """The scaling of a dense matrix."""
    return Scaling(fan_in, fan_out, init_std(fan_in, fan_out))


def vector_scaling(width: int, init_mean: float | None = 0.0) -> Scaling:
    """The scaling of a bias (mean 0) or a gain (mean 1); None: `init_` leaves it unchanged."""
    return Scaling(1, width, init_std=0.0, kind="vector", init_mean=init_mean)


def embedding_scaling(width: int, init_std: float = EMBEDDING_STD) -> Scaling:
    """The scaling of an embedding, whose standard deviation is the same at every width."""
    return Scaling(1, width, init_std=init_std, kind="embedding")


def factor_scaling(plan: Plan) -> dict[str, Scaling]:
    """The scaling of every factor of a plan, in the order in which they meet the input."""
    sizes = plan.sizes
    return {
        step.factor: Scaling(
            fan_in=step.fan_in,
            fan_out=step.fan_out,
            init_std=init_std(step.fan_in, step.fan_out),
            num_factors=len(plan.steps),
            repeats=prod(sizes[edge] for edge in step.kept),
            d_in=plan.d_in,
            d_out=plan.d_out,
        )
        for step in plan.steps
    }


def adam_rate(scaling: Scaling, lr: float, base: BaseShape) -> float:
    """The learning rate under Adam and relatives, whose steps ignore the scale of gradients.

        matrix: lr * base.fan_in / (num_factors * fan_in)       vector, embedding: lr

    Ref: [Y22 Table 3, P24 §4].  Checked by: test_groups.py::test_adam_rates_by_hand.
    """
    if scaling.kind != "matrix":
        return lr
    # A quotient of whole numbers, so that it is exactly 1 for a dense layer of the base's shape.
    return lr * (base.fan_in / (scaling.num_factors * scaling.fan_in))


def sgd_rate(scaling: Scaling, lr: float, base: BaseShape) -> float:
    """The learning rate under SGD, with or without momentum.

        matrix: lr * (fan_out / (fan_in * repeats)) / (base.fan_out / base.fan_in)
        vector, embedding: lr * fan_out / base.fan_out

    The output of the head does not grow with the model, so a dense one has
    lr * base.fan_in / fan_in, and its bias lr.
    Departure: the paper prints the rates of A and B with their roles swapped; repeats are the axes
    that the tensor has and the factor lacks, XB for A and YA for B where A comes first.
    Ref: [Y23, P24 App. C].  Checked by: test_groups.py::test_sgd_rates_by_hand.
    """
    if scaling.kind != "matrix":
        return lr * (scaling.fan_out / base.fan_out)
    top, bottom = scaling.fan_out * base.fan_in, scaling.fan_in * scaling.repeats * base.fan_out
    return lr * (top / bottom)


def rsgd_rates(plan: Plan) -> dict[str, float]:
    """The learning rate of every factor under Riemannian SGD at initialisation.

    SGD on the matrix W itself, carried over to the factors, multiplies their gradient by the
    inverse of the metric J'J, with J the derivative of W by the factors. In a wide, fresh layer J'J
    is close to a diagonal, constant on each factor F, and the rate is its inverse:

        1 / (prod of sizes of edges that do not touch F  *  prod of init_std(G)**2 over the others)

    Square layers of two factors: where the intermediate, of d_XB d_XAB d_YA d_YAB d_AB numbers if A
    comes first, is no wider than the layer, these are the rates of µP for SGD (`sgd_rate` with
    lr 1); where it is wider, they are that many times d larger, for both factors.
    Departure: the paper inverts J'J, which is singular: G and its inverse can be moved from one
    factor to the other along a rank. On d_XAB d_YAB d_AB**2 directions it is zero, and the
    pseudo-inverse takes its place. The diagonal is right where d_AB is much smaller than d_XB d_YB
    and d_XA d_YA. Ref: [P24 App. C].  Checked by: test_riemann.py.
    """
    stds = {name: scaling.init_std for name, scaling in factor_scaling(plan).items()}
    return {
        factor: 1.0
        / prod(size for edge, size in plan.edge_sizes if factor not in edge)
        / prod(std**2 for other, std in stds.items() if other != factor)
        for factor in stds
    }
