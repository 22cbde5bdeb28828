"""Operators of CoLA become layers, and layers become operators."""

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.layers.export import cola as layers_cola

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def ops():
    torch.manual_seed(0)
    return pytest.importorskip("cola").ops


def dense(ops, *shape):
    return ops.Dense(torch.randn(shape, dtype=torch.float64))


MAKERS = {
    "dense": lambda ops: dense(ops, 7, 5),
    "triangular": lambda ops: ops.Triangular(torch.randn(6, 6).double().tril()),
    "low rank": lambda ops: ops.Product(dense(ops, 7, 3), dense(ops, 3, 5)),
    "three matrices": lambda ops: ops.Product(dense(ops, 9, 8), dense(ops, 8, 2), dense(ops, 2, 6)),
    "wide inside": lambda ops: ops.Product(dense(ops, 4, 9), dense(ops, 9, 5)),
    "kronecker": lambda ops: ops.Kronecker(dense(ops, 4, 3), dense(ops, 2, 5)),
    "kronecker of three": lambda ops: ops.Kronecker(
        dense(ops, 2, 3), dense(ops, 5, 4), dense(ops, 3, 2)
    ),
    "kronecker with a column": lambda ops: ops.Kronecker(dense(ops, 3, 1), dense(ops, 2, 5)),
    "kronecker of others": lambda ops: ops.Kronecker(
        ops.Diagonal(torch.randn(3).double()), dense(ops, 2, 5)
    ),
    "a multiple": lambda ops: 3.0 * ops.Kronecker(dense(ops, 4, 3), dense(ops, 2, 5)),
    "transposed product": lambda ops: ops.Transpose(MAKERS["three matrices"](ops)),
    "a multiple of a multiple": lambda ops: 3 * (2 * dense(ops, 7, 5)),
    "minus a multiple of a kronecker": lambda ops: -(0.5 * MAKERS["kronecker"](ops)),
    "a multiple of a transposed multiple": lambda ops: 3 * (2 * MAKERS["three matrices"](ops)).T,
    "transposed twice": lambda ops: ops.Transpose(3 * ops.Adjoint(MAKERS["kronecker"](ops))),
    "a product of products": lambda ops: ops.Product(
        dense(ops, 6, 5), ops.Transpose(2 * ops.Product(dense(ops, 7, 2), dense(ops, 2, 5)))
    ),
    "transposed": lambda ops: ops.Kronecker(dense(ops, 4, 3), dense(ops, 2, 5)).T,
}


@pytest.mark.parametrize("name", MAKERS)
def test_operators_become_layers_and_operators_again(name, ops):
    operator = MAKERS[name](ops)
    layer = el.from_cola(operator)
    wanted = operator.to_dense()
    torch.testing.assert_close(layer.to_dense().detach(), wanted)
    x = torch.randn(2, 4, wanted.shape[1], dtype=torch.float64)
    torch.testing.assert_close(layer(x).detach(), x @ wanted.t())
    torch.testing.assert_close(layer.to_cola().to_dense().detach(), wanted)
    assert layer.bias is None


@pytest.mark.parametrize("name", MAKERS)
def test_layers_of_operators_are_saved(name, ops, tmp_path):
    layer = el.from_cola(MAKERS[name](ops))

    def plain():
        return nn.Sequential(nn.Linear(layer.in_features, layer.out_features, bias=False))

    el.save(nn.Sequential(layer), tmp_path)
    loaded = el.load(tmp_path, plain)[0]
    assert type(loaded) is type(layer)
    x = torch.randn(3, layer.in_features, dtype=torch.float64)
    assert torch.equal(loaded.to_dense(), layer.to_dense())
    assert torch.equal(loaded(x), layer(x))


@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("structure", ["btt(rank=2)", "kronecker(num_factors=3)", "low_rank"])
def test_a_layer_as_an_operator(structure, weight_norm, ops, monkeypatch):
    layer = el.EinsumLinear(
        97, 101, structure=structure, weight_norm=weight_norm, dtype=torch.float64
    )
    torch.nn.init.normal_(layer.bias)  # which the operator does not have
    layer.A.data.mul_(3)
    weight = layer.to_dense()
    monkeypatch.setattr(el.EinsumLinear, "to_dense", None)  # nothing may build the matrix
    operator = layer.to_cola()
    assert isinstance(operator, ops.LinearOperator)
    assert operator.shape == (101, 97)
    x, y = torch.randn(97, 4, dtype=torch.float64), torch.randn(101, 4, dtype=torch.float64)
    torch.testing.assert_close(operator @ x, weight @ x)
    torch.testing.assert_close(operator @ x[:, 0], weight @ x[:, 0])
    torch.testing.assert_close(operator.T @ y, weight.t() @ y)
    torch.testing.assert_close(operator.H @ y, weight.t() @ y)
    torch.testing.assert_close(y.t() @ operator, y.t() @ weight)
    (operator @ x).sum().backward()
    assert layer.A.grad.abs().sum() > 0


@pytest.mark.parametrize("make", ["sum", "complex", "number", "numpy"])
def test_other_operators_are_refused(make, ops):
    made = {
        "sum": lambda: ops.Sum(dense(ops, 2, 2), ops.Diagonal(torch.randn(2).double())),
        "complex": lambda: ops.Dense(torch.randn(2, 2, dtype=torch.complex64)),
        "number": lambda: 3,
        "numpy": lambda: ops.Dense(torch.randn(2, 2).numpy()),
    }[make]()
    with pytest.raises(el.EinlinearError, match="cannot become a layer") as caught:
        el.from_cola(made)
    assert type(made).__name__.partition("[")[0] in str(caught.value)
    assert "fix:" in str(caught.value)


def test_without_cola(monkeypatch):
    monkeypatch.setattr(layers_cola, "find_spec", lambda name: None)
    layer = el.EinsumLinear(8, 8, structure="btt")
    for call in (layer.to_cola, lambda: el.from_cola(None)):
        with pytest.raises(el.EinlinearError, match="pip install cola-ml"):
            call()
