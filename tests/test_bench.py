import json

import pytest
import torch

from einlinear.bench import MODES, bench_case, bench_page, peak_memory
from einlinear.cli import main
from einlinear.layers.execute import VARIANTS


@pytest.fixture(scope="module")
def rows():
    return bench_case("btt(rank=2)", 64, 300, repeats=3)


def test_every_variant_is_timed_both_ways(rows):
    cases = [(row.mode, row.variant) for row in rows]
    assert cases == [(mode, v) for mode in MODES for v in ("nn.Linear", *VARIANTS)]
    for row in rows:
        assert 0 < row.low <= row.speed <= row.high
        assert row.limit == (1 if row.variant == "nn.Linear" else 2)
    assert sum(row.is_chosen for row in rows) == 2
    assert all(row.speed == 1 for row in rows if row.variant == "nn.Linear")


def test_peak_memory_counts_what_is_held_at_once():
    def action():
        a = torch.empty(1000, 1000)
        del a
        b, c = torch.empty(500, 1000), torch.empty(250, 1000)
        return b, c

    assert peak_memory(action) == pytest.approx(4e6, rel=0.01)


def test_backward_needs_more_memory_than_forward(rows):
    peaks = {(row.mode, row.variant): row.peak_bytes for row in rows}
    for variant in VARIANTS:
        assert peaks["forward+backward", variant] > peaks["forward", variant] > 64 * 300 * 4


def test_the_page_draws_every_variant(rows):
    page = bench_page(rows)
    assert page.count("Plotly.newPlot('figure") == 2
    for variant in VARIANTS:
        assert f'"name": "{variant}"' in page


def test_the_command_writes_a_table_and_files(capsys, tmp_path):
    words = "bench --structures monarch --widths 64 --tokens 8 --repeats 2 --dtype float64 --out"
    main([*words.split(), str(tmp_path)])
    out = capsys.readouterr().out
    assert "monarch" in out
    assert "strided" in out
    payload = json.loads((tmp_path / "bench.json").read_text())
    assert payload["machine"]["torch"] == torch.__version__
    assert {row["dtype"] for row in payload["rows"]} == {"float64"}
    assert "nn.Linear" in (tmp_path / "bench.html").read_text(encoding="utf-8")


def test_bad_requests(capsys, tmp_path):
    for words in ("--structures bttt", "--widths 0", "--structures btt --tokens -1"):
        with pytest.raises(SystemExit) as stop:
            main(["bench", "--out", str(tmp_path), *words.split()])
        assert stop.value.code == 2
        assert "rule:" in capsys.readouterr().err
