import contextlib
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.cli import main as cli
from einlinear.cli.arguments import arguments_of, in_flags, parse_call
from einlinear.cli.commands.landscape import _table as landscape_table
from einlinear.cli.terminal import say
from kit.command import run


def test_describe_says_everything(capsys):
    code, out, err = run(capsys, "describe", "btt(rank=2)", "--width", "1024")
    assert code == 0
    assert err == ""
    for fact in (
        "XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:2",
        "...ga,garf,fgre->...fe",
        "131,072",
        "262,144  (12.50% of dense, 8.00 x fewer)",
        "1,024 of 1,024",
        "d³ᐟ²",
        "32 x 32 x 2 x 32",
        "XAB AB",
        "none",
    ):
        assert fact in out


def test_describe_shows_padding_and_a_second_width(capsys):
    _, out, _ = run(capsys, "describe", "monarch", "--width", "1009", "--out-width", "2027")
    assert "input 1,009 -> 1,015 (0.6%)" in out
    assert "output 2,027 ->" in out
    _, out, _ = run(capsys, "describe", "dense", "--width", "64")
    assert "at least as fast as dense" in out


def test_describe_draws(capsys, tmp_path):
    target = tmp_path / "new folder" / "btt.svg"
    code, out, _ = run(capsys, "describe", "btt", "--width", "64", "--svg", str(target))
    assert code == 0
    assert f"wrote {target}" in out
    assert ElementTree.parse(target).getroot().tag.endswith("svg")
    picture = tmp_path / "a.png"
    code, out, err = run(capsys, "describe", "btt", "--width", "64", "--svg", str(picture))
    assert (code, out, picture.exists()) == (2, "", False)
    assert err.splitlines()[2] == f"  fix:  give --svg {picture.with_suffix('.svg')}"
    _, out, _ = run(capsys, "describe", "--help")
    assert "missing folders are created" in " ".join(out.replace("│", " ").split())


def test_a_snapped_third_is_noted(capsys):
    code, out, err = run(capsys, "describe", "(0.33|0|0.67|0|0.67|0.33|0)", "--width", "64")
    assert code == 0
    assert "XA^1/3" in out
    assert err.startswith("note: read 0.33 as 1/3")


def test_atlas(capsys, tmp_path):
    code, out, _ = run(capsys, "atlas", "--out", str(tmp_path / "a"), "--samples", "5")
    assert code == 0
    assert "atlas.html" in out
    assert "Kronecker" in (tmp_path / "a" / "atlas.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments",
    [
        ["describe", "nonsense", "--width", "64"],
        ["describe", "XY^1", "--width", "64"],
        ["describe", "XA^1/2 YB^1", "--width", "64"],
        ["describe", "XA^nan YB^1", "--width", "64"],
        ["describe", "XA^1 XAB:7 YB^1", "--width", "64"],
        ["describe", "XAG^1 YA^1", "--width", "64"],
        ["describe", "btt", "--width", "0"],
        ["describe", "btt", "--width", "99999999999999999999"],
        ["atlas", "--samples", "-3", "--out", "unused"],
        ["atlas", "--width", "0", "--out", "unused"],
    ],
)
def test_bad_input_is_three_lines_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("einlinear: ")
    assert [line[:7] for line in err.splitlines()[1:]] == ["  rule:", "  fix: "]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["describe"], ["describe", "btt", "--width", "x"], ["paint"]]
)
def test_bad_words_are_exit_code_2(capsys, arguments):
    assert run(capsys, *arguments)[0] == 2


def test_a_file_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "x.svg"
    code, _, err = run(capsys, "describe", "btt", "--width", "64", "--svg", str(target))
    assert code == 2
    assert "cannot write" in err


def program(*arguments, **options):
    command = [sys.executable, "-m", "einlinear", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_tables_of_a_structure_fit(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    structure = str(el.sample_structures(1, num_factors=4, seed=5)[0])
    code, out, _ = run(capsys, "describe", structure, "--width", "4096")
    assert code == 0
    for step in el.make_plan(el.parse(structure), 4096, 4096).steps:
        assert re.search(rf"^step .*meet {step.factor}\b", out, re.MULTILINE)
        assert re.search(rf"^FLOPs/token .* {2 * step.macs:,}\b", out, re.MULTILINE)
    assert out.count("FLOPs/token ") == 1 + {50: 4, 80: 4, 200: 2}[columns]
    tables = out.partition("\nedges\n")[2]
    assert max(map(len, tables.splitlines())) <= columns


def test_the_structure_is_shown_as_it_was_typed(capsys):
    _, out, _ = run(capsys, "describe", "btt( rank = 2 )", "--width", "64")
    rows = dict(re.findall(r"^([\w ]+?) {2,}(.*?) *$", out, re.MULTILINE))
    assert rows["structure"] == "btt( rank = 2 )"
    assert rows["as edges"] == "XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:2"
    _, out, _ = run(capsys, "describe", "XA^1 YA^1", "--width", "64")
    assert out.startswith("structure              XA^1 YA^1\n")
    assert out.count("XA^1 YA^1") == 1


def test_a_terminal_without_unicode():
    result = program(
        "describe", "btt", "--width", "64", env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert result.returncode == 0
    assert result.stderr == ""
    assert re.search(r"^omega +0  \(FLOPs per parameter do not grow", result.stdout, re.MULTILINE)
    assert "(FLOPs grow as d^(3/2))" in result.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "einlinear", "describe", "btt", "--width", "64"]
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 1
    assert result.stderr == "einlinear: cannot write the output: No space left on device\n"


def test_a_reader_that_leaves():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "einlinear", "describe", "btt", "--width", "64"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert result.returncode == 1
    assert result.stderr == ""


def test_ctrl_c(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("einlinear.cli.commands.describe.make_plan", interrupted)
    code, _, err = run(capsys, "describe", "btt", "--width", "64")
    assert (code, err) == (130, "einlinear: interrupted\n")


IMPORTING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    pass  # as packages do that want to be there in any case
print("half a module")
"""


def test_ctrl_c_while_modules_are_loaded(tmp_path):
    (tmp_path / "torch.py").write_text(IMPORTING)
    command = [sys.executable, "-m", "einlinear", "doctor"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "einlinear: interrupted\n")
    assert "half a module" not in result.stdout


def test_help_without_arguments(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert "describe" in out
    assert "atlas" in out


def test_the_command_line_starts_without_what_is_slow_to_load():
    code = (
        "import sys, einlinear.cli.main as cli\n"
        "try:\n    cli.main(['bench', '--help'])\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'numpy', 'matplotlib', 'plotly'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "set()"


def test_version(capsys):
    assert run(capsys, "--version")[1].startswith("einlinear 0.")


def test_as_a_program():
    result = program("describe", "bttt", "--width", "64")
    assert result.returncode == 2
    assert "did you mean 'btt'?" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("descrbe btt --width 3", ("there is no command 'descrbe'", "", "describe")),
        ("swep", ("there is no command 'swep'", "", "sweep")),
        (
            "train --task txt --out x",
            ("--task is 'txt'", "--task is one of text, pixels, regression, cifar", "text"),
        ),
        (
            "train --task None --out x",
            ("--task is 'None'", "--task is one of text, pixels, regression, cifar", None),
        ),
        (
            "bench --dtype float3 --out x",
            ("--dtype is 'float3'", "--dtype is one of float32, bfloat16, float64", "float32"),
        ),
        (
            "landscape --activation rel --out x",
            ("--activation is 'rel'", "--activation is one of relu, gelu", "relu"),
        ),
        (
            "train --mirror wanb --out x",
            ("--mirror is 'wanb'", "--mirror is one of tensorboard, wandb", "wandb"),
        ),
        ("train --tied maybe --out x", ("--tied is 'maybe'", "--tied is one of True, False", None)),
        ("describe btt --width x", ("--width is 'x'", "--width is a whole number", None)),
        ("bench --widths 4 x --out y", ("--widths is 'x'", "--widths is a whole number", None)),
        ("train --lr big --out x", ("--lr is 'big'", "--lr is a number", None)),
        (
            "describe btt --widht 3",
            ("einlinear describe has no flag '--widht'", "", "--width"),
        ),
        (
            "train --head_algned=True --out x",
            ("einlinear train has no flag '--head_algned=True'", "", "--head-aligned"),
        ),
        ("sweep s --no-dry-rn --out x", ("einlinear sweep has no flag", "", "--no-dry-run")),
        ("landscape --seed 3 --out x", ("einlinear landscape has no flag", "", "--seeds")),
        ("doctor -v", ("einlinear doctor has no flag '-v'", "", None)),
        ("doctor me you", ("einlinear doctor has no use for 'you'", "", None)),
        ("bench --foo --out x", ("einlinear bench has no flag '--foo'", "", None)),
        (
            "prepare",
            ("TEXT and --out are missing", "einlinear prepare needs TEXT [TEXT ...] and", None),
        ),
        ("prepare text.txt", ("--out is missing", "einlinear prepare needs", None)),
        ("prepare --out x", ("TEXT is missing", "einlinear prepare needs", None)),
        ("prepare --out x --validation a b", ("TEXT is missing", "", None)),
        ("train", ("--out is missing", "einlinear train needs --out DIR", None)),
        ("describe", ("STRUCTURE and --width are missing", "", None)),
        ("describe btt", ("--width is missing", "einlinear describe needs STRUCTURE and", None)),
        ("describe -- btt --width 3", ("--width is missing", "", None)),
        ("sweep --out=x --dry-run", ("STUDY.toml is missing", "", None)),
        ("train --out", ("--out has no value", "--out takes one value: DIR", None)),
        ("train --lr --out x", ("--lr has no value", "--lr takes one value: FLOAT", None)),
        ("sample --prompt -- x", ("--prompt has no value", "--prompt takes one value", None)),
        (
            "train --compile --out x",
            ("--compile has no value", "--compile takes one value: {True,False}", None),
        ),
        (
            "train --betas .9 --out x",
            ("--betas has one value", "--betas takes 2 values: FLOAT FLOAT", None),
        ),
        (
            "train --betas .9 .8 .7 --out x",
            ("--betas has 3 values", "--betas takes 2 values: FLOAT FLOAT", None),
        ),
        (
            "landscape --naive_rates=3 --out x",
            ("--naive-rates has one value", "--naive-rates takes 2 values: INT INT", None),
        ),
        ("landscape --rates -9", ("--rates has one value", "--rates takes 2 values", None)),
        ("landscape --seeds 0 --out x", ("--seeds is 0", "--seeds is a whole number of 1", None)),
    ],
)
def test_words_that_are_wrong_are_three_lines(capsys, tmp_path, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words.split())
    what, rule, meant = error
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 3), err
    assert lines[0].startswith(f"einlinear: {what}")
    assert lines[1].startswith(f"  rule: {rule}")
    assert lines[2].startswith("  fix:  ")
    assert ("did you mean" in lines[2]) == (meant is not None)
    assert meant is None or lines[2] == f"  fix:  did you mean {meant!r}?"
    assert list(tmp_path.iterdir()) == []


def test_only_commands_that_exist_are_suggested(capsys):
    names = {command.__name__ for command in cli.COMMANDS}
    _, _, err = run(capsys, "serch")
    meant = re.search("did you mean '(.*)'", err)
    assert meant[1] == "search" if "search" in names else meant is None
    assert f"rule: the commands are {', '.join(c.__name__ for c in cli.COMMANDS)}" in err


def test_flags_that_are_given_in_every_way(monkeypatch):
    for words in (["--no-dry-run"], ["--no-dry_run"], ["--dry-run"]):
        call = parse_call(cli.sweep, ["study", "--out=x", *words])
        assert call.args == (Path("study"),)
        assert call.keywords["dry_run"] == (words == ["--dry-run"])
    call = parse_call(cli.landscape, ["--rates", "-9", "-6", "--out", "x", "--weight-norm"])
    flags = call.keywords["flags"]
    assert (flags.rates, flags.naive_rates, flags.weight_norm) == ((-9, -6), None, True)
    call = parse_call(cli.train, ["--weight_norm", "false", "--lr", "1e-3", "--out", "x"])
    assert (call.keywords["flags"].weight_norm, call.keywords["flags"].lr) == (False, 1e-3)
    call = parse_call(cli.train, ["--betas=.9", ".8", "--out", "x"])
    assert call.keywords["flags"].betas == (0.9, 0.8)
    call = parse_call(cli.describe, ["--width", "3", "--", "btt"])
    assert (call.args, call.keywords["width"]) == (("btt",), 3)
    call = parse_call(cli.sample, ["run", "--prompt=--width", "--top-k", "3"])
    assert (call.keywords["prompt"], call.keywords["top_k"]) == ("--width", 3)


@given(
    st.sampled_from(cli.COMMANDS),
    st.lists(st.integers(0, 99) | st.sampled_from(["btt", "-3", "--", "--out=x", "=", "0.5"])),
)
def test_what_is_missing_is_never_left_to_the_parser(command, picks):
    """Whatever is given, it is a call or an error of ours; the parser would leave by SystemExit."""
    flags = [argument.flag for argument in arguments_of(command) if argument.flag]
    words = [flags[pick % len(flags)] if isinstance(pick, int) else pick for pick in picks]
    with contextlib.suppress(el.EinlinearError):
        parse_call(command, words)


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", ["", *(command.__name__ for command in cli.COMMANDS)])
def test_help_fits_and_fills_the_terminal(capsys, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = run(capsys, *[name] * bool(name), "--help")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("usage: ")) <= columns
    assert "None" not in out
    assert "(default: )" not in out
    assert not re.search(r"│ +│", out), "a line with nothing in it"
    assert "{INT INT}" not in out
    for line, following in pairwise(lines):
        texts = [re.match(r"│ {4,}(\S+)", each) for each in (line, following)]
        if all(texts):
            taken = len(line.rstrip("│ ")) + 1 + len(texts[1][1])
            assert taken > columns - 2, f"{line!r} has room for {texts[1][1]!r}"


def test_a_terminal_that_is_narrow_wraps_errors(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(cli, "_is_terminal", lambda stream: True)
    _, _, err = run(capsys, "zzz")
    assert err.splitlines() == [
        "einlinear: there is no command 'zzz'",
        "  rule: the commands are describe, atlas, bench, recommend,",
        "        landscape, prepare, train, sample, sweep, search,",
        "        pack, time, report, reproduce, doctor",
        "  fix:  see einlinear --help",
    ]


def test_a_terminal_that_is_narrow_wraps_notes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(cli, "_is_terminal", lambda stream: True)
    _, _, err = run(capsys, "describe", "(0.33|0|0.67|0|0.67|0.33|0)", "--width", "64")
    assert err.startswith("note: read 0.33 as 1/3")
    assert max(map(len, err.splitlines())) <= 60


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("landscape --out x --rates -4 -9", ["--rates are [-4, -9]"]),
        ("landscape --out x --naive-rates -4 99", ["an end of --naive-rates is 99"]),
        ("landscape --out x --widths 8 8", ["--widths are [8, 8]", "such as 64 and 256"]),
        ("sweep s.toml --out x --address y", ["use --executor ray, or leave --address out"]),
        ("train --out x --experts ffn", ["--num-experts 0", "--experts ffn, --num-experts 8"]),
        ("train --out x --num-experts 2 --num-active 3", ["--num-active is 3", "to --num-experts"]),
        ("train --out x --width 60 --head-size 7", ["the --head-size 7"]),
    ],
)
def test_errors_name_flags(capsys, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text("[base]\nsteps = 1\n")
    code, _, err = run(capsys, *words.split())
    assert code == 2
    for part in parts:
        assert part in err
    assert '="' not in err


def test_names_in_paths_and_quotes_are_no_flags():
    flags = {"naive_rates": "--naive-rates", "out": "--out"}
    texts = {"what": "naive_rates in a/naive_rates.npz", "rule": "'naive_rates'", "fix": "find out"}
    told = in_flags(el.EinlinearError(**texts), flags)
    assert told.what == "--naive-rates in a/naive_rates.npz"
    assert (told.rule, told.fix) == ("'naive_rates'", "find out")


def test_values_are_not_capitalised_in_help(capsys):
    _, out, _ = run(capsys, "train", "--help")
    words = " ".join(out.replace("│", " ").split())
    for text in ("cpu, cuda, or auto", "float32, or bfloat16", "text, pixels", "constant, cosine"):
        assert text in words


def test_a_report_of_a_study_is_made_after_its_sweep(capsys, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(el.Study("s", {"steps": 1}).to_toml(), encoding="utf-8")
    code, _, err = run(capsys, "report", str(path))
    assert code == 2
    assert err.startswith(f"einlinear: {path} is a study, not its results\n")
    assert err.endswith(f"einlinear sweep {path} --out DIR, then einlinear report DIR\n")


def test_a_port_is_for_watching(capsys, tmp_path):
    code, _, err = run(capsys, "report", str(tmp_path), "--port", "8000")
    assert code == 2
    assert err.startswith("einlinear: --port is 8000, without --watch\n")


def test_paragraphs_are_wrapped_in_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("einlinear.cli.terminal.columns", lambda: 80)
    say("word " * 40, indent="  ")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  word")


def test_the_table_of_a_landscape_fits(monkeypatch):
    head = ("", "structure", "width", "loss")
    short = [head, ("naive", "dense", "16", "1.5"), ("µP", "dense", "16", "1.25")]
    monkeypatch.setenv("COLUMNS", "26")
    assert landscape_table(short).splitlines() == [
        "  width  loss",
        "-------------",
        "naive, dense",
        "     16   1.5",
        "µP, dense",
        "     16  1.25",
    ]
    monkeypatch.setenv("COLUMNS", "29")
    assert landscape_table(short).splitlines()[2:] == [
        "naive  dense         16   1.5",
        "µP     dense         16  1.25",
    ]


def test_devices_pipes_and_links_are_written_to_and_stay_what_they_are(capsys, tmp_path):
    """A whole file is put in the place of an old one; /dev/stdout must not be such a file."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target.svg"
    os.mkfifo(pipe)
    link.symlink_to(target)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        code, out, err = run(capsys, "describe", "btt", "--width", "64", "--svg", str(path))
        assert (code, err) == (0, "")
        assert out.endswith(f"wrote {path}\n")
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert os.read(reader, 1 << 16) == target.read_bytes()
    os.close(reader)
    assert sorted(tmp_path.iterdir()) == [link, pipe, target]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_device_that_is_full(capsys, monkeypatch):
    monkeypatch.setattr(Path, "replace", None)  # it would replace the device
    code, _, err = run(capsys, "describe", "btt", "--width", "64", "--svg", "/dev/full")
    assert code == 2
    assert err.startswith("einlinear: cannot write /dev/full: No space left on device\n")


def test_too_many_samples_of_an_atlas(capsys, tmp_path):
    code, _, err = run(capsys, "atlas", "--samples", "100000000000", "--out", str(tmp_path / "a"))
    assert code == 2
    assert err.startswith(
        "einlinear: --samples is 100000000000\n  rule: --samples is a whole number"
    )


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_version_with_something_behind_it(capsys, word):
    assert run(capsys, word, "train") == (0, f"einlinear {el.__version__}\n", "")
