"""ProjectedAttention: nn.MultiheadAttention with its four projections as separate layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from einlinear.errors import EinlinearError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class ProjectedAttention(nn.Module):
    """Drop-in replacement for nn.MultiheadAttention that takes any layers as projections.

    nn.MultiheadAttention packs three of its projections into one matrix and reads the weight of the
    fourth, so it cannot hold structured layers. This module calls q_proj, k_proj, v_proj and
    out_proj instead.

    Args:
        source: the attention to replace; sizes, dropout and layout are copied from it.
        projections: layers by name; missing ones are dense layers with the weights of the source.
    """

    # nn.TransformerEncoderLayer reads these; without a packed projection it skips its fast path.
    in_proj_weight: Tensor | None = None
    in_proj_bias: Tensor | None = None
    _qkv_same_embed_dim = False

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    def __init__(self, source: nn.MultiheadAttention, projections: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.embed_dim: int = source.embed_dim
        self.kdim: int = source.kdim
        self.vdim: int = source.vdim
        self.num_heads: int = source.num_heads
        self.head_dim: int = source.head_dim
        self.dropout: float = source.dropout
        self.batch_first: bool = source.batch_first
        for name in PROJECTIONS:
            self.add_module(name, projections.get(name) or projection_of(source, name))
        # Not self.train(), which would overwrite the training flags of the projections.
        self.training = source.training

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what nn.MultiheadAttention returns: the output and, if needed, the weights."""
        self._check(query, key, value, attn_mask, is_causal)
        is_batched = query.dim() == 3
        is_transposed = is_batched and not self.batch_first
        if not is_batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif is_transposed:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            getattr(self, name)(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for name, x in zip(PROJECTIONS, (query, key, value), strict=False)
        )
        is_masked = key_padding_mask is not None or need_weights
        is_causal = is_causal and not is_masked  # the hint replaces attn_mask only if it is alone
        mask = None if is_causal else self._mask(attn_mask, key_padding_mask, query)
        mixed, weights = self._attend(q, k, v, mask, is_causal, need_weights)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if is_batched else weights.squeeze(0)
        if not is_batched:
            return output.squeeze(0), weights
        return output.transpose(0, 1) if is_transposed else output, weights

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mixed values (batch, heads, queries, head width) and, if needed, weights."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            mixed = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal
            )
            return mixed, None
        scores = q * self.head_dim**-0.5 @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        weights = functional.dropout(weights, dropout) if dropout else weights
        return weights.to(v.dtype) @ v, weights

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> Tensor | None:
        """Combine both masks into one to add to the scores (batch, heads, queries, keys)."""
        masks = []
        if attn_mask is not None:
            is_per_head = attn_mask.dim() == 3
            shape = (query.shape[0], self.num_heads) if is_per_head else (1, 1)
            masks.append(_added(attn_mask, query).reshape(*shape, *attn_mask.shape[-2:]))
        if key_padding_mask is not None:
            masks.append(_added(key_padding_mask, query)[:, None, None, :])
        return sum(masks[1:], masks[0]) if masks else None

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> None:
        if is_causal and attn_mask is None:
            raise EinlinearError(
                what="is_causal is given without attn_mask",
                rule="as in torch, is_causal only tells that attn_mask is the causal mask",
                fix="also give attn_mask=nn.Transformer.generate_square_subsequent_mask(length)",
            )
        dims = {query.dim(), key.dim(), value.dim()}
        if any(x.is_nested for x in (query, key, value)) or dims not in ({2}, {3}):
            raise EinlinearError(
                what="query, key and value are "
                + ", ".join(
                    "nested" if x.is_nested else str(tuple(x.shape)) for x in (query, key, value)
                ),
                rule="all three are (length, width), or all have a batch axis; none is nested",
                fix="pad sequences of different lengths and give key_padding_mask",
            )

    def extra_repr(self) -> str:
        """Return the settings that print(attention) shows."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"dropout={self.dropout}, batch_first={self.batch_first}"
        )


def projection_widths(source: nn.MultiheadAttention, name: str) -> tuple[int, int]:
    """Return the input and output width of one of the four projections."""
    d_in = {"k_proj": source.kdim, "v_proj": source.vdim}.get(name, source.embed_dim)
    return int(d_in), int(source.embed_dim)


def projection_params(source: nn.MultiheadAttention, name: str) -> dict[str, nn.Parameter]:
    """Return the parameters of one of the four projections, by their names in the source."""
    packed = "in_proj_weight" if source.in_proj_weight is not None else f"{name}_weight"
    names = ["out_proj.weight", "out_proj.bias"] if name == "out_proj" else [packed, "in_proj_bias"]
    known = dict(source.named_parameters())
    return {key: known[key] for key in names if key in known}


def projection_of(source: nn.MultiheadAttention, name: str) -> nn.Module:
    """Return one of the four projections as a dense layer with the weights of the source."""
    if name == "out_proj":
        return source.out_proj
    weight, *bias = projection_params(source, name).values()
    d_in, d_out = projection_widths(source, name)
    linear = nn.Linear(d_in, d_out, bias=bool(bias), device="meta")
    start = PROJECTIONS.index(name) * d_out
    rows = slice(start, start + d_out)  # of the packed weight and bias
    linear.weight = _copied(weight, slice(None) if source.in_proj_weight is None else rows)
    if bias:
        linear.bias = _copied(bias[0], rows)
    return linear.train(source.training)


def packed_attention(source: ProjectedAttention) -> nn.MultiheadAttention | None:
    """Return the nn.MultiheadAttention with these projections; None unless all are dense."""
    *inputs, out = layers = [source.get_submodule(name) for name in PROJECTIONS]
    has_bias = {getattr(layer, "bias", None) is not None for layer in layers}
    if not all(isinstance(layer, nn.Linear) for layer in layers) or len(has_bias) > 1:
        return None
    packed = nn.MultiheadAttention(
        source.embed_dim,
        source.num_heads,
        source.dropout,
        bias=has_bias.pop(),
        kdim=source.kdim,
        vdim=source.vdim,
        batch_first=source.batch_first,
        device="meta",
    )
    weights = [layer.get_parameter("weight") for layer in inputs]
    if packed.in_proj_weight is not None:
        packed.in_proj_weight = _stacked(weights)
    else:
        for name, weight in zip(PROJECTIONS, weights, strict=False):
            packed.register_parameter(f"{name}_weight", nn.Parameter(weight, weight.requires_grad))
    if packed.in_proj_bias is not None:
        packed.in_proj_bias = _stacked([layer.get_parameter("bias") for layer in inputs])
    packed.register_module("out_proj", out)
    packed.training = source.training
    return packed


def _stacked(parts: list[nn.Parameter]) -> nn.Parameter:
    is_trained = any(part.requires_grad for part in parts)
    return nn.Parameter(torch.cat([part.detach() for part in parts]), is_trained)


def _copied(parameter: nn.Parameter, rows: slice) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[rows].clone(), parameter.requires_grad)


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask to add to the scores; True in a boolean mask hides a key."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))
