"""How a parameter is initialised and how fast it learns, from its fan-in and fan-out.

Learning rates follow µP, so that the best learning rate of a small model is best for a wide one.
Ref: [Y22, Y23, P24 §4, App. C].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt
from typing import Literal, get_args

from einlinear.errors import EinlinearError, quote
from einlinear.structures.plan import Plan, Step

Optimizer = Literal["adam", "sgd", "muon"]
ParameterKind = Literal["matrix", "vector", "scalar", "embedding"]
Parametrization = Literal["naive", "mup", "unit"]
"""How a model is initialised, and how its learning rates depend on the width.

naive: every matrix and factor is drawn from N(0, 1 / fan_in), so that outputs have unit variance;
    all parameters share one learning rate.
unit: as naive, but the matrices and factors of all layers except input layers, heads and the gates
    of experts are drawn from N(0, 1): the baseline of the paper. Ref: [P24 §4].
mup: every matrix and factor is drawn with `init_std`; learning rates follow `adam_rate`,
    `sgd_rate` or `muon_rate`.

Vectors and embeddings start the same way in all. Which layers start at zero is a separate choice:
the coordinate check starts the same ones at zero in all, the landscape only under µP.
"""

ExpertNorm = Literal["each", "together"]
"""What the rms of a normalised factor of experts is over: each expert, or all of them together."""

FactorInit = Literal["spectral", "fan_in"]
"""The standard deviation of a fresh factor, which weight normalisation keeps as its limit.

spectral: `init_std`, sqrt(min(fan_in, fan_out)) / fan_in.
fan_in: 1 / sqrt(fan_in), which is larger for factors that narrow and the same for all others.
"""

HeadInit = Literal["zero", "small", "usual"]
"""How the head of a model starts.

zero: zeros, so that all outputs are zero.
small: standard deviation sqrt(base_width) / fan_in, so that outputs have unit variance at the base
    width and shrink as 1 / sqrt(width); in a structured head the last factor has
    sqrt(base_width / in_features) / sqrt(fan_in). Ref: [Y22 Table 3].
usual: standard deviation 1 / sqrt(fan_in) for every matrix, so that outputs have unit variance.
"""

Decay = Literal["independent", "standard"]
"""How the weight decay of matrices follows their learning rates.

Optimizers multiply weight decay by the learning rate, which µP lowers as the width grows.

independent: weight_decay * lr / rate, so that a step decays by the same share at every width.
    Ref: [W24, K25].
standard: weight_decay itself, so that the decay per step falls with the rate.
"""

ADAM_SHARE = 0.5
"""The learning rate of AdamW as a share of Muon's, for all that Muon leaves to AdamW.

A step of AdamW has a root mean square of about 0.2 times its rate, one of Muon in a square matrix
of width d of lr / sqrt(d): they are equal at a share of 5 / sqrt(d), here d = 100. Ref: [L25].
"""

EMBEDDING_STD = 0.02
"""The standard deviation of a fresh embedding at every width, as in the paper's GPT."""


@dataclass(frozen=True, slots=True)
class MatrixAxes:
    """Which axes of a parameter are the inputs and the outputs of its matrices.

    A parameter is a batch of matrices: all axes that are neither inputs nor outputs count them.
    Axes are counted from the end, -1 is the last, so that experts or other stacks come in front.

    Args:
        inputs: the axes over which the layer sums; the product of their sizes is the fan-in.
        outputs: the axes that the layer makes.
        stack: an axis and how many matrices it holds one after another: (-2, 3) for a weight
            (3 x out, in) that stacks queries, keys and values.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stack: tuple[int, int] = (-1, 1)

    def __post_init__(self) -> None:
        if self.stack[1] == 1:
            object.__setattr__(self, "stack", (-1, 1))  # equal axes are one group
        axes = (*self.inputs, *self.outputs)
        is_stack = self.stack[1] == 1 or self.stack[0] in axes
        if len(set(axes)) < len(axes) or max(axes, default=-1) >= 0 or not is_stack:
            raise EinlinearError(
                what=f"the axes of matrices are given as {self}",
                rule="axes are counted from the end, -1 is the last; each is an input or an "
                "output, once, and the stacked axis is one of them",
                fix="give MatrixAxes(inputs=(-1,), outputs=(-2,)) for a weight (out, in)",
            )


@dataclass(frozen=True, slots=True)
class Scaling:
    """What structure-aware µP needs to know about a parameter.

    fan_in: how many terms each output sums; 1 for vectors and embeddings.
    fan_out: how many outputs each input feeds; for vectors and embeddings their width.
    init_std: standard deviation at initialisation; 0 for a parameter that starts at a constant.
    num_factors: how many factors the layer multiplies; Adam's learning rate is divided by it.
    repeats: how often the layer uses the matrix for one token; only SGD's learning rate needs it.
    num_terms: of the last factor of a term of a sum, how many terms there are; 1 for all others.
        `init_std` is divided by its square root.
    kind: "matrix"; "vector" for biases, gains and norms; "scalar" for numbers that each multiply a
        whole matrix, as many at every width; "embedding" for a table of vectors.
    init_mean: the mean at initialisation, for example 1 for the gain of a norm; None for a
        parameter that `init_` leaves unchanged.
    head_width: out_features of the layer if it is the model's head, whose output does not grow
        with the width of the model; 0 for all other layers. SGD's learning rate needs it, and
        Muon leaves heads to AdamW.
    d_in, d_out: widths of the whole layer if the parameter is a factor, which may sum over a part
        of them only; 0 if fan_in and fan_out are those of the layer.
    axes: the inputs and outputs among the axes of a matrix, for Muon; None to infer them from the
        shape. Layers that share a parameter need not agree on them.
    """

    fan_in: int
    fan_out: int
    init_std: float
    num_factors: int = 1
    repeats: int = 1
    num_terms: int = 1
    kind: ParameterKind = "matrix"
    init_mean: float | None = 0.0
    head_width: int = 0
    d_in: int = 0
    d_out: int = 0
    axes: MatrixAxes | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        counts = (self.fan_in, self.fan_out, self.num_factors, self.repeats, self.num_terms)
        widths = (self.head_width, self.d_in, self.d_out)
        if min(counts) < 1 or min(widths) < 0 or self.init_std < 0:
            raise EinlinearError(
                what=f"the scaling of a parameter is given as {self}",
                rule="fan_in, fan_out, num_factors, repeats and num_terms are 1 or more, "
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


def matrix_scaling(fan_in: int, fan_out: int, axes: MatrixAxes | None = None) -> Scaling:
    """The scaling of a dense matrix, or of a stack of them with these axes."""
    return Scaling(fan_in, fan_out, init_std(fan_in, fan_out), axes=axes)


def vector_scaling(width: int, init_mean: float | None = 0.0) -> Scaling:
    """The scaling of a bias (mean 0) or a gain (mean 1); None: `init_` leaves it unchanged."""
    return Scaling(1, width, init_std=0.0, kind="vector", init_mean=init_mean)


def scalar_scaling(count: int, init_mean: float | None = 1.0) -> Scaling:
    """The scaling of numbers that each multiply a whole matrix, such as the gains of experts."""
    return Scaling(1, count, init_std=0.0, kind="scalar", init_mean=init_mean)


def embedding_scaling(width: int, init_std: float = EMBEDDING_STD) -> Scaling:
    """The scaling of an embedding, whose standard deviation is the same at every width."""
    return Scaling(1, width, init_std=init_std, kind="embedding")


def factor_scaling(plan: Plan, factor_init: FactorInit = "spectral") -> dict[str, Scaling]:
    """The scaling of every factor of a plan, in the order in which they meet the input."""
    sizes = plan.sizes
    return {
        step.factor: Scaling(
            fan_in=step.fan_in,
            fan_out=step.fan_out,
            init_std=_factor_std(step, factor_init),
            num_factors=len(plan.steps),
            repeats=prod(sizes[edge] for edge in step.kept),
            d_in=plan.d_in,
            d_out=plan.d_out,
            axes=factor_axes(step),
        )
        for step in plan.steps
    }


def term_scaling(
    plan: Plan, factor_init: FactorInit, num_terms: int, num_factors: int
) -> dict[str, Scaling]:
    """The scaling of every factor of a plan that is one of several terms of a sum.

    The last factor starts smaller, by sqrt(num_terms): the variances of the terms, which are
    independent, then add up to their mean, the size of one layer. Weight normalisation keeps this
    as its limit. All factors of all terms move the output at once, so `num_factors` counts them
    all: together they change it by as much in a step as the factors of one layer.
    Checked by: test_sum.py::test_fresh_outputs_are_as_large_as_those_of_one_layer.
    """
    scaling = {
        name: replace(own, num_factors=num_factors)
        for name, own in factor_scaling(plan, factor_init).items()
    }
    last = plan.steps[-1].factor
    std = scaling[last].init_std / sqrt(num_terms)
    scaling[last] = replace(scaling[last], init_std=std, num_terms=num_terms)
    return scaling


def _factor_std(step: Step, factor_init: FactorInit) -> float:
    is_spectral = factor_init == "spectral"
    # With as many outputs as inputs or more, init_std is 1 / sqrt(fan_in).
    fan_out = step.fan_out if is_spectral else max(step.fan_in, step.fan_out)
    return init_std(step.fan_in, fan_out)


def factor_axes(step: Step) -> MatrixAxes:
    """The axes of a factor: batch, inputs, outputs, as in `Step.edges`."""
    num_inputs, num_outputs = len(step.contracted), len(step.new)
    return MatrixAxes(
        inputs=tuple(range(-num_inputs - num_outputs, -num_outputs)),
        outputs=tuple(range(-num_outputs, 0)),
    )


def infer_axes(scaling: Scaling, shape: Sequence[int]) -> MatrixAxes | None:
    """The axes that a rule declares, or else those that the shape tells; None if it does not.

    Known are (out, in) and (in, out), with other axes in front and several matrices stacked along
    out; (out, in, ...), the weight of a convolution; and vectors. In a square matrix, the last axis
    is the input; Muon's steps do not depend on it.
    """
    if scaling.axes is not None:
        return scaling.axes
    fan_in, fan_out = scaling.fan_in, scaling.fan_out
    if len(shape) == 1:
        return MatrixAxes((), (-1,)) if fan_in == 1 else MatrixAxes((-1,), ())
    if len(shape) < 2:
        return None
    rows, columns = shape[-2:]
    if columns == fan_in and rows % fan_out == 0:
        return MatrixAxes((-1,), (-2,), (-2, rows // fan_out))
    if rows == fan_in and columns % fan_out == 0:
        return MatrixAxes((-2,), (-1,), (-1, columns // fan_out))
    if shape[0] % fan_out == 0 and prod(shape[1:]) == fan_in:
        first = -len(shape)
        return MatrixAxes(tuple(range(first + 1, 0)), (first,), (first, shape[0] // fan_out))
    return None


def adam_rate(scaling: Scaling, lr: float, base: BaseShape) -> float:
    """The learning rate under Adam and relatives, whose steps ignore the scale of gradients.

        matrix: lr * base.fan_in / (num_factors * fan_in)       vector, scalar, embedding: lr

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
        scalar: lr, since its gradient sums over all outputs

    The output of the head does not grow with the model, so a dense one has
    lr * base.fan_in / fan_in, and its bias lr.
    Departure: the paper prints the rates of A and B with their roles swapped; repeats are the axes
    that the tensor has and the factor lacks, XB for A and YA for B where A comes first.
    Ref: [Y23, P24 App. C].  Checked by: test_groups.py::test_sgd_rates_by_hand.
    """
    if scaling.kind == "scalar":
        return lr
    if scaling.kind != "matrix":
        return lr * (scaling.fan_out / base.fan_out)
    top, bottom = scaling.fan_out * base.fan_in, scaling.fan_in * scaling.repeats * base.fan_out
    return lr * (top / bottom)


def muon_rate(scaling: Scaling, lr: float) -> float:
    """The learning rate under Muon, whose steps are orthogonal: the spectral norm of a step.

        matrix: lr * sqrt(fan_out / fan_in) / num_factors

    All layers then change their outputs by about lr times their size in a step, at any width and
    shape, and so do the factors of a layer together. A dense square layer gets lr.
    Departure: Muon's first implementation multiplies by sqrt(max(1, fan_out / fan_in)), which is
    the same for layers that do not narrow. Ref: [Y23, J24, L25].
    Checked by: test_muon.py::test_rates_by_hand.
    """
    return lr * (sqrt(scaling.fan_out / scaling.fan_in) / scaling.num_factors)


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
