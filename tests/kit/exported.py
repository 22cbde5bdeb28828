"""Models as programs of ONNX, and programs that torch 2.6 would export."""

import importlib

import pytest
import torch

ASKING = ["variants", "moe.assignment", "moe.operators", "moe.routing"]
"""The modules of layers/ that trace other operations while torch exports."""


def as_torch_2_6(monkeypatch):
    """Export our operators as they are, like torch 2.6, where a layer cannot tell."""
    for name in ASKING:
        module = importlib.import_module(f"einlinear.layers.{name}")
        monkeypatch.setattr(module, "is_exporting", lambda: False)


def our_operators(program):
    """The names of our operators in an exported program."""
    targets = [str(node.target) for node in program.graph.nodes]
    return {target for target in targets if "einlinear" in target}


class OnnxModel:
    """A model exported by plain torch.onnx.export and run by onnxruntime."""

    def __init__(self, model, args, dynamic_shapes=None, **options):
        pytest.importorskip("onnxscript")
        runtime = pytest.importorskip("onnxruntime")
        program = torch.onnx.export(
            model, args, dynamo=True, verbose=False, dynamic_shapes=dynamic_shapes, **options
        )
        self.kinds = [node.op_type for node in program.model.graph]
        self.session = runtime.InferenceSession(
            program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )

    def __call__(self, *args):
        names = [entry.name for entry in self.session.get_inputs()]
        inputs = {name: arg.numpy() for name, arg in zip(names, args, strict=True)}
        return torch.from_numpy(self.session.run(None, inputs)[0])
