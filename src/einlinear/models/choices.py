"""What a model lets you choose by name. No torch: settings of runs name the same choices."""

from __future__ import annotations

from typing import Literal

ActivationName = Literal["relu", "gelu"]
PositionKind = Literal["learned", "rotary", "alibi"]
HeadAxis = Literal["shared", "own"]
"""Which axis of a structure is the attention head, see `heads`."""
