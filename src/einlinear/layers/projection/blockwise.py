"""The closest low-rank, Monarch or BTT weight in a weighted norm, block by block.

In these structures the first factor meets the whole input and the second makes the whole output, so
a weight is a table of blocks, each a matrix of the same rank. With all other blocks fixed, the best
block has a closed form: with G_p = C C^T and H_q = K K^T the weights of its rows and columns and
T = M + G_p⁻¹ (G E H) H_q⁻¹, it is the truncated SVD of C^T T K, taken back. Sweeping over all
blocks never increases the error. Low rank has one block, so that its first sweep gives the best
weight: Eckart-Young in the weighted norm [W24, H22].

Legend: p blocks of outputs, q blocks of inputs, o outputs, i inputs, r rank.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.splitting import truncated
from einlinear.structures.plan import Plan

_EDGES = frozenset({"XA", "XAB", "YB", "YAB", "AB"})


def is_blockwise(plan: Plan) -> bool:
    """Whether weights of this plan are tables of low-rank blocks."""
    return plan.sizes.keys() <= _EDGES and plan.factor_edges.keys() == {"A", "B"}


def is_one_block(plan: Plan) -> bool:
    """Whether weights of this plan are one low-rank block, whose closest weight is known."""
    return is_blockwise(plan) and "XAB" not in plan.sizes and "YAB" not in plan.sizes


def improve_blocks(
    plan: Plan,
    weight_oi: Tensor,
    factors: dict[str, Tensor],
    metric: Metric,
    *,
    tolerance: float,
    most_sweeps: int,
) -> tuple[dict[str, Tensor], int]:
    """Better factors and the number of sweeps, for a weight of the padded widths.

    Stops when a sweep takes off less than `tolerance` of the error.
    """
    table = _Table(plan, weight_oi, metric)
    left_pqor, right_pqri = table.blocks(factors)
    error_oi = table.weight_oi - table.dense(left_pqor @ right_pqri)
    square = table.metric.square(error_oi)
    sweeps = 0
    while sweeps < most_sweeps and square > 0:
        table.sweep_(left_pqor, right_pqri, error_oi)
        sweeps += 1
        before, square = square, table.metric.square(error_oi)
        if before - square <= tolerance * before:
            break
    return table.factors(left_pqor, right_pqri), sweeps


class _Table:
    """A weight as a table of blocks, with the weights of rows and columns of each block."""

    def __init__(self, plan: Plan, weight_oi: Tensor, metric: Metric) -> None:
        self.plan = plan
        self._size = {edge: plan.sizes.get(edge, 1) for edge in _EDGES}
        self._rows = _order(plan, plan.y_edges, ("YAB", "YB"), weight_oi.device)
        self._columns = _order(plan, plan.x_edges, ("XAB", "XA"), weight_oi.device)
        self.weight_oi = weight_oi[self._rows][:, self._columns]
        self.metric = Metric(
            None if metric.inputs is None else metric.inputs[self._columns][:, self._columns],
            None if metric.outputs is None else metric.outputs[self._rows][:, self._rows],
        )
        self._row_roots = _roots(self.metric.outputs, self._size["YAB"])
        self._column_roots = _roots(self.metric.inputs, self._size["XAB"])

    def blocks(self, factors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The factors as the left and right side of every block."""
        left_pqor = self._from_factor(factors["B"], "B", ("YAB", "XAB", "YB", "AB"))
        right_pqri = self._from_factor(factors["A"], "A", ("YAB", "XAB", "AB", "XA"))
        return left_pqor.clone(), right_pqri.clone()

    def factors(self, left_pqor: Tensor, right_pqri: Tensor) -> dict[str, Tensor]:
        """The factors, with the axes of the plan."""
        return {
            "A": self._to_factor(right_pqri, "A", ("YAB", "XAB", "AB", "XA")),
            "B": self._to_factor(left_pqor, "B", ("YAB", "XAB", "YB", "AB")),
        }

    def dense(self, blocks_pqoi: Tensor) -> Tensor:
        """The table as one matrix."""
        p, q, o, i = blocks_pqoi.shape
        return blocks_pqoi.transpose(1, 2).reshape(p * o, q * i)

    def sweep_(self, left_pqor: Tensor, right_pqri: Tensor, error_oi: Tensor) -> None:
        """Replace every block by the best one, given the others; keep the error up to date."""
        num_columns, width = right_pqri.shape[1], right_pqri.shape[3]
        for q in range(num_columns):
            here = slice(q * width, (q + 1) * width)
            inputs = self.metric.inputs
            weighted_oi = error_oi[:, here] if inputs is None else error_oi @ inputs[:, here]
            if self.metric.outputs is None:
                self._replace_(left_pqor, right_pqri, error_oi, q, weighted_oi)
                continue
            weighted_oi = weighted_oi.clone()
            for p in range(left_pqor.shape[0]):
                self._replace_one_(left_pqor, right_pqri, error_oi, (p, q), weighted_oi)

    def _replace_(
        self, left: Tensor, right: Tensor, error_oi: Tensor, q: int, weighted_oi: Tensor
    ) -> None:
        """Replace all blocks of a column at once: without weights of rows they are independent."""
        num_rows, _, height, _ = left.shape
        width = right.shape[3]
        old_poi = left[:, q] @ right[:, q]
        step_poi = weighted_oi.reshape(num_rows, height, width)
        root = None if self._column_roots is None else self._column_roots[q]
        if root is not None:
            step_poi = torch.cholesky_solve(step_poi.mT, root).mT
        left[:, q], right[:, q] = _closest(old_poi + step_poi, None, root, left.shape[3])
        change_poi = left[:, q] @ right[:, q] - old_poi
        error_oi[:, q * width : (q + 1) * width] -= change_poi.reshape(num_rows * height, width)

    def _replace_one_(
        self,
        left: Tensor,
        right: Tensor,
        error_oi: Tensor,
        place: tuple[int, int],
        weighted_oi: Tensor,
    ) -> None:
        """Replace one block; `weighted_oi` is E H for its column of blocks, kept up to date."""
        assert self._row_roots is not None, "rows have weights here"
        assert self.metric.outputs is not None, "rows have weights here"
        p, q = place
        height, width = left.shape[2], right.shape[3]
        rows, columns = slice(p * height, (p + 1) * height), slice(q * width, (q + 1) * width)
        old_oi = left[p, q] @ right[p, q]
        step_oi = torch.cholesky_solve(self.metric.outputs[rows] @ weighted_oi, self._row_roots[p])
        root = None if self._column_roots is None else self._column_roots[q]
        if root is not None:
            step_oi = torch.cholesky_solve(step_oi.mT, root).mT
        left[p, q], right[p, q] = _closest(
            old_oi + step_oi, self._row_roots[p], root, left.shape[3]
        )
        change_oi = left[p, q] @ right[p, q] - old_oi
        error_oi[rows, columns] -= change_oi
        inputs = self.metric.inputs
        weighted_oi[rows] -= change_oi if inputs is None else change_oi @ inputs[columns, columns]

    def _from_factor(self, factor: Tensor, name: str, order: tuple[str, ...]) -> Tensor:
        edges = self.plan.factor_edges[name]
        present = [edge for edge in order if edge in edges]
        arranged = factor.permute([edges.index(edge) for edge in present])
        return arranged.reshape([self._size[edge] for edge in order])

    def _to_factor(self, tensor: Tensor, name: str, order: tuple[str, ...]) -> Tensor:
        edges = self.plan.factor_edges[name]
        present = [edge for edge in order if edge in edges]
        dropped = tensor.reshape([self._size[edge] for edge in present])
        return dropped.permute([present.index(edge) for edge in edges]).contiguous()


def _closest(
    target: Tensor, row_root: Tensor | None, column_root: Tensor | None, rank: int
) -> tuple[Tensor, Tensor]:
    """L and R with |C^T (T - L R) K| smallest, for Cholesky roots C and K of the two weights."""
    scaled = target if row_root is None else row_root.mT @ target
    scaled = scaled if column_root is None else scaled @ column_root
    left, right = truncated(scaled, rank)
    if row_root is not None:
        left = torch.linalg.solve_triangular(row_root.mT, left, upper=True)
    if column_root is not None:
        right = torch.linalg.solve_triangular(column_root, right, upper=False, left=False)
    return left, right


def _roots(moments: Tensor | None, num_blocks: int) -> Tensor | None:
    """The Cholesky factors of the diagonal blocks."""
    if moments is None:
        return None
    width = len(moments) // num_blocks
    blocks = moments.reshape(num_blocks, width, num_blocks, width)
    roots: Tensor = torch.linalg.cholesky(torch.stack([blocks[b, :, b] for b in range(num_blocks)]))
    return roots


def _order(
    plan: Plan, edges: tuple[str, ...], order: tuple[str, ...], device: torch.device
) -> Tensor:
    """Where the numbers of a side stand if its axes are put into another order."""
    sizes = [plan.sizes[edge] for edge in edges]
    places = torch.arange(prod(sizes), device=device).reshape(sizes)
    present = [edge for edge in order if edge in edges]
    return places.permute([edges.index(edge) for edge in present]).flatten()
