"""What the operators of this package share: how they carry plans and report gradients.

Torch sees each operator as one opaque call with tensors, numbers and text as arguments. A plan is
none of these, so it is handed over once, and operators find it by a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from einlinear.layers.strided import num_remade
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.text import parse_structure

PlanKey = tuple[str, int, int]
"""The text of a structure and both widths: a plan in terms that an operator can carry."""

_plans: dict[PlanKey, Plan] = {}
_MOST_PLANS = 16384


def hand_over(plan: Plan) -> PlanKey:
    """Make a plan known to the operators; returns the key that they take."""
    key = plan.text, plan.d_in, plan.d_out
    if not torch.compiler.is_compiling():  # a compiled graph must not write here
        _keep(key, plan)
    return key


def plan_of(structure: str, d_in: int, d_out: int) -> Plan:
    """The plan of a key: parsed if this process did not hand it over, as in an exported program."""
    key = structure, d_in, d_out
    return _plans.get(key) or _keep(key, make_plan(parse_structure(structure), d_in, d_out))


def _keep(key: PlanKey, plan: Plan) -> Plan:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    return _plans.setdefault(key, plan)


def is_differentiated(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def only_wanted(grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients, with None for those that are not needed."""
    return [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]


def without_none(grads: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """The gradients, with empty tensors for None, which an operator cannot return."""
    return [like.new_empty(0) if grad is None else grad for grad in grads]


def fake_gradients(likes: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Gradients in the shapes of some tensors: empty where nobody wants them."""
    return [t.new_empty(t.shape if flag else 0) for t, flag in zip(likes, wanted, strict=True)]


def gradient_flops(key: PlanKey, rows: int, wants_input: bool, wanted: Sequence[bool]) -> int:
    """The FLOPs of a backward pass that makes some gradients: of the input, of some factors."""
    macs = [step.macs for step in plan_of(*key).steps]
    again = sum(macs[: num_remade(wanted)])
    inputs = sum(m for i, m in enumerate(macs) if wants_input or any(wanted[:i]))
    weights = sum(m for m, flag in zip(macs, wanted, strict=True) if flag)
    return 2 * rows * (again + inputs + weights)


def differentiable_gradients(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the inputs of a function, given those of its outputs, by autograd."""
    with torch.enable_grad():
        # Aliases: if one input was computed from another, gradients must not flow that way too.
        aliases = [None if t is None else t.view_as(t) for t in inputs]
        outputs = function(*aliases)
    given = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in given],
            [t for t in only_wanted(aliases, wanted) if t is not None],
            [grad for _, grad in given],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(found) if flag else None for flag in wanted]
