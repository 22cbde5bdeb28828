"""Layers as plain matrix multiplies, in exported programs, in ONNX and in AOTInductor."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import einlinear as el
from cases import STRUCTURES, WIDTHS
from einlinear.layers.export.plain import is_exporting, multiply_plainly
from einlinear.layers.reference import multiply_by_einsum
from kit.exported import OnnxModel, our_operators

PLAIN = {"MatMul", "Reshape", "Transpose", "Pad", "Slice", "Add", "Shape", "Concat"}
ANY_BATCH = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)


def make(structure="btt(rank=2)", d_in=97, d_out=101, **options):
    """A layer whose bias and normalisation matter."""
    torch.manual_seed(0)
    layer = el.EinsumLinear(d_in, d_out, structure=structure, **options).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.mul_(3.0) if name != "bias" else parameter.normal_()
    return layer


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure(name, widths):
    torch.manual_seed(0)
    plan = el.make_plan(STRUCTURES[name], *widths)
    shapes = [plan.factor_shapes[step.factor] for step in plan.steps]
    factors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    x, bias = torch.randn(5, plan.d_in).double(), torch.randn(plan.d_out).double()
    wanted = multiply_by_einsum(plan, x, factors, bias)
    torch.testing.assert_close(multiply_plainly(plan, x, factors, bias), wanted)
    factors[-1] = factors[-1] * 1.01
    assert not torch.allclose(multiply_plainly(plan, x, factors, bias), wanted)


def test_no_rows():
    plan = el.make_plan(el.btt(num_factors=3), 97, 101)
    factors = [torch.randn(plan.factor_shapes[step.factor]) for step in plan.steps]
    assert multiply_plainly(plan, torch.randn(0, 97), factors).shape == (0, 101)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_no_operator_of_ours(strict):
    layer, x = make(), torch.randn(300, 97)
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},), strict=strict)
    assert not our_operators(program)
    assert not is_exporting()
    for count in (300, 7):
        x = torch.randn(count, 97)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize(
    ("structure", "d_in", "d_out", "bias"),
    [
        ("btt(rank=2)", 97, 101, True),
        ("btt(num_factors=3)", 64, 128, False),
        ("low_rank", 64, 31, True),
    ],
)
def test_onnx(structure, d_in, d_out, bias, weight_norm):
    layer = make(structure, d_in, d_out, bias=bias, weight_norm=weight_norm)
    program = OnnxModel(layer, (torch.randn(3, 5, d_in),), ANY_BATCH)
    assert set(program.kinds) <= PLAIN  # normalised factors are constants
    assert program.kinds.count("MatMul") == len(layer.plan.steps)
    for shape in [(3, 5), (1, 1), (7, 33)]:
        x = torch.randn(*shape, d_in)
        torch.testing.assert_close(program(x), layer(x).detach(), atol=1e-5, rtol=1e-4)


RUN = """
import sys, torch
program = torch._inductor.aoti_load_package("program.pt2")
for x, wanted in torch.load("tensors.pt"):
    torch.testing.assert_close(program(x), wanted, atol=1e-5, rtol=1e-4)
assert "einlinear" not in sys.modules
"""


@pytest.mark.no_cover
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_aot_inductor_in_a_process_without_einlinear(tmp_path):
    model = nn.Sequential(make(), nn.ReLU(), make("btt(num_factors=3)", 101, 64)).eval()
    mixture = el.MoELinear(64, 48, structure="btt", num_experts=4)
    nn.init.normal_(mixture.gate.weight)
    model.append(mixture)
    inputs = [torch.randn(*shape, 97) for shape in [(3, 5), (1, 2), (7, 13)]]
    with torch.no_grad():
        program = torch.export.export(model, (inputs[0],), dynamic_shapes=ANY_BATCH)
        torch.save([(x, model(x)) for x in inputs], tmp_path / "tensors.pt")
    package = str(tmp_path / "program.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    run = [sys.executable, "-W", "ignore", "-c", RUN]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
