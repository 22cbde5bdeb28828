"""Damage to files: the one table of all readers of files, and all kinds of damage.

A reader of files is covered by adding a row to READERS: the test in test_damage.py and the fuzzer
(python tests/fuzz.py) run every row with every kind of damage. Whatever was done to its file, a
reader gives a value, or an EinlinearError; never another exception, and never without end.
"""

import gzip
import io
import json
import pickle
import re
import signal
import warnings
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import einlinear as el
from einlinear import EinlinearError
from einlinear.bench.rows import read_speeds
from einlinear.data.cifar_batches import read_cifar
from einlinear.data.images import load_images
from einlinear.data.pixel_files import load_pictures
from einlinear.data.token_folder import open_tokens
from einlinear.data.token_parts import Chunk, TokenSettings, part_path, read_part, write_part
from einlinear.data.tokens import open_text
from einlinear.files.seals import seal_of
from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.gather import gather
from einlinear.runs.config import RunConfig
from einlinear.runs.config_file import load_config
from einlinear.runs.directory import RunDirectory, read_metrics, read_record
from einlinear.runs.packed import packed_bytes, read_packed
from einlinear.runs.step_times import read_step_times
from einlinear.sweeps.claims import Sight, Watch, claimed, take
from einlinear.sweeps.job import keep_failure
from einlinear.sweeps.study import load_study
from einlinear.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from einlinear.training.load import load_writer
from einlinear.training.train import train
from kit.report_records import DENSE, make_record, write_record
from kit.runs import tiny
from kit.times import times_of

SECONDS = 60.0  # more than any reader needs for a small file on a busy machine
LONGEST = 1_200  # characters of what a message says: a few paths, and 200 of the input


class HangError(BaseException):
    """A reader took too long; no Exception, so that none of ours catches it."""


@contextmanager
def within(seconds):
    """Raise HangError in what takes longer."""

    def ring(number, frame):
        raise HangError(f"it took more than {seconds:g} seconds")

    held = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, held)


# What is written in the place of numbers, texts and names.
NUMBERS = [
    *("0", "-0.0", "-1", "1", "3", "0.5", "1e999", "-1e999", "NaN", "Infinity", "-Infinity"),
    *("5e-324", "1e308", str(2**31), str(2**63), str(2**64), str(10**18), "1" + "0" * 400),
    *("9" * 5000, "1/0", "1_000", "0x10", "nan", "inf"),
]
VALUES = [
    *NUMBERS,
    *("null", "true", "false", "[]", "{}", '""', '"x"', "x", '"\\ud800"', '"\\u0000"', "'"),
    *("[[1, 2], [3, 4]]", '[[[]], {"a": [1]}]', '{"a": {"b": 1}}', "1979-05-27", '"""', "="),
    '"' + "x" * 100_000 + '"',
    "[" + "1," * 1000 + "1]",
]
_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?[0-9][0-9.eE+-]*|[^\s,;:=\[\]{}()"]+')
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")


def truncate(data, random):
    """The beginning."""
    return data[: random.randrange(len(data) + 1)]


def flip(data, random):
    """Some bytes changed."""
    held = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 8])):
        if held:
            held[random.randrange(len(held))] ^= random.choice([1, 2, 16, 32, 128, 255])
    return bytes(held)


def claim(data, random):
    """Some bytes in a row as large, or as small, as they can be: a size that is none."""
    place, length = random.randrange(len(data) + 1), random.choice([1, 2, 4, 8])
    filled = random.choice([b"\xff", b"\x7f", b"\0"]) * length
    return data[:place] + filled + data[place + length :]


def drop(data, random):
    """A part left out."""
    begin, length = random.randrange(len(data) + 1), random.choice([1, 2, 7, 40])
    return data[:begin] + data[begin + length :]


def double(data, random):
    """A part written again, once or often."""
    begin, length = random.randrange(len(data) + 1), random.choice([1, 2, 7, 40])
    part = data[begin : begin + length]
    return data[:begin] + part * random.choice([1, 1, 3, 2000]) + data[begin:]


def swap(data, random):
    """Two parts in each other's place."""
    first, second = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[second:] + data[first:second] + data[:first]


def nest(data, random):
    """A value nested deeply in the place of another."""
    depth = random.choice([3, 300, 100_000])
    begin, end = random.choice([("[", "]"), ('{"a":', "}"), ("[{", "}]"), ("(", ")"), ("a.", "=1")])
    value = begin * depth + "1" + end * random.choice([0, depth if len(end) == 1 else 1])
    return _replaced(data, random, _TOKEN, [value])


def swap_type(data, random):
    """A value of another type in the place of one, or of several."""
    for _ in range(random.choice([1, 1, 1, 3])):
        data = _replaced(data, random, _TOKEN, VALUES)
    return data


def swap_number(data, random):
    """An extreme number in the place of another."""
    return _replaced(data, random, _NUMBER, NUMBERS)


def garbage(data, random):
    """Something else altogether."""
    kinds = [b"", b"\0" * 100, b"\n" * 100, b"\xff\xfe\x00", random.randbytes(200), b"[" * 200_000]
    kinds += [b"null", b"[]", b"{}", b'"x"', b"1", b"\xef\xbb\xbf{}", b"\x80\x04.", b"PK\x05\x06"]
    return random.choice(kinds)


def shuffle(data, random):
    """Lines in another order, some twice, some not at all."""
    lines = data.split(b"\n")
    return b"\n".join(random.choice(lines) for _ in lines[:1000])


def _replaced(data, random, pattern, values):
    """The data with a value in the place of a match, near the beginning or anywhere."""
    found = list(pattern.finditer(data[: random.choice([150, 100_000])]))
    if not found:
        return data
    match = random.choice(found)
    value = random.choice(values).encode("utf-8", "surrogatepass")
    return data[: match.start()] + value + data[match.end() :]


DAMAGE = [
    truncate,
    flip,
    claim,
    drop,
    double,
    swap,
    nest,
    swap_type,
    swap_number,
    garbage,
    shuffle,
]


def inside_gzip(data, damage, random):
    """Damage to what is packed, which is packed again."""
    return gzip.compress(damage(gzip.decompress(data), random), 1)


def inside_npz(data, damage, random):
    """Damage to one array, or to its header, of an archive that is whole."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(held))
    if random.random() < 0.5:
        held[name] = damage(held[name], random)
    else:
        body = held[name][10:].partition(b"\n")[2]
        header = damage(held[name][10 : -len(body)], random)
        held[name] = held[name][:8] + (len(header) % 2**16).to_bytes(2, "little") + header + body
    if random.random() < 0.2:
        held[random.choice(["x.npy", "y", "train_x.npy"])] = held.pop(name)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", random.choice([zipfile.ZIP_STORED, zipfile.ZIP_LZMA])) as made:
        for entry, content in held.items():
            made.writestr(entry, content)
    return file.getvalue()


# Pickles that are made to do harm, in the place of opcodes.
_OPCODES = [b"(", b"t", b"\x85", b"\x86", b"]", b"a", b"e", b"}", b"s", b"u", b"R", b"b", b"q\0"]
_OPCODES += [
    b"h\0",
    b"0",
    b"2",
    b"N",
    b"K\1",
    b"U\1x",
    b"\x8c\1x",
    b"\x93",
    b"\x94",
    b"cos\nsystem\n",
]
_OPCODES += [b"cos\nsystem\n"]
_OPCODES += [b"J\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\x7f", b"I1\n"]


def inside_pickle(data, damage, random):
    """Opcodes out of place, once or very often."""
    place = random.randrange(len(data) + 1) if random.random() < 0.5 else random.randrange(60)
    codes = [random.choice(_OPCODES) for _ in range(random.choice([1, 2, 5]))]
    return data[:place] + b"".join(codes) * random.choice([1, 1, 30, 20_000]) + data[place:]


Inside = Callable[[bytes, Callable[[bytes, Random], bytes], Random], bytes]


@dataclass(frozen=True)
class Reader:
    """A reader of a file: how to make a good one, which file is damaged, how it is read.

    files: the files of a folder, by name.
    damaged: the one that is.
    read: the folder -> a value that can be compared.
    inside: how to damage what is packed in the file.
    is_sealed: whether damage is always noticed: what is read is right, or not read.
    otherwise: what else a sealed reader may give.
    may_refuse: whether an EinlinearError is an answer; else a value is due whatever happened.
    """

    name: str
    files: Callable[[], dict[str, bytes]]
    damaged: str
    read: Callable[[Path], Any]
    inside: Inside | None = None
    is_sealed: bool = False
    otherwise: tuple[Any, ...] = ()
    may_refuse: bool = True


def damage_file(reader, random):
    """What is left of the reader's file, and what was done to it."""
    data = reader.files()[reader.damaged]
    damage = random.choice(DAMAGE)
    if reader.inside is not None and random.random() < 0.6:
        return reader.inside(data, damage, random), f"{damage.__name__} inside"
    return damage(data, random), damage.__name__


def check(reader, data, folder):
    """Read a file of these bytes; raise if the reader does what none may do."""
    for name, content in reader.files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if name == reader.damaged else content)
    value = None
    try:
        with within(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", UserWarning)  # ours: what is damaged, and left out
            value = reader.read(folder)
    except EinlinearError as error:
        check_message(error)
        if not reader.may_refuse:
            raise
        return
    if reader.is_sealed:
        good = _good(reader.name)
        assert value == good or value in reader.otherwise, f"{reader.name}: other values are read"


def check_message(error):
    """Raise unless an error has three parts, none of them a flood."""
    for part in (error.what, error.rule, error.fix):
        assert part.strip(), f"a part of the message is empty: {error!r}"
    assert len(error.what) <= LONGEST, f"the message has {len(error.what)} characters: {error!r}"


@cache
def _good(name):
    reader = next(reader for reader in READERS if reader.name == name)
    with TemporaryDirectory() as folder:
        for file, content in reader.files().items():
            path = Path(folder) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return reader.read(Path(folder))


def _files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def fixed(**files):
    """Files of a given content; a name ends after two underscores with its suffix."""
    held = {name.replace("__", "."): content for name, content in files.items()}
    return lambda: held


def text_files():
    words = "It was the best of times, it was the worst of times"
    return "\n\n\n".join(
        f"{words}, {number}. {'And so on. ' * (number % 5)}" for number in range(60)
    )


def json_lines():
    return "".join(
        json.dumps({"text": text, "id": 1}) + "\n" for text in text_files().split("\n\n\n")
    )


@cache
def token_files():
    with TemporaryDirectory() as folder:
        (Path(folder) / "a.txt").write_text(text_files())
        el.prepare(Path(folder) / "a.txt", Path(folder) / "tokens", processes=1)
        return _files_of(Path(folder) / "tokens")


def tokens_of(folder):
    held = open_tokens(folder)
    return held.train.tobytes(), held.validation.tobytes(), held.counts, held.fingerprint


def streams_of(folder):
    return tokens_of(folder)[:2]


@cache
def part_files():
    with TemporaryDirectory() as folder:
        documents = tuple(text.encode() for text in text_files().split("\n\n\n"))
        chunk, settings = Chunk(0, "train", documents, 100), TokenSettings("ascii", "drop", 0.2)
        write_part(part_path(Path(folder), 0), "abc", chunk, settings)
        return _files_of(folder)


def part_of(folder):
    part = read_part(part_path(folder, 0), "abc")
    return None if part is None else (part.train, part.validation, part.counts)


@cache
def image_files(*keys):
    random = np.random.default_rng(0)
    shapes = {"train": 20, "test": 8}
    arrays = {
        f"{part}_{kind}": random.integers(0, 256, (count, 8, 16, 3), dtype=np.uint8)
        if kind == "x"
        else np.arange(count) % 5
        for part, count in shapes.items()
        for kind in "xy"
    }
    file = io.BytesIO()
    np.savez_compressed(file, **({"x": arrays["train_x"]} if keys else arrays))
    return {"a.npz": file.getvalue()}


def images_of(folder):
    held = load_images(folder / "a.npz")
    return held.train_x.tobytes(), held.num_classes


def pictures_of(folder):
    return load_pictures(folder / "a.npz").fingerprint()


@cache
def cifar_files(protocol):
    random = np.random.default_rng(0)
    files = {}
    for name in ("data_batch_1", "test_batch"):
        rows = random.integers(0, 256, (2, 3072), dtype=np.uint8)
        labels = random.integers(0, 10, 2).tolist()
        if protocol is None:
            raw = b"".join(bytes([y]) + x.tobytes() for x, y in zip(rows, labels, strict=True))
            files[f"{name}.bin"] = raw
        else:
            held = {b"batch_label": b"one", b"labels": labels, b"data": rows, b"names": ["a", "b"]}
            files[name] = pickle.dumps(held, protocol=protocol)
    return files


def cifar_of(folder):
    return {name: array.tobytes() for name, array in read_cifar(folder).items()}


CONFIG = RunConfig(structure="btt(rank=2)", steps=20, width=64, data="texts", betas=(0.9, 0.95))
STUDY = """name = "small"
[base]
task = "text"
steps = 20
betas = [0.9, 0.95]
[[grid]]
structure = ["dense", "btt(rank=2)"]
width = [32, 64]
seed = [0, 1]
[[grid]]
structure = "monarch"
lr = [1e-3, 2e-3]
weight_norm = false
"""
TABLE = [
    {"run": f"r{run}", "compute": 10.0**step, "loss": 3.0 / step + run, "seed": run, "width": 64}
    for run in range(3)
    for step in range(1, 6)
]


def csv_table():
    rows = [",".join(TABLE[0]), *(",".join(map(str, row.values())) for row in TABLE)]
    return "\n".join(rows) + "\n"


def jsonl_table():
    return "".join(json.dumps(row) + "\n" for row in TABLE)


def table_of(name):
    return lambda folder: len(el.read_observations(folder / name))


def text_of(name):
    return lambda folder: open_text(folder / name).fingerprint


def bench_rows():
    row = {"structure": "btt", "width": 64, "tokens": 8, "dtype": "float32", "mode": "forward"}
    row |= {"variant": "einlinear", "baseline": "nn.Linear", "speed": 1.5, "num_experts": 0}
    return json.dumps({"rows": [row, row | {"width": 128, "speed": 2.5}], "machine": {}})


def bench_of(folder):
    return read_speeds((folder / "a.json").read_bytes().decode("utf-8", "replace"), "a.json")


@cache
def time_files():
    with TemporaryDirectory() as folder:
        times_of(tiny(), tiny(structure="btt")).save(Path(folder) / "steps.json")
        return _files_of(folder)


@cache
def run_files():
    """The files of a finished run."""
    with TemporaryDirectory() as folder:
        train(tiny(steps=4, warmup=1, eval_points=1, eval_size=2), folder)
        return _files_of(folder)


def record_of(folder):
    return json.dumps(read_record(folder).as_dict())


@cache
def packed_files():
    """Packed records of three runs."""
    records = [make_record(DENSE, width, 0, points=4, steps=40) for width in (32, 64, 96)]
    return {"a.jsonl": packed_bytes(records)}


def packed_of(folder):
    return json.dumps([record.as_dict() for record in read_packed(folder / "a.jsonl")])


def resealed_line(data, damage, random):
    """Damage to the values of a line whose checksum is then right."""
    lines = data.splitlines()
    place = random.randrange(len(lines))
    try:
        values = json.loads(damage(lines[place].rpartition(b',"seal"')[0] + b"}", random))
        lines[place] = json.dumps(values | {"seal": seal_of(values)[:16]}).encode()
    except (TypeError, ValueError, RecursionError):
        return damage(data, random)
    return b"\n".join(lines)


def packed_report_of(folder):
    found = gather(folder / "a.jsonl")
    analyse(found, ReportSettings(resamples=0))
    return len(found.runs)


def writer_of(folder):
    model = load_writer(folder).model
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@cache
def checkpoint_files():
    """Two checkpoints, of steps 5 and 10."""
    with TemporaryDirectory() as folder:
        for step in (5, 10):
            tensors = {"a": torch.full((3,), float(step))}
            values = {"metrics_position": step, "x": 0.1}
            save_checkpoint(Path(folder), Checkpoint(step, tensors, values))
        return _files_of(folder)


def checkpoint_of(folder):
    held = load_checkpoint(folder)
    return None if held is None else (held.step, held.tensors["a"].tolist(), held.values)


OLDER = (5, [5.0, 5.0, 5.0], {"metrics_position": 5, "x": 0.1})


@cache
def sweep_files():
    """A sweep: finished runs, one that has failed, one that somebody works on."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        records = [make_record(DENSE, width, 0, points=4, steps=40) for width in (32, 64, 96)]
        for number, record in enumerate(records):
            write_record(folder / "runs" / str(number), record)
        for number in (1, 2):
            path = folder / "runs" / str(number)
            (path / "record.json").unlink()
            points = [{"kind": "point", **asdict(point)} for point in records[number].curve]
            lines = "".join(json.dumps(point) + "\n" for point in points)
            (path / "metrics.jsonl").write_text(lines)
        keep_failure(folder / "runs" / "1", "error", "it was too large")
        claim = take(folder / "runs" / "2", Sight())
        claim.write()
        claim_path = next((folder / "runs" / "2").glob("claim-*"))
        claim_path.rename(folder / "runs" / "2" / "claim-000001")
        (folder / "studies").mkdir()
        (folder / "studies" / "a.toml").write_text(STUDY)
        return _files_of(folder)


def claim_of(folder):
    Watch().free(folder / "runs" / "2")
    return claimed(folder / "runs" / "2")


def report_of(folder):
    found = gather(folder)
    analyse(found, ReportSettings(resamples=0))
    return len(found.runs)


def report_row(name, file):
    return Reader(f"report, {name}", sweep_files, file, report_of, may_refuse=False)


READERS = [
    Reader(
        "config, TOML",
        fixed(a__toml=CONFIG.to_toml().encode()),
        "a.toml",
        lambda folder: load_config(folder / "a.toml").id,
    ),
    Reader(
        "config, JSON",
        fixed(a__json=CONFIG.to_json().encode()),
        "a.json",
        lambda folder: load_config(folder / "a.json").to_toml(),
    ),
    Reader(
        "study, TOML",
        fixed(a__toml=STUDY.encode()),
        "a.toml",
        lambda folder: load_study(folder / "a.toml").cells,
    ),
    Reader(
        "study, JSON",
        fixed(a__json=json.dumps({"base": {"task": "text"}, "grid": {"width": [32, 64]}}).encode()),
        "a.json",
        lambda folder: load_study(folder / "a.json").cells,
    ),
    Reader("table, CSV", fixed(a__csv=csv_table().encode()), "a.csv", table_of("a.csv")),
    Reader("table, JSONL", fixed(a__jsonl=jsonl_table().encode()), "a.jsonl", table_of("a.jsonl")),
    Reader("text", fixed(a__txt=text_files().encode()), "a.txt", text_of("a.txt")),
    Reader("text, JSONL", fixed(a__jsonl=json_lines().encode()), "a.jsonl", text_of("a.jsonl")),
    Reader(
        "text, packed",
        fixed(a__txt__gz=gzip.compress(text_files().encode())),
        "a.txt.gz",
        text_of("a.txt.gz"),
        inside_gzip,
    ),
    Reader(
        "text, JSONL, packed",
        fixed(a__jsonl__gz=gzip.compress(json_lines().encode())),
        "a.jsonl.gz",
        text_of("a.jsonl.gz"),
        inside_gzip,
    ),
    Reader("tokens.json", token_files, "tokens.json", streams_of, is_sealed=True),
    Reader("tokens", token_files, "train.bin", tokens_of, is_sealed=True),
    Reader("tokens for validation", token_files, "validation.bin", tokens_of, is_sealed=True),
    Reader(
        "part", part_files, "parts/00000000", part_of, is_sealed=True, otherwise=(None,)
    ),  # None: it is made again
    Reader("images", image_files, "a.npz", images_of, inside_npz),
    Reader("pictures", image_files, "a.npz", pictures_of, inside_npz),
    Reader("pictures, x alone", lambda: image_files("x"), "a.npz", pictures_of, inside_npz),
    Reader("CIFAR, python 2", lambda: cifar_files(2), "data_batch_1", cifar_of, inside_pickle),
    Reader("CIFAR, python 3", lambda: cifar_files(4), "test_batch", cifar_of, inside_pickle),
    Reader("CIFAR, text pickle", lambda: cifar_files(0), "test_batch", cifar_of, inside_pickle),
    Reader("CIFAR, binary", lambda: cifar_files(None), "data_batch_1.bin", cifar_of),
    Reader("benchmark", fixed(a__json=bench_rows().encode()), "a.json", bench_of),
    Reader(
        "times of steps",
        time_files,
        "steps.json",
        lambda folder: read_step_times(folder / "steps.json"),
        is_sealed=True,
    ),
    Reader("record", run_files, "record.json", record_of, is_sealed=True),
    Reader("packed records", packed_files, "a.jsonl", packed_of, is_sealed=True),
    Reader("packed records, sealed", packed_files, "a.jsonl", packed_of, resealed_line),
    Reader("report, packed records", packed_files, "a.jsonl", packed_report_of, resealed_line),
    Reader("weights", run_files, "model.safetensors", writer_of, is_sealed=True),
    Reader("metrics", run_files, "metrics.jsonl", lambda folder: len(read_metrics(folder))),
    Reader(
        "config of a run",
        run_files,
        "config.json",
        lambda folder: RunDirectory(folder).read_config().id,
    ),
    Reader(
        "checkpoint",
        checkpoint_files,
        "step-000000010.json",
        checkpoint_of,
        is_sealed=True,
        otherwise=(OLDER,),
    ),
    Reader(
        "checkpoint, tensors",
        checkpoint_files,
        "step-000000010.safetensors",
        checkpoint_of,
        is_sealed=True,
        otherwise=(OLDER,),
    ),
    Reader("claim", sweep_files, "runs/2/claim-000001", claim_of, may_refuse=False),
    report_row("record", "runs/0/record.json"),
    report_row("config", "runs/1/config.json"),
    report_row("metrics", "runs/1/metrics.jsonl"),
    report_row("failures", "runs/1/failures.jsonl"),
    report_row("claim", "runs/2/claim-000001"),
    report_row("study", "studies/a.toml"),
]
