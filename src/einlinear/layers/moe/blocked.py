"""Many experts on a GPU: rows in blocks of one length, multiplied all together.

How many rows an expert has is known only on the device, and reading it would make the program wait
for all work before it. So pairs are laid out in blocks of one length, each with rows of one expert,
the last ones filled up with zeros. How many blocks suffice follows from the numbers of pairs and
experts alone; those that are left hold zeros.

Legend: as in `assignment`; n blocks, b rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from einlinear.layers.moe.portable import PortableExperts, row_dots
from einlinear.layers.strided import padded
from einlinear.structures.plan import Plan, Step

_MOST_BLOCKS = 8  # of an expert, if all have equally many rows


def block_length(plan: Plan, num_pairs: int, num_experts: int) -> int:
    """How many rows a block has.

    With r blocks for every expert, rows of zeros add up to 1/r of all rows, and every block reads
    the weights of its expert again: r is chosen such that both move about as many numbers.
    """
    rows = num_pairs * (plan.d_in + plan.d_out + plan.inner_width)
    each = min(_MOST_BLOCKS, max(1, isqrt(rows // max(1, num_experts * plan.params))))
    return max(1, -(-num_pairs // max(1, num_experts * each)))


class BlockedExperts(PortableExperts):
    """Both passes of many experts, in shapes that do not depend on where tokens go."""

    def _lay_out(self) -> None:
        """Find the pair of every row of a block, and where each pair is."""
        num_pairs, num_experts = self.assignment.num_pairs, self.assignment.num_experts
        length = block_length(self.plan, num_pairs, num_experts)
        num_blocks = (num_pairs + num_experts * (length - 1)) // length
        ends_e = self.assignment.ends_e
        counts_e = ends_e.diff(prepend=ends_e.new_zeros(1))
        last_e = torch.div(counts_e + (length - 1), length, rounding_mode="floor").cumsum(0)
        every_n = torch.arange(num_blocks, device=ends_e.device)
        self.num_blocks = num_blocks
        # The blocks that are left count as those of the last expert when they are multiplied.
        experts_n = torch.searchsorted(last_e, every_n, right=True).clamp_(max=num_experts - 1)
        self.experts_n = experts_n
        # Where the blocks of each expert start, and where all end.
        self.starts = torch.cat([last_e.new_zeros(1), last_e])
        shift_e = ends_e - counts_e - length * self.starts[:-1]  # from rows of blocks to pairs
        first_n = shift_e.index_select(0, experts_n) + length * every_n
        pairs_nb = first_n.unsqueeze(-1) + torch.arange(length, device=ends_e.device)
        self.is_empty_nb = pairs_nb >= ends_e.index_select(0, experts_n).unsqueeze(-1)
        self.pairs_nb = pairs_nb.masked_fill(self.is_empty_nb, 0)
        places_p = torch.arange(num_pairs, device=ends_e.device)
        self.places_p = places_p - self.assignment.spread(shift_e)

    def _products(self) -> Tensor:
        """The row of every pair times the matrix of its expert."""
        if not self.assignment.num_pairs:
            return self.x_rd.new_zeros(0, self.plan.d_out)
        x_nbd = self._in_blocks(self.x_rd, self.assignment.x_by_token)
        y_nbo = _multiplied(self.plan, x_nbd, self._own())[-1].flatten(2)
        return self._by_pair(y_nbo[..., : self.plan.d_out])

    def _gradients(
        self,
        grad_ro: Tensor,
        u_p: Tensor | None,
        shrink_fe: Tensor | None,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """The gradients of the rows of pairs before their weights, of u_p, and of factors."""
        plan = self.plan
        grads: list[Tensor | None]
        if not self.assignment.num_pairs:
            grads = [
                torch.zeros_like(f) if w else None
                for f, w in zip(self.factors, wanted[3:], strict=True)
            ]
            back = self.x_rd.new_zeros(0, plan.d_in) if wanted[0] else None
            return back, None if u_p is None else torch.zeros_like(u_p), grads
        x_nbd = self._in_blocks(self.x_rd, self.assignment.x_by_token)
        g_nbo = self._in_blocks(grad_ro, self.assignment.y_by_token)
        u_nb = None if u_p is None else self._in_blocks(u_p, False)
        in_nbd = x_nbd if u_nb is None else x_nbd * u_nb.unsqueeze(-1).to(x_nbd.dtype)
        back_nbd, made = _gradients_of_blocks(plan, in_nbd, self._own(), g_nbo, wanted[3:])
        grads = [None if grad is None else self._by_expert(grad) for grad in made]
        grad_u = None
        if u_nb is not None and (wanted[1] or shrink_fe is not None):
            dots_nb = row_dots(back_nbd, x_nbd)
            grad_u = self._by_pair(dots_nb)
            if shrink_fe is not None:
                amounts_e = self._by_expert((u_nb * dots_nb).sum(-1, keepdim=True)).squeeze(-1)
                self._shrink_all_(grads, shrink_fe * amounts_e)
        return self._by_pair(back_nbd) if wanted[0] else None, grad_u, grads

    def _own(self) -> list[Tensor]:
        """The factors of the expert of each block."""
        return [factor.index_select(0, self.experts_n) for factor in self.factors]

    def _in_blocks(self, rows: Tensor, by_token: bool) -> Tensor:
        """The rows of pairs or of their tokens in blocks, and zeros elsewhere."""
        pairs = self.pairs_nb.flatten()
        if by_token:
            pairs = self.assignment.tokens_p.index_select(0, pairs)
        taken = rows.index_select(0, pairs).view(*self.pairs_nb.shape, *rows.shape[1:])
        is_empty = self.is_empty_nb.view(*self.pairs_nb.shape, *[1] * (rows.dim() - 1))
        return taken.masked_fill_(is_empty, 0)

    def _by_pair(self, blocks: Tensor) -> Tensor:
        """What blocks hold for each pair."""
        return blocks.flatten(0, 1).index_select(0, self.places_p)

    def _by_expert(self, blocks: Tensor) -> Tensor:
        """The sum over the blocks of each expert, always in the same order."""
        every_n = torch.arange(self.num_blocks, device=self.starts.device)
        sums = embedding_bag(every_n, blocks.flatten(1), self.starts, mode="sum")
        return sums[:-1].view(-1, *blocks.shape[1:])

    def _shrink_all_(self, grads: Sequence[Tensor | None], amounts_fe: Tensor) -> None:
        """Subtract an amount of its factor from each gradient, for every expert."""
        for grad, factor, amounts_e in zip(grads, self.factors, amounts_fe, strict=True):
            if grad is not None:
                amounts = amounts_e.view(-1, *[1] * (factor.dim() - 1)).to(grad.dtype)
                grad.addcmul_(factor, amounts, value=-1)


def _multiplied(plan: Plan, x_nbd: Tensor, own: Sequence[Tensor]) -> list[Tensor]:
    """The padded input and what each step makes of it, every block with factors of its own."""
    tensors = [padded(x_nbd, plan.d_in_padded).reshape(*x_nbd.shape[:2], *plan.x_shape)]
    for step, factor in zip(plan.steps, own, strict=False):
        before, word, after = _words(step)
        tensors.append(torch.einsum(f"{before},{word}->{after}", tensors[-1], factor))
    return tensors


def _gradients_of_blocks(
    plan: Plan, x_nbd: Tensor, own: Sequence[Tensor], g_nbo: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of the input and of the wanted factors of every block."""
    tensors = _multiplied(plan, x_nbd, own[:-1])
    y_shape = [plan.sizes[edge] for edge in plan.y_edges]
    grad = padded(g_nbo, plan.d_out_padded).reshape(*g_nbo.shape[:2], *y_shape)
    made: list[Tensor | None] = []
    steps = list(zip(plan.steps, own, tensors, wanted, strict=True))
    for step, factor, z, flag in reversed(steps):
        before, word, after = _words(step)
        made.append(torch.einsum(f"{before},{after}->{word}", z, grad) if flag else None)
        grad = torch.einsum(f"{after},{word}->{before}", grad, factor)
    return grad.flatten(2)[..., : plan.d_in], made[::-1]


def _words(step: Step) -> tuple[str, str, str]:
    """The letters of a step's input, factor and output; Y is for blocks, Z for their rows."""
    before, word, after = step.equation.replace("...", "YZ").replace("->", ",").split(",")
    return before, f"Y{word}", after
