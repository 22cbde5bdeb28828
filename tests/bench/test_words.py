"""What a terminal shows of a benchmark: tables of 80 columns, and a sentence for each result."""

from dataclasses import replace

import pytest

from einlinear.bench.rows import LINEAR, LINEAR_BIAS, MODES, BenchRow
from einlinear.bench.words import flops_text, legend, sentences, shown_tables

THETA = "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)"
ROW = BenchRow(
    structure=THETA,
    width=16384,
    tokens=65536,
    dtype="float32",
    mode=MODES[1],
    variant="tltorch rebuilt",
    kind="peer",
    baseline=LINEAR,
    is_chosen=False,
    limit=128.0,
    speed=123.456,
    low=101.25,
    high=140.75,
    rounds=9,
    milliseconds=12345.678,
    peak_bytes=98_765_432_100,
)
LAYER = replace(ROW, variant="layer", kind="layer", baseline=LINEAR_BIAS)
MIXTURES = [
    replace(LAYER, variant=v, kind=kind, baseline=baseline, num_experts=number, num_active=2)
    for v, kind, baseline in (
        (LINEAR_BIAS, "baseline", LINEAR_BIAS),
        ("MoELinear", "mixture", LINEAR_BIAS),
        ("MoELinear", "mixture", "2 EinsumLinear"),
    )
    for number in (16, 1024)
]
STACK = replace(ROW, mode="training, 12 blocks", variant="layer", kind="stack")
KINDS = {"layers": [ROW, LAYER], "experts": MIXTURES, "blocks": [STACK]}


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_fit(kind, columns, has_old):
    for table in shown_tables(KINDS[kind], columns, {} if has_old else None):
        lines = table.text(columns).splitlines()
        assert max(map(len, lines)) <= columns
        assert len(lines) == len(table.lines) + 2, "no cell is wrapped"
        assert {"speed", "ms"} < set(table.names)
        assert ("by old" in table.names) == has_old
        assert ("of limit" in table.names) or columns < 200


def test_the_legend_names_the_columns_that_are_left():
    wide, narrow = (shown_tables([ROW, LAYER], columns) for columns in (200, 20))
    assert not {"limit", "from - to"} & set(narrow[0].names)
    assert legend(narrow) == ""
    assert legend(wide).startswith("limit: ")
    assert "from - to: " in legend(wide)


def test_a_structure_that_is_longer_than_the_terminal_has_its_own_line():
    (table,) = shown_tables([replace(STACK, structure=THETA * 4)], 80)
    lines = table.text(80).splitlines()
    assert lines[2] == THETA * 4
    assert max(map(len, lines[3:])) <= 80


def test_what_users_get_is_bold():
    (table,) = shown_tables([ROW, LAYER], 80)
    lines = table.text(80, has_bold=True).splitlines()
    assert [line.startswith("\x1b[1m") for line in lines] == [False, False, False, True]


def test_what_rows_share_is_the_heading():
    headings = [t.heading for rows in KINDS.values() for t in shown_tables(rows, 80)]
    setting = "width 16384, 65536 tokens"
    assert headings == [
        f"{THETA}, {setting}, forward + backward, float32",
        f"{THETA}, {setting}, forward + backward, float32",
        f"{THETA}, {setting}, forward + backward, float32; against 2 EinsumLinear",
        f"blocks, {setting}, training, 12 blocks, float32",
    ]


def test_compute_is_in_flops():
    """monarch at width 1024: 65,536 multiply-adds of 1,048,576."""
    row = replace(LAYER, width=1024, limit=16.0)
    assert flops_text(row) == ("FLOPs/token (forward + backward): 393,216, nn.Linear 6,291,456")
    assert flops_text(replace(row, mode=MODES[0])) == (
        "FLOPs/token (forward): 131,072, nn.Linear 2,097,152"
    )
    (table,) = shown_tables([ROW, LAYER], 80)
    assert table.flops == flops_text(LAYER)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"structure": "monarch", "speed": 5.14, "low": 4.9, "high": 5.3, "width": 1024},
            "monarch: 5.1 x faster than nn.Linear here "
            "(width 1024, 65536 tokens, forward + backward)",
        ),
        (
            {"structure": "btt(rank=2)", "speed": 0.5, "low": 0.4, "high": 0.6},
            "btt(rank=2): 2.0 x slower than nn.Linear here "
            "(width 16384, 65536 tokens, forward + backward)",
        ),
        (
            {"structure": "btt", "speed": 1.1, "low": 0.8, "high": 1.4},
            "btt: about as fast as nn.Linear here (0.80 to 1.40 x its speed; "
            "width 16384, 65536 tokens, forward + backward)",
        ),
        (
            {"structure": "btt", "speed": 1.01, "low": 1.0, "high": 1.03},
            "btt: about as fast as nn.Linear here (1.00 to 1.03 x its speed; "
            "width 16384, 65536 tokens, forward + backward)",
        ),
        (
            {"structure": "btt", "speed": 0.951, "rounds": 1, "low": 0.951, "high": 0.951},
            "btt: about as fast as nn.Linear here (0.95 x its speed; "
            "width 16384, 65536 tokens, forward + backward)",
        ),
        (
            {"structure": "btt", "speed": 1.051, "low": 1.01, "high": 1.06},
            "btt: 1.1 x faster than nn.Linear here (width 16384, 65536 tokens, forward + backward)",
        ),
        (
            {"num_experts": 16, "num_active": 2, "kind": "mixture", "speed": 12.34},
            f"{THETA}, 2 of 16 experts: 12 x faster than nn.Linear here "
            "(width 16384, 65536 tokens, forward + backward)",
        ),
        (
            {"kind": "stack", "baseline": LINEAR, "mode": "training, 2 blocks", "rounds": 1},
            f"{THETA}: 123 x faster than nn.Linear here "
            "(width 16384, 65536 tokens, training, 2 blocks)",
        ),
    ],
)
def test_a_result_is_a_sentence(changes, sentence):
    assert sentences([ROW, replace(LAYER, mode=MODES[0]), replace(LAYER, **changes)]) == [sentence]
    other = replace(LAYER, kind="mixture", baseline="all experts")
    assert sentences([other, *KINDS["experts"][:2]]) == []
