"""GPT: a GPT-2 of plain linear layers, whole in this file.

A tensor's suffix names its axes: b batch, h heads, i tokens that are read, j tokens that are seen
(those read, and those in the cache before them), d the width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import inf, isfinite, sqrt
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from einlinear.errors import EinlinearError, quote
from einlinear.layers.room import room_for
from einlinear.layers.scaling import EMBEDDING_STD, Scaling, embedding_scaling
from einlinear.models.init import init_
from einlinear.structures.values import whole_number

Positions = Literal["learned", "rotary", "alibi"]

MOST_BLOCKS = 10_000
"""Of a model: more would take minutes to make, whatever their width."""

_HEAD_SIZE = 64
_TIED_WIDTH = 64  # the width at which a tied head gives its logits as they are
_ROTARY_BASE = 10_000.0
_NORM_MACS = 5  # for each number that a norm reads


class GPT(nn.Module):
    """A language model as in the paper: GPT-2, with what muP asks for.

        x = embedding[token] + places[i]             places with learned positions only
        x = x + s attention(norm(x))                 in each block, s = sqrt(3 / depth)
        x = x + s down(gelu(up(norm(x))))
        logits = head(norm(x))

    Queries and keys are normed head by head, and a logit of attention is 8 q k / head_size. Nothing
    has a bias. The head and the last layer of every branch start at zero, so a new model gives
    equal logits. All linear layers are nn.Linear for `convert_` to replace; call `init_` after it,
    since it draws layers anew. Ref: [P24, R19]; rotary [S21]; alibi [P22].

    Args:
        vocab_size: how many tokens there are.
        context: the most tokens that the model sees at once.
        width: of the vector of a token.
        depth: how many blocks.
        head_size: of an attention head; 64 unless this or num_heads is given.
        num_heads: how many attention heads; in place of head_size.
        positions: "learned" vectors as in the paper, "rotary" or "alibi".
        embedding_std: the deviation of embeddings at the start.
        tied: whether the head has the weight of the embedding. Its input is multiplied by
            64 / width then, because an embedding moves by the same amount at every width. Leave
            embedding_std small: a token's own logit starts near 64 embedding_std.
        device: where the parameters are.
        dtype: of the parameters.
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
        positions: Positions = "learned",
        embedding_std: float = EMBEDDING_STD,
        tied: bool = False,
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
        self.positions = _checked_positions(positions, self.head_size)
        self.tied = tied
        with self._room():
            self._build(embedding_std, {"device": device, "dtype": dtype})
        if not self.head.weight.is_meta:
            init_(self)

    def _build(self, embedding_std: float, to: dict[str, Any]) -> None:
        self.embedding = Embedding(self.vocab_size, self.width, embedding_std, **to)
        self.places: Embedding | None = None
        if self.positions == "learned":
            self.places = Embedding(self.context, self.width, embedding_std, **to)
        scale = sqrt(3 / self.depth)
        self.blocks = nn.ModuleList(
            Block(self.width, self.num_heads, scale, **to) for _ in range(self.depth)
        )
        self.norm = nn.LayerNorm(self.width, bias=False, **to)
        self.head = nn.Linear(self.width, self.vocab_size, bias=False, **to)
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
        """The head, which starts at zero unless it is tied."""
        return {"head": "head"}

    def forward(self, tokens: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Logits (batch, length, vocab_size) of the token after each of tokens (batch, length).

        With caches, from `new_caches`, the tokens follow those that the caches hold, and are added
        to them.
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
        """An empty cache for every block."""
        return [Cache(self.context) for _ in self.blocks]

    def attention_macs(self, length: int | None = None) -> int:
        """Multiply-adds per token of attention itself, in sequences of that length (or context).

            2 depth length width

        Scores and mixed values of all pairs of tokens count, though half of them are masked.
        """
        length = self.context if length is None else whole_number(length, "length", 1)
        return 2 * self.depth * length * self.width

    def norm_macs(self) -> int:
        """What the norms count as, per token: five multiply-adds for each number they read.

            5 (4 depth + 1) width

        That is the convention of the paper, whose compute per token is the sum of this, of
        `attention_macs()`, and of all linear layers with the head; no embedding, softmax or GELU.
        Width 256, 3 blocks, context 128 and 96 tokens make 2,597,120.
        Checked by: test_gpt.py::test_the_dense_reference_of_the_paper.
        """
        return _NORM_MACS * (4 * self.depth + 1) * self.width

    def _order(self, start: int, end: int, x: Tensor) -> Order:
        """How tokens start to end are placed, for all blocks alike."""
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
                rule="tokens are int64, (batch, length), with a length of 1 or more; in all at "
                f"most {self.context}, the model's context",
                fix=f"give tokens[:, -{self.context}:], or make the model with a larger context",
            )

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return (
            f"context={self.context}, num_heads={self.num_heads}, positions={self.positions!r}, "
            f"tied={self.tied}"
        )


class Block(nn.Module):
    """Attention, then a feed-forward net of 4 x the width, each on a normed input and added."""

    def __init__(self, width: int, num_heads: int, scale: float, **to: Any) -> None:
        super().__init__()
        self.scale = scale
        self.attention_norm = nn.LayerNorm(width, bias=False, **to)
        self.attention = Attention(width, num_heads, **to)
        self.mlp_norm = nn.LayerNorm(width, bias=False, **to)
        self.mlp = FeedForward(width, 4 * width, **to)

    def forward(self, x: Tensor, order: Order, cache: Cache | None = None) -> Tensor:
        """The block applied to sequences (batch, length, width)."""
        x = torch.add(x, self.attention(self.attention_norm(x), order, cache), alpha=self.scale)
        return torch.add(x, self.mlp(self.mlp_norm(x)), alpha=self.scale)


class Attention(nn.Module):
    """Causal attention with normed queries and keys."""

    def __init__(self, width: int, num_heads: int, **to: Any) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, width // num_heads
        self.q_proj = nn.Linear(width, width, bias=False, **to)
        self.k_proj = nn.Linear(width, width, bias=False, **to)
        self.v_proj = nn.Linear(width, width, bias=False, **to)
        self.o_proj = nn.Linear(width, width, bias=False, **to)
        self.q_norm = nn.LayerNorm(self.head_size, bias=False, **to)
        self.k_norm = nn.LayerNorm(self.head_size, bias=False, **to)

    def layer_roles(self) -> dict[str, str]:
        """The end of the branch, which starts at zero."""
        return {"o_proj": "zero"}

    def forward(self, x: Tensor, order: Order, cache: Cache | None = None) -> Tensor:
        """The values that each token attends to, mixed and projected."""
        heads = (self.num_heads, self.head_size)
        q_bhid = self.q_norm(self.q_proj(x).unflatten(-1, heads)).transpose(1, 2)
        k_bhjd = self.k_norm(self.k_proj(x).unflatten(-1, heads)).transpose(1, 2)
        v_bhjd = self.v_proj(x).unflatten(-1, heads).transpose(1, 2)
        if order.cos is not None and order.sin is not None:
            q_bhid = rotated(q_bhid, order.cos, order.sin)
            k_bhjd = rotated(k_bhjd, order.cos, order.sin)
        if cache is not None:
            k_bhjd, v_bhjd = cache.extend(k_bhjd, v_bhjd)
        mixed_bhid = scaled_dot_product_attention(
            q_bhid,
            k_bhjd,
            v_bhjd,
            attn_mask=order.bias,
            # Without a bias the tokens are all that is seen, or one that sees them all.
            is_causal=order.bias is None and x.shape[1] > 1,
            scale=8 / self.head_size,
        )
        y: Tensor = self.o_proj(mixed_bhid.transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int, hidden: int, **to: Any) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False, **to)
        self.down = nn.Linear(hidden, width, bias=False, **to)

    def layer_roles(self) -> dict[str, str]:
        """The end of the branch, which starts at zero."""
        return {"down": "zero"}

    def forward(self, x: Tensor) -> Tensor:
        """The net applied to the last axis of x."""
        y: Tensor = self.down(gelu(self.up(x)))
        return y


class Embedding(nn.Embedding):
    """A table of vectors that declares the deviation it starts with."""

    def __init__(self, rows: int, width: int, std: float, **to: Any) -> None:
        if not (isfinite(std) and std >= 0):
            raise EinlinearError(
                what=f"embedding_std is {std}",
                rule="a deviation is a number of 0 or more",
                fix=f"give {EMBEDDING_STD} as in the paper, or 1.0",
            )
        super().__init__(rows, width, **to)
        self.std = float(std)

    def param_scaling(self) -> dict[str, Scaling]:
        """What `init_` and `param_groups` need to know."""
        return {"weight": embedding_scaling(self.embedding_dim, self.std)}


class Order(NamedTuple):
    """What tells the places of tokens apart: a bias of attention, or angles of rotation."""

    bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


class Cache:
    """Keys and values of the tokens that one block has read, with room for `context` of them."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, k_bhid: Tensor, v_bhid: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values at the end; returns all of them."""
        if self._keys is None or self._values is None:
            batch, heads, _, size = k_bhid.shape
            self._keys = k_bhid.new_empty(batch, heads, self.context, size)
            self._values = v_bhid.new_empty(batch, heads, self.context, size)
        start, self.length = self.length, self.length + k_bhid.shape[2]
        self._keys[:, :, start : self.length] = k_bhid
        self._values[:, :, start : self.length] = v_bhid
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


def causal(read: Tensor, seen: Tensor) -> Tensor:
    """The bias (i, j) by which a token does not see later ones."""
    is_later = seen > read[:, None]
    return torch.zeros_like(is_later, dtype=seen.dtype).masked_fill(is_later, -inf)


def alibi(read: Tensor, seen: Tensor, num_heads: int) -> Tensor:
    """The bias (1, h, i, j) by which a token sees others the less, the farther back they are.

        -2**(-8 h / num_heads) (i - j),  h = 1 ... num_heads

    Checked by: test_gpt.py::test_the_model_is_what_its_formulas_say.
    """
    heads = torch.arange(1, num_heads + 1, device=read.device, dtype=read.dtype)
    slopes = torch.exp2(-8 / num_heads * heads)[:, None, None]
    return (slopes * (seen - read[:, None]) + causal(read, seen))[None]


def rotary(read: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (i, d / 2) of the angles by which pairs of numbers are turned.

        i * 10000**(-2 n / d),  n = 0 ... d / 2 - 1

    Checked by: test_gpt.py::test_the_model_is_what_its_formulas_say.
    """
    steps = torch.arange(0, head_size, 2, device=read.device, dtype=read.dtype)
    angles = read[:, None] * _ROTARY_BASE ** (-steps / head_size)
    return angles.cos(), angles.sin()


def rotated(x_bhid: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of numbers (n, n + d / 2) turned by its angle."""
    first, second = x_bhid.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _count_heads(width: int, head_size: int | None, num_heads: int | None) -> int:
    """How many heads there are; one of the two is given, or neither."""
    if head_size is not None and num_heads is not None:
        raise EinlinearError(
            what=f"head_size is {head_size} and num_heads is {num_heads}",
            rule="one of the two follows from the other and the width",
            fix="give one of them",
        )
    name, number = ("head_size", head_size) if num_heads is None else ("num_heads", num_heads)
    number = whole_number(_HEAD_SIZE if number is None else number, name, 1)
    if width % number:
        fits = max(n for n in range(1, min(width, number) + 1) if width % n == 0)
        raise EinlinearError(
            what=f"the width is {width} and {name} is {number}",
            rule="the width is shared out to heads of one size",
            fix=f"give {name}={fits}, or a width that is a multiple of {number}",
        )
    return width // number if num_heads is None else number


def _checked_positions(positions: Positions, head_size: int) -> Positions:
    if positions not in get_args(Positions):
        raise EinlinearError(
            what=f"positions is {quote(positions)}",
            rule=f"positions is one of {', '.join(map(repr, get_args(Positions)))}",
            fix='give positions="learned" as in the paper, or "alibi" for small models',
        )
    if positions == "rotary" and head_size % 2:
        raise EinlinearError(
            what=f"positions is 'rotary' and heads have the size {head_size}",
            rule="rotary positions turn pairs of numbers",
            fix="give an even head_size, or another kind of positions",
        )
    return positions
