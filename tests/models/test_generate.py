"""Generation: the cache against the model without one, and what is drawn against probabilities."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import einlinear as el
from einlinear import EinlinearError
from einlinear.models.generate import stream
from kit.gpts import POSITIONS, drawn, small, tokens


def double(positions="learned", **options):
    return drawn(small(positions, dtype=torch.float64, **options))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@given(st.sampled_from(POSITIONS), st.lists(st.integers(1, 6), min_size=1, max_size=4))
@example("learned", [1] * 19)
@example("rotary", [1] * 19)
@example("alibi", [1] * 19)
@settings(max_examples=30)
def test_reading_in_parts_is_reading_at_once(positions, parts):
    model = double(positions)
    text = tokens(length=sum(parts))
    caches = model.new_caches()
    logits = [model(part, caches) for part in text.split(parts, dim=1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(text), rtol=1e-10, atol=1e-10)
    assert [cache.length for cache in caches] == [sum(parts)] * 2


def plainly(model, text, num_new, generator):
    """New tokens without a cache, each by a forward pass over all that the model sees."""
    seen = min(text.shape[1], model.context)
    for _ in range(num_new):
        if seen > model.context:
            seen = max(1, model.context // 2)
        logits, order = model(text[:, -seen:])[:, -1].sort(descending=True)
        place = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        text = torch.cat([text, order.gather(1, place)], 1)
        seen += 1
    return text


@pytest.mark.no_cover
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("context", [1, 2, 7, 24])
@pytest.mark.parametrize("length", [1, 7, 30])
def test_tokens_are_those_of_the_model_without_a_cache(positions, context, length):
    model = double(positions, context=context)
    text = tokens(batch=4, length=length)
    new = el.generate(model, text, 40, generator=seeded())
    assert torch.equal(new, plainly(model, text, 40, seeded()))
    assert len(new[:, length:].unique()) > 8  # not one token again and again


@pytest.mark.parametrize("rule", ["btt(rank=2)", el.moe("btt", 4), el.heads()])
def test_structured_models(rule):
    model = small("alibi", dtype=torch.float64)
    el.convert_(model, {"*.attention.?_proj": rule})
    drawn(model)
    text = tokens(batch=2, length=5)
    new = el.generate(model, text, 30, generator=seeded())
    assert torch.equal(new, plainly(model, text, 30, seeded()))


def test_seeds():
    model, text = double(), tokens(batch=2, length=3)
    runs = [el.generate(model, text, 12, generator=seeded(seed)) for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    torch.manual_seed(3)
    first = el.generate(model, text, 12)
    torch.manual_seed(3)
    assert torch.equal(first, el.generate(model, text, 12))


def test_the_likeliest_token():
    model, text = double(), tokens(batch=2, length=3)
    new = el.generate(model, text, 10, temperature=0)
    for n in range(3, 13):
        assert torch.equal(new[:, n], model(new[:, :n])[:, -1].argmax(-1))
    assert torch.equal(new, el.generate(model, text, 10, top_k=1))
    # Draws at this temperature follow logits that are at least 0.01 apart here.
    assert torch.equal(new, el.generate(model, text, 10, temperature=1e-5))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 5), (1.0, 99)])
def test_tokens_are_drawn_by_their_probabilities(temperature, top_k):
    model, num = double(width=8, depth=1), 4_000
    text = tokens(batch=1, length=3)
    logits = model(text)[0, -1].detach() / temperature
    if top_k == 5:
        logits[logits < logits.sort().values[-5]] = -torch.inf
    wanted = logits.softmax(0)
    options = {"temperature": temperature, "top_k": top_k, "generator": seeded()}
    new = el.generate(model, text.expand(num, -1), 1, **options)[:, -1]
    shares = new.bincount(minlength=17) / num
    # A share is off by sqrt(p (1 - p) / n) at one sigma; five are allowed.
    assert ((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / num).sqrt()).all()


def test_tokens_stream_as_they_come():
    model, text = double(), tokens(batch=2, length=3)
    calls = []
    model.register_forward_hook(lambda module, inputs, output: calls.append(output))
    new = stream(model, text, 9, generator=seeded())
    assert not calls
    first = next(new)
    assert len(calls) == 1
    assert torch.is_grad_enabled()
    rest = list(new)
    assert [tuple(c.shape[:2]) for c in calls] == [(2, 3)] + [(2, 1)] * 8
    assert not any(call.requires_grad for call in calls)
    whole = torch.stack([first, *rest], 1)
    assert torch.equal(whole, el.generate(model, text, 9, generator=seeded())[:, 3:])


def test_nothing_new():
    text = tokens()
    assert torch.equal(el.generate(small(), text, 0), text)


def test_a_full_context_costs_little_more():
    model = double(context=8)
    read = []
    model.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape[1]))
    el.generate(model, tokens(batch=1, length=1), 100)
    assert len(read) == 100
    assert sum(read) < 100 * 2


def test_half_precision():
    model = drawn(small("alibi")).to(torch.bfloat16)
    assert el.generate(model, tokens(), 30).shape == (3, 49)
    with torch.autocast("cpu", torch.bfloat16):
        assert el.generate(drawn(small("rotary")), tokens(), 30).shape == (3, 49)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tokens": torch.tensor([1, 2])}, r"shape \(2,\).*\n.*\n.*unsqueeze"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, "at least one token"),
        ({"tokens": torch.zeros(1, 3)}, "float32"),
        ({"tokens": torch.tensor([[1, 17]])}, "from 1 to 17\n.*are 0 to 16"),
        ({"tokens": torch.tensor([[-1, 3]])}, "from -1 to 3"),
        ({"num_new": -1}, "num_new is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
    ],
)
def test_bad_input_is_refused_before_the_first_token(given, match):
    given = {"tokens": tokens(), "num_new": 3} | given
    with pytest.raises(EinlinearError, match=match):
        stream(small(), **given)


def test_a_diverged_model():
    model = small()
    torch.nn.init.constant_(model.head.weight, torch.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(EinlinearError, match="not finite"):
            el.generate(model, tokens(), 1, temperature=temperature)
