"""Many experts by operations of torch, on the CPU: each expert multiplies its own rows.

An expert takes the rows of its tokens, multiplies them, and adds the results to the rows of its
tokens, so only one expert's rows are in memory at a time. A pair's weight multiplies its input.
Normalisation is one number per factor and expert, so it changes only the weights of pairs: u_p is
w_p times the scales.

Legend: as in `assignment`; factors are stacked along a first axis of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from einlinear.errors import EinlinearError
from einlinear.layers.moe.assignment import Assignment
from einlinear.layers.norm import expert_scales, expert_shrinkage, normalised_experts
from einlinear.layers.reference import multiply_by_einsum, reference_gradients
from einlinear.layers.strided import contiguous, multiply_strided, rows, strided_gradients
from einlinear.structures.plan import Plan


def is_matrix(plan: Plan) -> bool:
    """Whether the only factor is the matrix itself, inputs x outputs."""
    step = plan.steps[0]
    is_padded = (plan.d_in_padded, plan.d_out_padded) != (plan.d_in, plan.d_out)
    return len(plan.steps) == 1 and not step.batch and not step.kept and not is_padded


def no_scales(x_rd: Tensor) -> Tensor:
    """The scales of factors that are not normalised: none."""
    return x_rd.new_empty(0, dtype=torch.promote_types(x_rd.dtype, torch.float32))


def reference_experts(
    plan: Plan,
    x_rd: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    assignment: Assignment,
    stds: Sequence[float],
) -> Tensor:
    """The output rows by plain operations, which you can differentiate any number of times."""
    used = normalised_experts(factors, stds) if stds else factors
    rows_pd = x_rd.index_select(0, assignment.tokens_p) if assignment.x_by_token else x_rd
    if assignment.w_p is not None:
        rows_pd = rows_pd * assignment.w_p.unsqueeze(-1).to(rows_pd.dtype)
    ends = pairwise([0, *assignment.ends_e.tolist()])
    y_ro = torch.cat(
        [
            multiply_by_einsum(plan, rows_pd[start:end], [factor[expert] for factor in used])
            for expert, (start, end) in enumerate(ends)
        ]
    )
    if assignment.y_by_token:
        y_to = y_ro.new_zeros(assignment.num_tokens, plan.d_out)
        y_ro = y_to.index_add(0, assignment.tokens_p, y_ro)
    return y_ro if bias is None else y_ro + bias


class PortableExperts:
    """Both passes of many experts on real tensors, without autograd.

    It reads how many rows each expert has. A GPU would have to finish its work first, so
    `blocked` overrides what depends on that.

    variant: "matrix" for experts that are one matrix, else "strided" or "einsum".
    stds: the standard deviations of the factors, if they are normalised.
    """

    def __init__(
        self,
        plan: Plan,
        variant: str,
        x_rd: Tensor,
        factors: Sequence[Tensor],
        assignment: Assignment,
        stds: Sequence[float],
    ):
        self.plan, self.variant, self.assignment, self.stds = plan, variant, assignment, stds
        self.x_rd, self.factors = rows(x_rd), contiguous(factors)
        self._check()
        self._lay_out()

    def _lay_out(self) -> None:
        """Find the rows of each expert."""
        self.ends = [0, *self.assignment.ends_e.tolist()]
        self.most = max((end - start for start, end in pairwise(self.ends)), default=0)

    def _check(self) -> None:
        """Raise an error unless the factors are those of the plan, with an axis of experts."""
        shapes, x = self.plan.factor_shapes, self.x_rd
        for step, factor in zip(self.plan.steps, self.factors, strict=True):
            shape = (self.assignment.num_experts, *shapes[step.factor])
            if factor.shape != shape or (factor.dtype, factor.device) != (x.dtype, x.device):
                raise EinlinearError(
                    what=f"factor {step.factor} of the experts is {tuple(factor.shape)}, "
                    f"{factor.dtype}, on {factor.device}",
                    rule=f"here it is {shape}, {x.dtype}, on {x.device}, like the input",
                    fix="give input and factors one dtype and device, and the plan's shapes",
                )

    def forward(self, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output rows, and the scales of normalisation (factors x experts, or empty)."""
        assignment = self.assignment
        scales_fe = expert_scales(self.factors, self.stds) if self.stds else no_scales(self.x_rd)
        u_p = self._scaled(assignment.w_p, scales_fe)
        y_po = self._products()
        if not assignment.y_by_token:
            return y_po if u_p is None else _weighted(y_po, u_p, y_po), scales_fe
        y_to = self._sum(y_po, u_p)
        return y_to if bias is None else y_to.add_(bias), scales_fe

    def _products(self) -> Tensor:
        """The row of every pair times the matrix of its expert."""
        x_rd, plan, assignment = self.x_rd, self.plan, self.assignment
        taken = x_rd.new_empty(self.most, plan.d_in) if assignment.x_by_token else None
        y_po = x_rd.new_empty(assignment.num_pairs, plan.d_out)
        for expert, share in self._shares():
            x_pd = self._take(x_rd, share, taken)
            own = [factor[expert] for factor in self.factors]
            _multiply_rows(plan, self.variant, x_pd, own, y_po[share])
        return y_po

    def backward(
        self, grad_ro: Tensor, scales_fe: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of input, weights, bias and factors; maybe of weights nobody wants."""
        grad_ro, assignment = rows(grad_ro), self.assignment
        u_p, shrink_fe = self._scaled(assignment.w_p, scales_fe), None
        if self.stds and any(wanted[3:]):
            shrink_fe = expert_shrinkage(self.factors, self.stds, scales_fe)
        grad_x, grad_u, grads = self._gradients(grad_ro, u_p, shrink_fe, wanted)
        if grad_x is not None and assignment.x_by_token:
            grad_x = self._sum(grad_x, u_p)
        elif grad_x is not None and u_p is not None:
            grad_x = _weighted(grad_x, u_p, grad_x)
        grad_bias = grad_ro.sum(0) if wanted[2] else None
        return [grad_x, self._scaled(grad_u, scales_fe), grad_bias, *grads]

    def _gradients(
        self,
        grad_ro: Tensor,
        u_p: Tensor | None,
        shrink_fe: Tensor | None,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """The gradients of the rows of pairs before their weights, of u_p, and of factors."""
        plan, x_rd, assignment = self.plan, self.x_rd, self.assignment
        needs_dots = u_p is not None and (wanted[1] or shrink_fe is not None)
        grad_u = torch.zeros_like(u_p) if needs_dots and u_p is not None else None
        grads = [
            torch.empty_like(factor) if flag else None
            for factor, flag in zip(self.factors, wanted[3:], strict=True)
        ]
        inputs, weighted = x_rd.new_empty(2, self.most, plan.d_in)
        has_backs = wanted[0] or needs_dots
        backs = x_rd.new_empty(assignment.num_pairs, plan.d_in) if has_backs else None
        taken = grad_ro.new_empty(self.most, plan.d_out) if assignment.y_by_token else None
        for expert, share in self._shares():
            x_pd = self._take(x_rd, share, inputs if assignment.x_by_token else None)
            g_po = self._take(grad_ro, share, taken)
            own_u = None if u_p is None else u_p[share]
            in_pd = x_pd if own_u is None else _weighted(x_pd, own_u, weighted)
            own = [factor[expert] for factor in self.factors]
            outs = [None if grad is None else grad[expert] for grad in grads]
            into = None if backs is None else backs[share]
            back_pd = _gradients_of_rows(plan, self.variant, in_pd, own, g_po, outs, into)
            if grad_u is not None and own_u is not None:
                grad_u[share] = row_dots(back_pd, x_pd)
                if shrink_fe is not None:
                    _shrink_(outs, own, shrink_fe[:, expert] * (own_u @ grad_u[share]))
        self._clear_(grads)
        return backs if wanted[0] else None, grad_u, grads

    def _shares(self) -> Iterator[tuple[int, slice]]:
        """The experts that have pairs, and which."""
        for expert, (start, end) in enumerate(pairwise(self.ends)):
            if end > start:
                yield expert, slice(start, end)

    def _take(self, rows: Tensor, share: slice, into: Tensor | None) -> Tensor:
        """The rows of some pairs: gathered by token if there is a buffer, else a slice."""
        if into is None:
            return rows[share]
        tokens_p = self.assignment.tokens_p[share]
        return torch.index_select(rows, 0, tokens_p, out=into[: tokens_p.shape[0]])

    def _sum(self, rows_pd: Tensor, u_p: Tensor | None) -> Tensor:
        """The weighted sum of the rows of all pairs of each token."""
        num_tokens = self.assignment.num_tokens
        if not rows_pd.shape[0]:
            return rows_pd.new_zeros(num_tokens, rows_pd.shape[1])
        tokens_p, order_p = torch.sort(self.assignment.tokens_p, stable=True)
        every = torch.arange(num_tokens, device=tokens_p.device)
        starts = torch.searchsorted(tokens_p, every)
        weights = None if u_p is None else u_p.index_select(0, order_p).to(rows_pd.dtype)
        return embedding_bag(order_p, rows_pd, starts, mode="sum", per_sample_weights=weights)

    def _scaled(self, values_p: Tensor | None, scales_fe: Tensor) -> Tensor | None:
        """One value per pair times all scales of its expert's factors."""
        if values_p is None or not self.stds:
            return values_p
        return values_p * self.assignment.spread(scales_fe.prod(0)).to(values_p.dtype)

    def _clear_(self, grads: Sequence[Tensor | None]) -> None:
        """Zeros for the experts that have no pairs."""
        idle = [e for e, (start, end) in enumerate(pairwise(self.ends)) if end == start]
        for grad in grads:
            if grad is not None and idle:
                grad[idle] = 0


def _weighted(rows: Tensor, u_p: Tensor, into: Tensor) -> Tensor:
    """Rows times their weights, in a buffer, which may be the rows themselves."""
    return torch.mul(rows, u_p.unsqueeze(-1).to(rows.dtype), out=into[: rows.shape[0]])


def _shrink_(grads: Sequence[Tensor | None], factors: Sequence[Tensor], amounts_f: Tensor) -> None:
    """Subtract an amount of its factor from each gradient: the gradient through normalisation."""
    for grad, factor, amount in zip(grads, factors, amounts_f.unbind(), strict=True):
        if grad is not None:
            grad.addcmul_(factor, amount.to(grad.dtype), value=-1)


def row_dots(a_pd: Tensor, b_pd: Tensor) -> Tensor:
    """The dot product of each row of one tensor with that of the other, in float32 or better."""
    dtype = torch.promote_types(a_pd.dtype, torch.float32)
    dots_p: Tensor = torch.linalg.vecdot(a_pd.to(dtype), b_pd.to(dtype))
    return dots_p


def _multiply_rows(
    plan: Plan, variant: str, x_pd: Tensor, factors: Sequence[Tensor], into: Tensor
) -> None:
    """W x for the rows of one expert."""
    if variant == "matrix":
        torch.mm(x_pd, factors[0].view(plan.d_in, plan.d_out), out=into)
    elif variant == "strided":
        into.copy_(multiply_strided(plan, x_pd, factors, None))
    else:
        into.copy_(multiply_by_einsum(plan, x_pd, factors))


def _gradients_of_rows(
    plan: Plan,
    variant: str,
    x_pd: Tensor,
    factors: Sequence[Tensor],
    g_po: Tensor,
    outs: Sequence[Tensor | None],
    into: Tensor | None,
) -> Tensor:
    """The gradient of the rows of one expert, if a buffer is given; those of factors into outs."""
    rows = x_pd if into is None else into[: x_pd.shape[0]]
    if variant == "matrix":
        if outs[0] is not None:
            torch.mm(x_pd.t(), g_po, out=outs[0].view(plan.d_in, plan.d_out))
        matrix = factors[0].view(plan.d_in, plan.d_out)
        return rows if into is None else torch.mm(g_po, matrix.t(), out=rows)
    wanted = [into is not None, False, *(out is not None for out in outs)]
    made: Sequence[Tensor | None]
    if variant == "strided":
        made = strided_gradients(plan, x_pd, factors, g_po, wanted)
    else:
        made = reference_gradients(plan, x_pd, factors, g_po)
    for out, grad in zip(outs, made[2:], strict=True):
        if out is not None and grad is not None:
            out.copy_(grad)
    return rows if into is None or made[0] is None else rows.copy_(made[0])
