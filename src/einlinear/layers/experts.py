"""Many experts of one plan, each multiplied with its own rows: only what is active is computed.

The work is a list of pairs (token, expert), sorted by expert. Each expert takes the rows of its
tokens, multiplies them, and adds the results to the rows of its tokens; in between, only one
expert's rows are in memory. A pair's weight multiplies its input. Weight normalisation makes a
factor s M with one number s per expert and factor, so it, too, only changes the weights of pairs:
normalised factors are never written.

Legend: x_rd rows of input and y_re rows of output, r being tokens or pairs; p is pairs; w_p are
weights, u_p weights with normalisation; a factor has the axis of experts in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from einlinear.errors import EinlinearError
from einlinear.layers import strided
from einlinear.layers.execute import einsum_steps
from einlinear.layers.operators import gradients
from einlinear.layers.strided import contiguous, padded
from einlinear.structures.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs (token, expert) of some tokens, sorted by expert.

    order: where each pair stands among the choices of the tokens, flattened.
    tokens: the token of each pair.
    ends: where the pairs of each expert end.
    """

    order: Tensor
    tokens: Tensor
    ends: Tensor


def sort_pairs(experts_tk: Tensor, num_experts: int) -> Pairs:
    """The pairs, given the experts that each token chose."""
    sorted_p, order = torch.sort(experts_tk.flatten(), stable=True)
    every = torch.arange(num_experts, device=order.device)
    ends = torch.searchsorted(sorted_p, every, right=True)
    tokens = torch.div(order, experts_tk.shape[-1], rounding_mode="floor")
    return Pairs(order, tokens, ends)


def expert_scales(factors: Sequence[Tensor], stds: Sequence[float]) -> Tensor:
    """What normalisation multiplies each factor of each expert by: min(1, std / rms)."""
    rows = []
    for factor, std in zip(factors, stds, strict=True):
        numbers = factor.flatten(1)
        dtype = torch.promote_types(factor.dtype, torch.float32)
        norms = torch.linalg.vector_norm(numbers, dim=1, dtype=dtype)
        excess = norms / (std * numbers.shape[1] ** 0.5)
        rows.append(excess.clamp(min=1.0).reciprocal())
    return torch.stack(rows)


def normalised_experts(factors: Sequence[Tensor], stds: Sequence[float]) -> list[Tensor]:
    """The factors as they are multiplied, written out; differentiable."""
    scales_fe = expert_scales(factors, stds)
    return [
        factor * scales_e.view(-1, *[1] * (factor.dim() - 1)).to(factor.dtype)
        for factor, scales_e in zip(factors, scales_fe, strict=True)
    ]


def expert_shrinkage(factors: Sequence[Tensor], stds: Sequence[float], scales_fe: Tensor) -> Tensor:
    """1 / (n rms^2) of each factor of each expert where it is scaled down, else 0.

    The gradient of a factor M through its scale s is -c / (n rms(M)^2) M where s < 1. c is the
    gradient of the experts' product with respect to M, times M; it is the same for all factors of
    an expert, since its matrix is linear in each.
    """
    numbers = [factor[0].numel() * std**2 for factor, std in zip(factors, stds, strict=True)]
    shrink_fe = scales_fe.square() / scales_fe.new_tensor(numbers).unsqueeze(-1)
    return torch.where(scales_fe < 1, shrink_fe, 0.0)


def is_matrix(plan: Plan) -> bool:
    """Whether the only factor is the matrix itself, inputs x outputs."""
    step = plan.steps[0]
    is_padded = (plan.d_in_padded, plan.d_out_padded) != (plan.d_in, plan.d_out)
    return len(plan.steps) == 1 and not step.batch and not step.kept and not is_padded


class Work:
    """Both passes of many experts on real tensors, without autograd.

    how: "matrix" for experts that are one matrix, else "strided" or "einsum". What the engine
    computes goes by `grouped` instead.
    takes: whether x has a row per token, to be taken by its pairs; else it has a row per pair.
    adds: the number of tokens whose rows the results are added to; -1 for a row per pair.
    """

    def __init__(
        self,
        plan: Plan,
        how: str,
        x_rd: Tensor,
        tokens_p: Tensor,
        ends_e: Tensor,
        factors: Sequence[Tensor],
        *,
        takes: bool,
        adds: int,
    ):
        self.plan, self.how, self.takes, self.adds = plan, how, takes, adds
        self.x_rd, self.factors, self.tokens_p = strided.rows(x_rd), contiguous(factors), tokens_p
        self.ends_e = ends_e
        self.ends = [0, *ends_e.tolist()]
        self.most = max((end - start for start, end in pairwise(self.ends)), default=0)
        self._check()

    def _check(self) -> None:
        """Whether the factors are those of the plan, with an axis of experts."""
        shapes = self.plan.factor_shapes
        for step, factor in zip(self.plan.steps, self.factors, strict=True):
            shape = (len(self.ends) - 1, *shapes[step.factor])
            x = self.x_rd
            if factor.shape != shape or (factor.dtype, factor.device) != (x.dtype, x.device):
                raise EinlinearError(
                    what=f"factor {step.factor} of the experts is {tuple(factor.shape)}, "
                    f"{factor.dtype}, on {factor.device}",
                    rule=f"here it is {shape}, {x.dtype}, on {x.device}, as the input",
                    fix="give input and factors one dtype and device, and the plan's shapes",
                )

    def _shares(self) -> Iterator[tuple[int, slice]]:
        """The experts that have pairs, and which."""
        for expert, (start, end) in enumerate(pairwise(self.ends)):
            if end > start:
                yield expert, slice(start, end)

    def _take(self, rows: Tensor, share: slice, into: Tensor | None) -> Tensor:
        """The rows of some pairs: taken by token into a buffer, or as they lie without one."""
        if into is None:
            return rows[share]
        tokens = self.tokens_p[share]
        return torch.index_select(rows, 0, tokens, out=into[: tokens.shape[0]])

    def _sum(self, rows_pd: Tensor, u_p: Tensor | None, num_tokens: int) -> Tensor:
        """The rows of all pairs of each token, weighted and added up."""
        if not rows_pd.shape[0]:
            return rows_pd.new_zeros(num_tokens, rows_pd.shape[1])
        tokens_p, order_p = torch.sort(self.tokens_p, stable=True)
        every = torch.arange(num_tokens, device=tokens_p.device)
        starts = torch.searchsorted(tokens_p, every)
        weights = None if u_p is None else u_p.index_select(0, order_p).to(rows_pd.dtype)
        return embedding_bag(order_p, rows_pd, starts, mode="sum", per_sample_weights=weights)

    def scaled(self, w_p: Tensor, scales_fe: Tensor) -> Tensor:
        """The weights of pairs times all scales of their experts' factors."""
        counts = self.ends_e.diff(prepend=self.ends_e.new_zeros(1))
        scale_p = torch.repeat_interleave(scales_fe.prod(0), counts, output_size=w_p.shape[0])
        return w_p * scale_p.to(w_p.dtype)

    def forward(self, u_p: Tensor | None, bias: Tensor | None) -> Tensor:
        """The output rows; the bias is only for results that are added."""
        x_rd = self.x_rd
        taken = x_rd.new_empty(self.most, self.plan.d_in) if self.takes else None
        y_pe = x_rd.new_empty(self.tokens_p.shape[0], self.plan.d_out)
        for expert, share in self._shares():
            own = [factor[expert] for factor in self.factors]
            multiply_rows(self.plan, self.how, self._take(x_rd, share, taken), own, y_pe[share])
        if self.adds < 0:
            return y_pe if u_p is None else _weighted(y_pe, u_p, y_pe)
        y_te = self._sum(y_pe, u_p, self.adds)
        return y_te if bias is None else y_te.add_(bias)

    def backward(
        self,
        grad_re: Tensor,
        u_p: Tensor | None,
        wanted: Sequence[bool],
        shrink_fe: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """The gradients of the input, of u_p and of the factors before normalisation.

        shrink_fe: what `expert_shrinkage` says, if factors are normalised.
        """
        plan, x_rd, grad_re = self.plan, self.x_rd, strided.rows(grad_re)
        needs_dots = u_p is not None and (wanted[1] or shrink_fe is not None)
        grad_u = torch.zeros_like(u_p) if needs_dots and u_p is not None else None
        grads = [
            torch.empty_like(factor) if flag else None
            for factor, flag in zip(self.factors, wanted[3:], strict=True)
        ]
        inputs, weighted = x_rd.new_empty(2, self.most, plan.d_in)
        has_backs = wanted[0] or needs_dots
        backs = x_rd.new_empty(self.tokens_p.shape[0], plan.d_in) if has_backs else None
        taken = grad_re.new_empty(self.most, plan.d_out) if self.adds >= 0 else None
        for expert, share in self._shares():
            x_pd = self._take(x_rd, share, inputs if self.takes else None)
            g_pe = self._take(grad_re, share, taken)
            own_u = None if u_p is None else u_p[share]
            in_pd = x_pd if own_u is None else _weighted(x_pd, own_u, weighted)
            own = [factor[expert] for factor in self.factors]
            outs = [None if grad is None else grad[expert] for grad in grads]
            into = None if backs is None else backs[share]
            back_pd = gradients_of_rows(plan, self.how, in_pd, own, g_pe, outs, into)
            if grad_u is not None and own_u is not None:
                grad_u[share] = _row_dots(back_pd, x_pd)
                if shrink_fe is not None:
                    _shrink_(outs, own, shrink_fe[:, expert] * (own_u @ grad_u[share]))
        self._clear_(grads)
        if not wanted[0] or backs is None:
            return None, grad_u, grads
        if self.takes:
            return self._sum(backs, u_p, x_rd.shape[0]), grad_u, grads
        return backs if u_p is None else _weighted(backs, u_p, backs), grad_u, grads

    def _clear_(self, grads: Sequence[Tensor | None]) -> None:
        """Zeros for the experts that have no pairs."""
        idle = [e for e, (start, end) in enumerate(pairwise(self.ends)) if end == start]
        for grad in grads:
            if grad is not None and idle:
                grad[idle] = 0


def _weighted(rows: Tensor, u_p: Tensor, into: Tensor | None) -> Tensor:
    """Rows times their weights, in a buffer if there is one (which may hold the rows)."""
    weights = u_p.unsqueeze(-1).to(rows.dtype)
    if into is None:
        return rows * weights
    return torch.mul(rows, weights, out=into[: rows.shape[0]])


def _shrink_(grads: Sequence[Tensor | None], factors: Sequence[Tensor], amounts_f: Tensor) -> None:
    """Take from each gradient an amount of its factor: the gradient through normalisation."""
    for grad, factor, amount in zip(grads, factors, amounts_f.unbind(), strict=True):
        if grad is not None:
            grad.addcmul_(factor, amount.to(grad.dtype), value=-1)


def _row_dots(a_pd: Tensor, b_pd: Tensor) -> Tensor:
    dtype = torch.promote_types(a_pd.dtype, torch.float32)
    dots_p: Tensor = torch.linalg.vecdot(a_pd.to(dtype), b_pd.to(dtype))
    return dots_p


def multiply_rows(
    plan: Plan, how: str, x_pd: Tensor, factors: Sequence[Tensor], into: Tensor
) -> None:
    """W x for the rows of one expert."""
    if how == "matrix":
        torch.mm(x_pd, factors[0].view(plan.d_in, plan.d_out), out=into)
    elif how == "strided":
        into.copy_(strided.forward(plan, x_pd, factors, None))
    else:
        y_pe = einsum_steps(plan, padded(x_pd, plan.d_in_padded), factors)
        into.copy_(y_pe[:, : plan.d_out])


def gradients_of_rows(
    plan: Plan,
    how: str,
    x_pd: Tensor,
    factors: Sequence[Tensor],
    g_pe: Tensor,
    outs: Sequence[Tensor | None],
    into: Tensor | None,
) -> Tensor:
    """The gradient of the rows of one expert, if a buffer is given; those of factors into outs."""
    rows = x_pd if into is None else into[: x_pd.shape[0]]
    if how == "matrix":
        if outs[0] is not None:
            torch.mm(x_pd.t(), g_pe, out=outs[0].view(plan.d_in, plan.d_out))
        matrix = factors[0].view(plan.d_in, plan.d_out)
        return rows if into is None else torch.mm(g_pe, matrix.t(), out=rows)
    wanted = [into is not None, False, *(out is not None for out in outs)]
    made: Sequence[Tensor | None]
    if how == "strided":
        made = strided.backward(plan, x_pd, factors, g_pe, wanted)
    else:
        made = gradients(plan, [x_pd, *factors], g_pe)[0]
    for out, grad in zip(outs, made[2:], strict=True):
        if out is not None and grad is not None:
            out.copy_(grad)
    return rows if into is None or made[0] is None else rows.copy_(made[0])
