"""Stages: passes that start behind complete blocks give what whole passes give."""

import copy

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.models.convert import anchoring
from einlinear.models.convert.stages import Course, seen_on

WIDTH = 16


class Block(nn.Module):
    """A residual block that changes its input in place and returns a tuple."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, *, scale):
        type(self).calls += 1
        x += scale * self.down(torch.tanh(self.up(x)))
        return x, None


class Stack(nn.Module):
    """Blocks in turn; some kinds of stacks look further back."""

    def __init__(self, kind="plain", depth=4):
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        scale = torch.ones(())
        seen = []
        blocks = [*self.blocks, self.blocks[-1]] if self.kind == "again" else self.blocks
        for number, block in enumerate(blocks):
            if self.kind == "far" and number > 1:
                x = x + seen[number - 2]
            x, _ = block(x, scale=scale)
            seen.append(x.clone())
        return self.last(x)


def layer_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def course_of(model, batch):
    with torch.no_grad():
        return seen_on(model, layer_names(model), batch)


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    ids = torch.randint(50, (4, 6))
    if kind == "bert":
        config = transformers.BertConfig(**sizes, num_hidden_layers=3)
        return transformers.BertModel(config, add_pooling_layer=False), {"input_ids": ids}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=3)
        return transformers.LlamaForCausalLM(config), {"input_ids": ids}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 50}
    config = transformers.T5Config(**sizes, num_layers=3, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": ids,
        "decoder_input_ids": ids,
    }


def models(kind):
    torch.manual_seed(0)
    if kind == "stack":
        return Stack(), torch.randn(40, WIDTH)
    if kind == "gpt":
        model = el.GPT(19, width=32, depth=3, num_heads=2, context=8)
        return model, torch.arange(64).view(8, 8) % 19
    if kind == "transformer":
        sizes = {"nhead": 2, "dim_feedforward": 32, "batch_first": True}
        model = nn.Transformer(16, num_encoder_layers=2, num_decoder_layers=2, **sizes)
        return model, (torch.randn(4, 6, 16), torch.randn(4, 6, 16))
    return hugging_face(kind)


@pytest.mark.parametrize("kind", ["stack", "gpt", "transformer", "bert", "llama", "t5"])
def test_the_same_as_whole_passes(kind, monkeypatch):
    first, batch = models(kind)
    converted = []
    courses = []

    def without(*arguments):
        courses.append(seen_on(*arguments))
        return Course([], {})

    for whole in (False, True):
        if whole:
            monkeypatch.setattr(anchoring, "seen_on", without)
        model = copy.deepcopy(first)
        el.convert_(
            model,
            "low_rank(rank=4)",
            init="project",
            calibration=[batch, batch],
            weighting="inputs",
            anchored=True,
        )
        converted.append(model.state_dict())
    assert courses[0].chains, "blocks were found"
    for name, value in converted[0].items():
        assert torch.equal(value, converted[1][name]), name


def test_blocks_run_a_number_of_times_that_does_not_grow_with_the_depth():
    ran = {}
    for depth in (3, 12):
        Block.calls = 0
        el.convert_(
            Stack(depth=depth),
            "low_rank(rank=4)",
            init="project",
            calibration=[torch.randn(40, WIDTH)],
            weighting="inputs",
            anchored=True,
        )
        ran[depth] = Block.calls / depth
    assert ran[12] < 1.5 * ran[3]


@pytest.mark.parametrize("kind", ["far", "again"])
def test_stacks_that_look_further_back_are_run_as_a_whole(kind):
    torch.manual_seed(0)
    assert course_of(Stack(kind), torch.randn(5, WIDTH)).chains == []


def test_the_course_of_a_pass():
    course = course_of(Stack(depth=2), torch.randn(5, WIDTH))
    assert course.chains == [("blocks.0", "blocks.1")]
    assert course.before["first"] == course.before["blocks.0.up"] == []
    assert course.before["blocks.1.down"] == ["blocks.0"]
    assert course.before["last"] == ["blocks.0", "blocks.1"]
