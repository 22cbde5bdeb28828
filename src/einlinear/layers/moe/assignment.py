"""Which rows go to which experts: the one form that every way of multiplying experts takes.

Legend for all of moe/: t tokens, k active experts of a token, p pairs (token, expert), r rows (of
tokens or of pairs), d inputs, o outputs, e experts, f factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from einlinear.layers.export.plain import is_exporting


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The (token, expert) pairs of one multiply, sorted by expert.

    tokens_p: the token of each pair.
    ends_e: where the pairs of each expert end.
    w_p: the weight of each pair; None if all are 1.
    num_tokens: how many tokens there are.
    x_by_token: whether the input has a row per token; otherwise it has a row per pair.
    y_by_token: whether the output has a row per token, the sum over its pairs; otherwise it has a
        row per pair.
    """

    tokens_p: Tensor
    ends_e: Tensor
    w_p: Tensor | None
    num_tokens: int
    x_by_token: bool = True
    y_by_token: bool = True

    @property
    def num_pairs(self) -> int:
        """How many pairs there are."""
        return self.tokens_p.shape[0]

    @property
    def num_experts(self) -> int:
        """How many experts there are, with or without pairs."""
        return self.ends_e.shape[0]

    def num_rows(self, by_token: bool) -> int:
        """How many rows the input or output has."""
        return self.num_tokens if by_token else self.num_pairs

    def to_pairs(self) -> Assignment:
        """The same pairs without weights, from a row per token to a row per pair."""
        return Assignment(self.tokens_p, self.ends_e, None, self.num_tokens, True, False)

    def from_pairs(self) -> Assignment:
        """The same pairs with their weights, from a row per pair to a row per token."""
        return Assignment(self.tokens_p, self.ends_e, self.w_p, self.num_tokens, False, True)

    def spread(self, values_e: Tensor) -> Tensor:
        """The value of each pair's expert."""
        places_p = torch.arange(self.num_pairs, device=self.ends_e.device)
        if is_exporting():  # ONNX has no searchsorted
            experts_p = (self.ends_e <= places_p.unsqueeze(-1)).sum(-1)
        else:
            experts_p = torch.searchsorted(self.ends_e, places_p, right=True)
        return values_e.index_select(0, experts_p)


def assign(experts_tk: Tensor, weights_tk: Tensor, num_experts: int) -> tuple[Assignment, Tensor]:
    """The assignment of tokens to the experts they chose, and the order of its pairs.

    The order says where each pair is among the flattened choices. Pairs with an expert of
    `num_experts` or more come last, after all of `ends_e`.
    """
    sort = _sorted_plainly if is_exporting() else _sorted
    order_p, tokens_p, ends_e = sort(experts_tk, num_experts)
    w_p = weights_tk.flatten().index_select(0, order_p)
    return Assignment(tokens_p, ends_e, w_p, experts_tk.shape[0]), order_p


def _sorted(experts_tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of pairs by expert, the token of each, and where those of each expert end."""
    sorted_p, order_p = torch.sort(experts_tk.flatten(), stable=True)
    every_e = torch.arange(num_experts, device=order_p.device)
    ends_e = torch.searchsorted(sorted_p, every_e, right=True)
    return order_p, torch.div(order_p, experts_tk.shape[-1], rounding_mode="floor"), ends_e


def _sorted_plainly(experts_tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same by operators that ONNX has: no stable sort, and no division of whole numbers."""
    experts_p = experts_tk.flatten()
    num_pairs, device = experts_p.shape[0], experts_p.device
    keys_p = experts_p * num_pairs + torch.arange(num_pairs, device=device)  # no two are equal
    order_p = torch.sort(keys_p).indices
    tokens_tk = torch.arange(experts_tk.shape[0], device=device).unsqueeze(-1)
    tokens_p = tokens_tk.expand_as(experts_tk).flatten().index_select(0, order_p)
    every_e = torch.arange(num_experts, device=device)
    return order_p, tokens_p, (experts_p.unsqueeze(-1) <= every_e).sum(0)
