import json
from dataclasses import fields, replace

import hypothesis
import pytest
from hypothesis import strategies as st

import einlinear as el
from einlinear import EinlinearError, RunConfig, load_config
from einlinear.runs.config import NOT_IN_ID
from einlinear.structures.sizes import SIZES_RULE

TASKS = ("text", "pixels", "regression", "cifar")


@st.composite
def configs(draw):
    task = draw(st.sampled_from(TASKS))
    own = {"head_size": 8} if task in ("text", "pixels") else {}
    return RunConfig(
        task=task,
        preset=draw(st.sampled_from(["cpu", "paper", "release"])),
        structure=draw(st.sampled_from(["dense", "btt(rank=2)", "XA^1 YB^1 AB:4"])),
        width=8 * draw(st.integers(1, 100)),
        lr=draw(st.floats(1e-9, 1e3)),
        seed=draw(st.integers(0, 2**63 - 1)),
        betas=draw(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)),
        data=draw(st.sampled_from([None, 'a "quoted" \\ path', "ü.txt"])),
        **own,
    )


@hypothesis.given(configs())
def test_files_keep_a_config(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("config")
    for name, text in (("a.json", config.to_json()), ("a.toml", config.to_toml())):
        (folder / name).write_text(text, encoding="utf-8")
        read = load_config(folder / name)
        assert read == config
        assert read.id == config.id


@hypothesis.settings(max_examples=25)
@hypothesis.given(configs())
def test_the_id_knows_every_field_that_counts(config):
    more = {"num_experts": 16, "weight_norm": True, "schedule": "wsd", "weight_decay": 0.1}
    config = replace(config, **more)  # so that every setting has an effect
    changes = {
        "task": None,  # other fields follow from it
        "data": "other",
        "rule": "fold",
        "experts": None,  # only with others
        "expert_norm": "each" if config.expert_norm == "together" else "together",
        "expert_layers": "vo" if config.task in ("text", "pixels") else None,
        "factor_init": "fan_in",
        "head_axis": None,
        "structure": "low_rank",
        "positions": "rotary",
        "activation": "gelu",
        "parametrization": "naive",
        "head_init": "small",
        "optimizer": "muon",
        "schedule": "cosine",
        "decay": "standard",
        "eval_spacing": "even" if config.eval_spacing == "geometric" else "geometric",
        "precision": "bfloat16" if config.precision == "float32" else "float32",
        "device": "cuda",
        "vocabulary": "gpt2",
        "betas": (0.5, 0.5),
        "preset": "paper",
        "shard": "fsdp2",
        "lr": config.lr * 2,
        "decay_share": 0.5,
        "final_rate": 0.5,
        "ema": 0.5,
        "accumulation": 2,
    }
    skipped = ("head_aligned", "head_axis", "keep_state")  # only with others
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None and field.name != "data":
            continue
        if isinstance(value, bool):
            other = not value
        elif field.name in changes:
            other = changes[field.name]
        elif field.name == "head_size":
            other = 4
        else:
            other = value - 8 if field.name == "seed" and value > 8 else value + 8
        if other is None or other == value or field.name in skipped:
            continue
        changed = replace(config, **{field.name: other})
        assert (changed.id == config.id) == (field.name in NOT_IN_ID), field.name


def test_the_id_is_that_of_the_structure_not_of_its_spelling():
    assert RunConfig(structure="btt").id == RunConfig(structure="btt(rank=1)").id
    assert RunConfig(structure="btt").id != RunConfig(structure="btt(rank=2)").id
    # As nn.Linear, and as a structured layer: not the same run.
    assert RunConfig(structure="dense").id != RunConfig(structure="XA^1 YA^1").id


def test_the_id_is_that_of_the_values_not_of_how_they_were_given():
    assert RunConfig().id == RunConfig(lr=1e-2, width=64).id
    assert RunConfig(lr=1).id == RunConfig(lr=1.0).id
    assert len(RunConfig().id) == 16


def test_the_state_that_a_run_keeps_is_not_in_its_id():
    config = RunConfig(eval_spacing="fixed")
    kept = replace(config, keep_state=True)
    assert kept.id == config.id
    assert RunConfig.from_dict(kept.as_dict()) == kept
    assert "keep_state" not in config.as_dict()
    for changes in ({"schedule": "cosine"}, {"eval_spacing": "geometric"}):
        with pytest.raises(EinlinearError, match="keep_state is set, the schedule is"):
            replace(kept, **changes)


def test_fields_that_later_versions_added_leave_old_ids_and_files_as_they_were():
    """The id and the fields were written by the version before parametrization and the others."""
    config = RunConfig(task="cifar", structure="btt", seed=3, head_init="zero")
    assert config.earlier_id == "f53e420e8a5e75a1"
    added = {"parametrization", "activation", "pool", "save_model"}
    assert not added & config.as_dict().keys()
    assert not any(name in config.to_toml() for name in added)
    other = replace(config, parametrization="naive", activation="gelu", pool=2, save_model=False)
    assert added <= other.as_dict().keys()
    assert RunConfig.from_dict(other.as_dict()) == other
    assert replace(config, save_model=False).id == config.id


def test_runs_of_earlier_versions_keep_the_settings_and_the_id_that_they_had():
    """The file was written before presets decided heads, biases and others."""
    earlier = {
        "task": "pixels", "preset": "paper", "data": None, "validation": None, "rule": None,
        "structure": "btt", "experts": "linear", "num_experts": 0, "num_active": 2,
        "balance": 0.01, "convert_head": False, "head_aligned": False, "weight_norm": True,
        "width": 64, "depth": 3, "head_size": 64, "context": None, "vocabulary": None,
        "positions": "learned", "embedding_std": 0.02, "tied": False, "teacher_width": None,
        "teacher_depth": None, "batch_size": 64, "accumulation": 1, "steps": 100000, "lr": 0.003,
        "base_width": 64, "schedule": "cosine", "warmup": 0, "decay_share": 0.2, "final_rate": 0.0,
        "betas": [0.9, 0.999], "weight_decay": 0.0, "grad_clip": 1.0, "precision": "float32",
        "seed": 0, "eval_points": 20, "eval_size": 2048, "ema": 0.0, "compile": False,
        "device": "auto", "shard": "ddp", "checkpoint_every": 1000,
    }  # fmt: skip
    read = RunConfig.from_dict(earlier)
    assert (read.num_heads, read.bias, read.zero_query, read.scale_branches, read.tf32) == (
        (None, False, False, True, False)
    )
    assert read.earlier_id == "c6c9381dac800585"
    assert RunConfig.from_dict(earlier | {"structure": "dense"}).id == "5e152ea3abf605ea"
    for text in (read.to_json(), json.dumps(earlier)):
        assert RunConfig.from_dict(json.loads(text)) == read


@pytest.mark.parametrize("task", ["pixels", "regression"])
def test_a_setting_of_earlier_versions_is_kept_where_the_preset_has_another(tmp_path, task):
    own = {"num_heads": 4, "bias": False, "zero_query": False} if task == "pixels" else {}
    own |= {"input_norm": False} if task == "regression" else {}
    config = RunConfig(task=task, preset="paper", scale_branches=True, eval_spacing="geometric",
                       tf32=False, **own)  # fmt: skip
    for name, text in (("a.json", config.to_json()), ("a.toml", config.to_toml())):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert load_config(tmp_path / name) == config


def test_the_id_holds_the_rule_of_sizes_if_the_run_has_a_structure(monkeypatch):
    runs = [{}, {"num_experts": 4}, {"structure": "btt"}, {"structure": "btt", "num_experts": 4}]
    before = [RunConfig(head_init="zero", **run).id for run in runs]
    assert before[0] == "5262341ae51c2b96"
    monkeypatch.setattr("einlinear.runs.identity.SIZES_RULE", SIZES_RULE + 1)
    after = [RunConfig(head_init="zero", **run).id for run in runs]
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, True, False, False]
    assert RunConfig(structure="btt").id != RunConfig(structure="btt").earlier_id


def test_the_start_of_the_head_is_in_the_id_unless_all_earlier_runs_had_it():
    naive = {"parametrization": "naive"}
    assert RunConfig().head_init == "small"
    assert RunConfig(**naive).head_init == "usual"
    assert RunConfig(preset="paper").head_init == "zero"
    assert RunConfig(head_init="zero").id == "5262341ae51c2b96"  # of a version without the field
    assert RunConfig(**naive).id == "36d2122feb1550dc"
    assert len({RunConfig(head_init=kind).id for kind in ("zero", "small", "usual")}) == 3
    assert len({RunConfig(head_init=kind, **naive).id for kind in ("zero", "small", "usual")}) == 3


def test_experts_are_in_the_id():
    assert RunConfig(num_experts=4).id != RunConfig(num_experts=4, experts="ffn").id


def test_the_settings_of_ablations_leave_earlier_ids_and_files_as_they_were():
    """The id was written by the version before expert_layers, factor_init and head_axis."""
    config = RunConfig(structure="btt", num_experts=4)
    assert config.id == "961a73256d44108c"
    assert not {"expert_layers", "factor_init", "head_axis"} & config.as_dict().keys()
    assert RunConfig(task="cifar", num_experts=4).expert_layers == "all"
    more = {"head_aligned": True, "head_axis": "own"}
    other = replace(config, expert_layers="ffn", factor_init="fan_in", **more)
    assert RunConfig.from_dict(other.as_dict()) == other


def test_presets():
    small, paper = RunConfig(), RunConfig(preset="paper")
    assert (small.positions, small.head_size, small.embedding_std) == ("alibi", 16, 1.0)
    assert (paper.positions, paper.head_size, paper.embedding_std) == ("learned", 64, 0.02)
    assert (paper.lr, paper.base_width, paper.batch_size * paper.context) == (3e-3, 256, 65536)
    assert RunConfig(task="regression").head_size is None
    assert RunConfig(task="pixels", preset="paper").schedule == "cosine"
    assert RunConfig(preset="paper", head_size=32).head_size == 32
    assert [RunConfig(task=task, preset="paper").base_expansion for task in TASKS] == [
        1,
        4,
        4,
        None,
    ]
    assert [RunConfig(task=task, preset="paper").fixed_input for task in TASKS] == [
        None, None, True, True,
    ]  # fmt: skip
    assert [RunConfig(task=task).base_expansion for task in TASKS] == [1, 1, 1, None]
    assert [RunConfig(task=task).fixed_input for task in TASKS] == [None, None, False, False]
    assert RunConfig(tied=True).embedding_std == 0.02
    assert RunConfig(tied=True, embedding_std=0.5).embedding_std == 0.5


@pytest.mark.parametrize("task", TASKS)
def test_muon_has_a_rate_of_its_own(task):
    config, muon = RunConfig(task=task), RunConfig(task=task, optimizer="muon")
    assert muon.lr == 4 * config.lr
    assert replace(muon, lr=config.lr, optimizer="adamw") == config
    assert RunConfig(task=task, optimizer="muon", lr=0.3).lr == 0.3
    assert "optimizer" not in config.as_dict()
    assert muon.as_dict()["optimizer"] == "muon"
    assert RunConfig.from_dict(muon.as_dict()) == muon


def test_the_warm_up_of_short_runs():
    assert [RunConfig(steps=n).warmup for n in (5, 20, 300, 500, 9000)] == [0, 2, 30, 50, 50]
    assert RunConfig(steps=20, warmup=15).warmup == 15


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "txt"}, ["'txt'", "'text'"]),
        ({"structure": "btx"}, ["btx"]),
        ({"width": 0}, ["width is 0", "from 1 to 1,000,000,000"]),
        ({"width": 64.0}, ["width is 64.0"]),
        ({"width": True}, ["width is True"]),
        ({"width": 60}, ["width is 60", "head_size 16"]),
        ({"width": 60, "num_heads": 8}, ["width is 60", "num_heads 8"]),
        ({"head_size": 8, "num_heads": 8}, ["head_size is 8 and num_heads is 8", "only one"]),
        ({"task": "cifar", "num_heads": 8}, ["num_heads is 8", "setting of text and pixels"]),
        ({"task": "pixels", "preset": "paper-gpt2"}, ["preset is paper-gpt2", "cpu, paper"]),
        ({"steps": 0}, ["steps is 0"]),
        ({"lr": 0}, ["lr is 0", "above 0"]),
        ({"lr": float("nan")}, ["lr is nan"]),
        ({"lr": "1e-3"}, ["lr is '1e-3'"]),
        ({"ema": 1.5}, ["ema is 1.5", "from 0 to 1"]),
        ({"schedule": "cosin"}, ["'cosine'"]),
        ({"betas": (0.9,)}, ["betas is (0.9,)"]),
        ({"betas": (0.9, 1.0)}, ["betas is (0.9, 1.0)"]),
        ({"batch_size": 6, "accumulation": 4}, ["batch_size is 6", "accumulation 4"]),
        ({"num_experts": 2, "num_active": 3}, ["num_active is 3", "from 1 to 2"]),
        ({"head_aligned": True}, ["structure is dense"]),
        ({"experts": "ffn"}, ['experts is "ffn"', "num_experts 0"]),
        ({"experts": "ffn", "num_experts": 4, "structure": "btt"}, ["structure 'btt'", "dense"]),
        ({"experts": "ffn", "num_experts": 4, "task": "cifar"}, ["task cifar", "pixels"]),
        ({"num_experts": 4, "expert_layers": "v"}, ["expert_layers is 'v'", "'vo'"]),
        (
            {"num_experts": 4, "task": "cifar", "expert_layers": "vo"},
            ['expert_layers is "vo", and the task is cifar', "text and pixels", '"all"'],
        ),
        ({"task": "regression", "expert_layers": "ffn"}, ['expert_layers is "ffn"', "regression"]),
        (
            {"num_experts": 4, "experts": "ffn", "expert_layers": "vo"},
            ['expert_layers is "vo", and experts is "ffn"', 'experts="linear"'],
        ),
        ({"tied": True, "convert_head": True, "structure": "btt"}, ["the head is tied"]),
        ({"compile": 1}, ["compile is 1"]),
        ({"data": ""}, ["data is ''"]),
        ({"task": "cifar", "validation": "a"}, ["validation is 'a'", "setting of text"]),
        ({"task": "cifar", "context": 64}, ["context is 64", "setting of text"]),
        ({"task": "text", "teacher_width": 8}, ["teacher_width is 8", "regression"]),
        ({"checkpoint_every": -1}, ["checkpoint_every is -1"]),
        ({"base_expansion": 0}, ["base_expansion is 0"]),
        ({"task": "cifar", "base_expansion": 4}, ["base_expansion is 4", "regression"]),
        ({"fixed_input": True}, ["fixed_input is True", "regression and cifar"]),
        ({"head_init": "zeros"}, ["head_init is 'zeros'", "'zero'"]),
        ({"decay": "none"}, ["decay is 'none'", "independent"]),
        ({"head_axis": "other"}, ["head_axis is 'other'", "shared"]),
        ({"task": "cifar", "head_axis": "own"}, ["head_axis is 'own'", "text and pixels"]),
        ({"factor_init": "fan-in"}, ["factor_init is 'fan-in'", "'fan_in'"]),
    ],
)
def test_bad_values(settings, words):
    with pytest.raises(EinlinearError) as caught:
        RunConfig(**settings)
    for word in words:
        assert word in str(caught.value)


def test_unknown_keys(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('strcture = "btt"\n', encoding="utf-8")
    with pytest.raises(EinlinearError, match="unknown config key 'strcture'") as caught:
        load_config(path)
    assert "did you mean 'structure'?" in caught.value.fix
    assert str(path) in caught.value.what


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ('name = "s"\n[base]\nsteps = 3\n[[grid]]\nwidth = [1]', "[base] and [grid]"),
        ("[grid]\nwidth = [1]", "[grid]"),
    ],
)
def test_a_study_is_no_config(tmp_path, text, has):
    path = tmp_path / "my study.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EinlinearError) as caught:
        load_config(path)
    assert caught.value.what == f"{path} is a study: it has {has}"
    assert caught.value.fix == f"einlinear sweep '{path}' --out DIR"


@pytest.mark.parametrize("text", ["lr = ", "[1, 2", "7"])
@pytest.mark.parametrize("name", ["a.toml", "a.json"])
def test_files_that_cannot_be_read(tmp_path, name, text):
    with pytest.raises(EinlinearError, match="cannot read") as caught:
        load_config(tmp_path / name)
    assert caught.value.fix == "check its path"
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(EinlinearError, match="cannot read"):
        load_config(tmp_path / name)


def test_changes_come_before_the_file(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"width": 32, "steps": 10}), encoding="utf-8")
    config = load_config(path, width=48)
    assert (config.width, config.steps) == (48, 10)


def test_a_config_is_a_value():
    assert el.RunConfig() == el.RunConfig()
    assert len({el.RunConfig(), el.RunConfig(), el.RunConfig(seed=1)}) == 2
