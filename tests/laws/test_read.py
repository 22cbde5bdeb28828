import csv
import json

import pytest

import einlinear as el
from einlinear.reports.csv_files import to_csv


def test_tables_are_read(tmp_path):
    rows = [
        {"run": "a", "compute": 1e3, "loss": 2.5, "structure": "btt", "seed": 3, "note": "x"},
        {"run": "b", "compute": 2e3, "loss": None, "structure": "dense", "seed": 4, "note": "y"},
        {"run": "c", "compute": 0, "loss": 1.5, "structure": "dense", "seed": 5, "note": "z"},
    ]
    lines = tmp_path / "runs.jsonl"
    lines.write_text("\n\n".join(json.dumps(row) for row in rows))
    table = tmp_path / "runs.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for path in (lines, table):
        data = el.read_observations(path)
        assert data.run.tolist() == ["a", "c"]
        assert data.compute.tolist() == [1e3, 0]
        assert data.loss.tolist() == [2.5, 1.5]
        assert data.structures == ("btt", "dense")
        assert data.seed.tolist() == [3, 5]
        assert data.more["note"].tolist() == ["x", "z"]
        assert data.left_out == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv holds no observations"),
        ("a.csv", "run,compute,loss\n", "a.csv holds no observations"),
        ("a.csv", "run,loss\na,2\n", "a.csv, line 1: there is no 'compute'"),
        ("a.csv", "run,macs,loss\na,1,2\n", "(?s)no 'compute'.*rename 'macs' to 'compute'"),
        ("a.jsonl", '{"run": 1, "flops": 2, "loss": 3}\n', "(?s)rename 'flops' to 'compute'"),
        ("a.csv", "run,compute,loss\na,1,2\nb,1\n", "line 3: there is no 'loss'"),
        ("a.csv", "run,compute,loss\na,1,2\nb,1e9 F,2\n", "line 3: compute is '1e9 F'"),
        ("a.csv", "run,compute,loss\na,-4,2\n", "line 2: compute is -4"),
        ("a.csv", "run,compute,loss\na,inf,2\n", "line 2: compute is inf"),
        ("a.csv", "run,compute,loss\na,4,-2\n", "line 2: loss is -2"),
        ("a.csv", "run,compute,loss\na,4,low\n", "line 2: loss is 'low'"),
        ("a.csv", "run,compute,loss\na,4,2,7\n", "line 2: there are more values"),
        ("a.csv", "run,compute,loss\na,4,\n", "no observations \\(1 points had no loss"),
        ("a.csv", "run,compute,loss,seed\na,4,2,1.5\n", "line 2: seed is '1.5'"),
        ("a.csv", "run,compute,loss,seed\na,4,2,\na,4,2,1e30\n", "line 3: seed is '1e30'"),
        ("a.csv", "run,compute,loss\n,4,2\n", "line 2: run is empty"),
        ("a.csv", "run,compute,loss,loss\na,4,2,7\n", "two columns 'loss'"),
        ("a.csv", "run;compute;loss\na;4,5;2\n", "line 2: compute is '4,5'"),
        ("a.csv", 'run,compute,loss\n"a,4,2\n', "cannot read"),
        ("a.jsonl", '{"run": 1, "loss": 1, "compute": 1' + "0" * 400 + "}", "of about 400 digits"),
        ("a.jsonl", '{"run": 1, "compute": 2, "loss": 3}\n[1]\n', "line 2: there is no JSON"),
        ("a.jsonl", '{"run": 1, "compute": 2, "loss"\n', "line 1: there is no JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: there is no JSON"),
        ("a.jsonl", '{"run": 1, "compute": true, "loss": 3}\n', "line 1: compute is True"),
        ("a.jsonl", '\n{"run": 1, "loss": 3}\n', "line 2: there is no 'compute'"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(el.EinlinearError, match=message):
        el.read_observations(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffrun,compute,loss,note\na,1e3,2.5,x\nb,2e3,nan,y\nc,0,1.5,z\n",
        'run,compute,loss,note\r\n"a","1e3","2.5","x"\r\nb,2e3,NA,y\r\nc,0,1.5,z\r\n',
        "run;compute;loss;note\na;1e3;2.5;x\nb;2e3;;y\nc;0;1.5;z\n",
        "run\tcompute\tloss\tnote\na\t1e3\t2.5\tx\nb\t2e3\tinf\ty\nc\t0\t1.5\tz\n",
        "note, loss, compute, run,\nx, 2.5, 1e3, a,\n\ny, , 2e3, b,\nz, 1.5, 0, c,\n",
        ",run,compute,loss,note\n0,a,1e3,2.5,x\n1,b,2e3,None,y\n2,c,0,1.5,z\n",
    ],
)
def test_all_kinds_of_csv(tmp_path, text):
    path = tmp_path / "runs.csv"
    path.write_bytes(text.encode())
    data = el.read_observations(path)
    assert (data.run.tolist(), data.left_out) == (["a", "c"], 1)
    assert (data.compute.tolist(), data.loss.tolist()) == ([1e3, 0], [2.5, 1.5])
    assert {name: column.tolist() for name, column in data.more.items()} == {"note": ["x", "z"]}


def test_lines_inside_of_values(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text('run,compute,loss\n"a\nb",1,2\na\u2028b,1,2\nc,1,low\n', encoding="utf-8")
    with pytest.raises(el.EinlinearError, match="line 5: loss is 'low'"):
        el.read_observations(path)
    lines = tmp_path / "runs.jsonl"
    lines.write_text('{"run": "a\u2028b", "compute": 1, "loss": 2}\r\n', encoding="utf-8")
    assert el.read_observations(lines).run.tolist() == ["a\u2028b"]


def test_what_only_some_rows_have(tmp_path):
    """Seeds and groups of some runs only: the others are no group, least of all one together."""
    table = tmp_path / "runs.csv"
    table.write_text("run,compute,loss,group,seed\na,1,2,g,1\nb,1,2,g,2\nc,1,2,,\nd,1,2,,\n")
    rows = [
        {"run": "a", "compute": 1, "loss": 2, "group": "g", "seed": 1},
        {"run": "b", "compute": 1, "loss": 2, "group": "g", "seed": 2},
        {"run": "c", "compute": 1, "loss": 2, "group": None},
        {"run": "d", "compute": 1, "loss": 2},
    ]
    lines = tmp_path / "runs.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    for path in (table, lines):
        data = el.read_observations(path)
        assert data.group.tolist() == ["g", "g", "c", "d"]
        assert data.seed.tolist() == [1, 2, 0, 0]


def test_large_seeds_stay_apart(tmp_path):
    seeds = [2**53, 2**53 + 1, 2**63 - 1024, -(2**60) - 1]
    table, lines = tmp_path / "runs.csv", tmp_path / "runs.jsonl"
    table.write_text("run,compute,loss,seed\n" + "".join(f"a,1,2,{seed}\n" for seed in seeds))
    rows = [{"run": "a", "compute": 1, "loss": 2, "seed": seed} for seed in seeds]
    lines.write_text("\n".join(map(json.dumps, rows)))
    for path in (table, lines):
        assert el.read_observations(path).seed.tolist() == seeds
    table.write_text("run,compute,loss,seed\na,1,2,1e18\n")
    assert el.read_observations(table).seed.tolist() == [10**18]


def test_spaces_around_names_do_not_matter(tmp_path):
    table = tmp_path / "runs.csv"
    table.write_text("run , compute , loss , structure\na , 1 , 2 , dense \nb , 2 , 1 , dense\n")
    data = el.read_observations(table)
    assert (data.run.tolist(), data.structures) == (["a", "b"], ("dense",))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(el.EinlinearError, match="cannot read"):
        el.read_observations(tmp_path / "none.csv")


@pytest.mark.parametrize("name", ["=cmd", "+x", "-x", "@x", "'=x", "''=x", "'x", "-1", "a=b"])
def test_texts_that_reports_write_are_read_as_they_were(tmp_path, name):
    """An apostrophe keeps a spreadsheet from taking them for formulas."""
    table = tmp_path / "points.csv"
    text = to_csv(iter([{"run": name, "compute": 1.0, "loss": 2.0, "structure": name}]))
    table.write_text(text, encoding="utf-8")
    data = el.read_observations(table)
    assert (data.run.tolist(), data.structures) == ([name], (name,))
