"""GPT: a GPT-2 built from plain linear layers, all in this file.

The suffix of a tensor names its axes: b batch, h heads, i tokens being read, j tokens that can be
attended to (those being read and those already in the cache), d features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from einlinear.errors import EinlinearError
from einlinear.layers.machine import room_for
from einlinear.layers.scaling import EMBEDDING_STD, Scaling, embedding_scaling
from einlinear.models.choices import PositionKind
from einlinear.models.mup.init import init_
from einlinear.structures.values import one_of, true_or_false, whole_number

MOST_BLOCKS = 10_000
"""The largest depth: a deeper model would take minutes to build, even a narrow one."""

_HEAD_SIZE = 64
_TIED_WIDTH = 64  # the width at which a tied head does not rescale its input
_ROTARY_BASE = 10_000.0
_NORM_MACS = 5  # per input element of a norm


class GPT(nn.Module):
    """The language model of the paper: GPT-2 with the changes that µP needs.

        x = embedding[token] + places[i]             places only with learned positions
        x = x + s attention(norm(x))                 in each block, s = branch_scale
        x = x + s down(gelu(up(norm(x))))
        logits = head(norm(x))

    Queries and keys are normalised per head, and attention scores are 8 q k / head_size. The head
    and the last layer of every residual branch start at zero, so a new model gives equal logits.
    Every linear layer is an nn.Linear that `convert_` can replace. Call `init_` after converting:
    the new layers do not know that they should start at zero. The defaults are the paper's model of
    text; its model of pixels has num_heads=8, bias=True, zero_query=True and branch_scale=1.
    Ref: [P24, R19]; rotary [S21]; alibi [P22].

    Args:
        vocab_size: number of tokens in the vocabulary.
        context: maximum sequence length.
        width: number of features per token.
        depth: number of blocks.
        head_size: features per attention head; 64 if neither this nor num_heads is given.
        num_heads: number of attention heads; give this or head_size.
        positions: "learned" as in the paper, "rotary" or "alibi".
        embedding_std: initial standard deviation of the embeddings.
        tied: share one weight between the embedding and the head. The input of the head is then
            multiplied by 64 / width, because an embedding moves by the same amount at every width.
            Keep embedding_std small: a token's own logit starts near 64 embedding_std.
        bias: whether norms and linear layers have biases, except the projections to queries, keys
            and values.
        zero_query: whether the projections to queries start at zero, too.
        heads_inner: whether queries, keys and values are laid out as head size x heads instead of
            heads x head size, for structures aligned by `heads(axis="own")`. For dense layers, only
            the order of rows and columns differs.
        branch_scale: factor of the residual branches; sqrt(3 / depth) by default, which is 1 for 3
            blocks.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        context: int,
        width: int,
        depth: int,
        head_size: int | None = None,
        num_heads: int | None = None,
        positions: PositionKind = "learned",
        embedding_std: float = EMBEDDING_STD,
        tied: bool = False,
        bias: bool = False,
        zero_query: bool = False,
        heads_inner: bool = False,
        branch_scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = whole_number(vocab_size, "vocab_size", 1)
        self.context = whole_number(context, "context", 1)
        self.width = whole_number(width, "width", 1)
        self.depth = whole_number(depth, "depth", 1, MOST_BLOCKS)
        self.num_heads = _count_heads(self.width, head_size, num_heads)
        self.head_size = self.width // self.num_heads
        self.positions = one_of(positions, "positions", get_args(PositionKind))
        if self.positions == "rotary" and self.head_size % 2:
            raise EinlinearError(
                what=f"positions is 'rotary' and head_size is {self.head_size}",
                rule="rotary positions rotate pairs of features",
                fix='give an even head_size, or positions="alibi"',
            )
        self.tied, self.bias, self.zero_query = tied, bias, zero_query
        self.heads_inner = true_or_false(heads_inner, "heads_inner")
        self.branch_scale = sqrt(3 / self.depth) if branch_scale is None else float(branch_scale)
        with self._room():
            self._build(embedding_std, {"device": device, "dtype": dtype})
        if not self.head.weight.is_meta:
            init_(self)

    def _build(self, embedding_std: float, to: dict[str, Any]) -> None:
        self.embedding = Embedding(self.vocab_size, self.width, embedding_std, **to)
        self.places: Embedding | None = None
        if self.positions == "learned":
            self.places = Embedding(self.context, self.width, embedding_std, **to)
        self.blocks = nn.ModuleList(
            Block(
                self.width,
                self.num_heads,
                self.branch_scale,
                bias=self.bias,
                zero_query=self.zero_query,
                heads_inner=self.heads_inner,
                **to,
            )
            for _ in range(self.depth)
        )
        self.norm = nn.LayerNorm(self.width, bias=self.bias, **to)
        self.head = nn.Linear(self.width, self.vocab_size, bias=self.bias, **to)
        if self.tied:
            self.head.weight = self.embedding.weight

    def _room(self) -> AbstractContextManager[None]:
        parts = {
            "width or depth": 12 * self.depth * self.width**2,
            "vocab_size or width": (1 if self.tied else 2) * self.vocab_size * self.width,
            "context or width": self.context * self.width * (self.positions == "learned"),
        }
        name = f"a GPT of vocab_size={self.vocab_size}, context={self.context}, "
        name += f"width={self.width}, depth={self.depth}"
        largest = max(parts, key=lambda part: parts[part])
        return room_for(name, sum(parts.values()), f"give a smaller {largest}")

    def layer_roles(self) -> dict[str, str]:
        """Name the head, which starts at zero unless it is tied."""
        return {"head": "head"}

    def forward(self, tokens: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Return the logits (batch, length, vocab_size) of the next token at each position.

        With caches from `new_caches`, the tokens (batch, length) continue those in the caches and
        are added to them.
        """
        start = caches[0].length if caches else 0
        self._check(tokens, start)
        end = start + tokens.shape[1]
        x: Tensor = self.embedding(tokens)
        if self.places is not None:
            x = x + self.places.weight[start:end]
        order = self._order(start, end, x)
        for i, block in enumerate(self.blocks):
            x = block(x, order, caches[i] if caches else None)
        x = self.norm(x)
        logits: Tensor = self.head(x * (_TIED_WIDTH / self.width) if self.tied else x)
        return logits

    def new_caches(self) -> list[Cache]:
        """Return an empty cache for each block."""
        return [Cache(self.context) for _ in self.blocks]

    def attention_macs(self, length: int | None = None) -> int:
        """Return the multiply-adds per token of attention in sequences of this length.

            2 depth length width

        All pairs of tokens count, although half of them are masked. The length defaults to context.
        """
        length = self.context if length is None else whole_number(length, "length", 1)
        return 2 * self.depth * length * self.width

    def norm_macs(self) -> int:
        """Return the cost of the norms per token: five multiply-adds for each input element.

            5 (4 depth + 1) width

        The paper counts compute per token as the sum of this, `attention_macs()` and all linear
        layers including the head; embeddings, softmax and GELU are free. With width 256, 3 blocks,
        context 128 and 96 tokens that makes 2,597,120.
        Checked by: test_gpt.py::test_the_dense_reference_of_the_paper.
        """
        return _NORM_MACS * (4 * self.depth + 1) * self.width

    def _order(self, start: int, end: int, x: Tensor) -> Order:
        """Return the positions of the tokens from start to end, shared by all blocks."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        seen = torch.arange(end, device=x.device, dtype=dtype)
        read = seen[start:]
        cos = sin = bias = None
        if self.positions == "rotary":
            cos, sin = (t.to(x.dtype) for t in rotary(read, self.head_size))
        if self.positions == "alibi":
            bias = alibi(read, seen, self.num_heads).to(x.dtype)
        elif 0 < start < end - 1:
            bias = causal(read, seen).to(x.dtype)
        return Order(bias, cos, sin)

    def _check(self, tokens: Tensor, start: int) -> None:
        is_whole = tokens.dtype in (torch.int64, torch.int32)
        if not is_whole or tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.context - start:
            before = f", after {start} tokens in the cache" if start else ""
            raise EinlinearError(
                what=f"the tokens have shape {tuple(tokens.shape)} and dtype "
                f"{tokens.dtype}{before}",
                rule="tokens are int64 of shape (batch, length), with a length of 1 or more, and "
                f"at most {self.context} in all, the model's context",
                fix=f"give tokens[:, -{self.context}:], or build the model with a larger context",
            )

    def extra_repr(self) -> str:
        """Return the settings that print(model) shows."""
        return (
            f"context={self.context}, num_heads={self.num_heads}, positions={self.positions!r}, "
            f"tied={self.tied}, branch_scale={self.branch_scale:.4g}"
            + ", bias=True" * self.bias
            + ", zero_query=True" * self.zero_query
            + ", heads_inner=True" * self.heads_inner
        )


class Block(nn.Module):
    """A transformer block: attention and a feed-forward network, both pre-norm and residual."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        scale: float,
        *,
        bias: bool,
        zero_query: bool,
        heads_inner: bool,
        **to: Any,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.attention_norm = nn.LayerNorm(width, bias=bias, **to)
        flags = {"bias": bias, "zero_query": zero_query, "heads_inner": heads_inner}
        self.attention = Attention(width, num_heads, **flags, **to)
        self.mlp_norm = nn.LayerNorm(width, bias=bias, **to)
        self.mlp = FeedForward(width, 4 * width, bias=bias, **to)

    def forward(self, x: Tensor, order: Order, cache: Cache | None = None) -> Tensor:
        """Apply the block to sequences (batch, length, width)."""
        x = torch.add(x, self.attention(self.attention_norm(x), order, cache), alpha=self.scale)
        return torch.add(x, self.mlp(self.mlp_norm(x)), alpha=self.scale)


class Attention(nn.Module):
    """Causal self-attention with normalised queries and keys."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        bias: bool,
        zero_query: bool,
        heads_inner: bool,
        **to: Any,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, width // num_heads
        self.zero_query, self.heads_inner = zero_query, heads_inner
        self.q_proj = nn.Linear(width, width, bias=False, **to)
        self.k_proj = nn.Linear(width, width, bias=False, **to)
        self.v_proj = nn.Linear(width, width, bias=False, **to)
        self.o_proj = nn.Linear(width, width, bias=bias, **to)
        self.q_norm = nn.LayerNorm(self.head_size, bias=bias, **to)
        self.k_norm = nn.LayerNorm(self.head_size, bias=bias, **to)

    def layer_roles(self) -> dict[str, str]:
        """Name the layers that start at zero: the last of the branch, and queries if chosen."""
        names = ("o_proj", "q_proj") if self.zero_query else ("o_proj",)
        return dict.fromkeys(names, "zero")

    def forward(self, x: Tensor, order: Order, cache: Cache | None = None) -> Tensor:
        """Attend from each token to itself and the tokens before it."""
        q_bhid = self.q_norm(self._split(self.q_proj(x))).transpose(1, 2)
        k_bhjd = self.k_norm(self._split(self.k_proj(x))).transpose(1, 2)
        v_bhjd = self._split(self.v_proj(x)).transpose(1, 2)
        if order.cos is not None and order.sin is not None:
            q_bhid = rotated(q_bhid, order.cos, order.sin)
            k_bhjd = rotated(k_bhjd, order.cos, order.sin)
        if cache is not None:
            k_bhjd, v_bhjd = cache.extend(k_bhjd, v_bhjd)
        # Without a bias there is no cache yet, or one token that sees everything before it. The
        # branch makes a bool of a number of tokens that torch.compile only knows as a symbol.
        is_causal = False
        if order.bias is None and x.shape[1] > 1:
            is_causal = True
        mixed_bhid = scaled_dot_product_attention(
            q_bhid,
            k_bhjd,
            v_bhjd,
            attn_mask=order.bias,
            is_causal=is_causal,
            scale=8 / self.head_size,
        )
        order_of_axes = (0, 2, 3, 1) if self.heads_inner else (0, 2, 1, 3)
        y: Tensor = self.o_proj(mixed_bhid.permute(order_of_axes).flatten(2))
        return y

    def _split(self, y_biw: Tensor) -> Tensor:
        """Split the features of each token into heads x head size."""
        if self.heads_inner:
            y_bidh = y_biw.view(*y_biw.shape[:-1], self.head_size, self.num_heads)
            return y_bidh.transpose(-1, -2)
        return y_biw.view(*y_biw.shape[:-1], self.num_heads, self.head_size)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int, *, bias: bool, **to: Any) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias, **to)
        self.down = nn.Linear(hidden, width, bias=bias, **to)

    def layer_roles(self) -> dict[str, str]:
        """Name the last layer of the branch, which starts at zero."""
        return {"down": "zero"}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last axis of x."""
        y: Tensor = self.down(gelu(self.up(x)))
        return y


class Embedding(nn.Embedding):
    """An embedding that declares its initial standard deviation."""

    def __init__(self, rows: int, width: int, std: float, **to: Any) -> None:
        if not (isfinite(std) and std >= 0):
            raise EinlinearError(
                what=f"embedding_std is {std}",
                rule="a standard deviation is a finite number of 0 or more",
                fix=f"give {EMBEDDING_STD} as in the paper, or 1.0",
            )
        super().__init__(rows, width, **to)
        self.std = float(std)

    def param_scaling(self) -> dict[str, Scaling]:
        """Tell `init_` and `param_groups` how the weight scales."""
        return {"weight": embedding_scaling(self.embedding_dim, self.std)}


class Order(NamedTuple):
    """Positions as attention needs them: a bias for its scores, or angles of rotation."""

    bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


class Cache:
    """Keys and values of the tokens that one block has read, at most `context` of them."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, k_bhid: Tensor, v_bhid: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all of them."""
        if self._keys is None or self._values is None:
            batch, heads, _, size = k_bhid.shape
            self._keys = k_bhid.new_empty(batch, heads, self.context, size)
            self._values = v_bhid.new_empty(batch, heads, self.context, size)
        start, self.length = self.length, self.length + k_bhid.shape[2]
        self._keys[:, :, start : self.length] = k_bhid
        self._values[:, :, start : self.length] = v_bhid
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


def causal(read: Tensor, seen: Tensor) -> Tensor:
    """Return the bias (i, j) that hides later tokens."""
    is_later = seen > read[:, None]
    return torch.zeros_like(is_later, dtype=seen.dtype).masked_fill(is_later, -inf)


def alibi(read: Tensor, seen: Tensor, num_heads: int) -> Tensor:
    """Return the bias (1, h, i, j) that falls with the distance between two tokens.

        -2**(-8 h / num_heads) (i - j),  h = 1 ... num_heads

    Checked by: test_gpt.py::test_the_model_is_what_its_formulas_say.
    """
    heads = torch.arange(1, num_heads + 1, device=read.device, dtype=read.dtype)
    slopes = torch.exp2(-8 / num_heads * heads)[:, None, None]
    return (slopes * (seen - read[:, None]) + causal(read, seen))[None]


def rotary(read: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine (i, d / 2) of the angles that rotate pairs of features.

        i * 10000**(-2 n / d),  n = 0 ... d / 2 - 1

    Checked by: test_gpt.py::test_the_model_is_what_its_formulas_say.
    """
    steps = torch.arange(0, head_size, 2, device=read.device, dtype=read.dtype)
    angles = read[:, None] * _ROTARY_BASE ** (-steps / head_size)
    return angles.cos(), angles.sin()


def rotated(x_bhid: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of features (n, n + d / 2) by its angle."""
    first, second = x_bhid.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _count_heads(width: int, head_size: int | None, num_heads: int | None) -> int:
    """Return the number of heads, from head_size or num_heads, whichever is given."""
    if head_size is not None and num_heads is not None:
        raise EinlinearError(
            what=f"head_size is {head_size} and num_heads is {num_heads}",
            rule="each of the two follows from the other and the width",
            fix="give only one of them",
        )
    name, number = ("head_size", head_size) if num_heads is None else ("num_heads", num_heads)
    number = whole_number(_HEAD_SIZE if number is None else number, name, 1)
    if width % number:
        fits = max(n for n in range(1, min(width, number) + 1) if width % n == 0)
        raise EinlinearError(
            what=f"the width is {width} and {name} is {number}",
            rule="the width is divided equally among the heads",
            fix=f"give {name}={fits}, or a width that is a multiple of {number}",
        )
    return width // number if num_heads is None else number
