"""Short names in a leaderboard, and the structures behind them."""

from einlinear.searches.words import leaderboard_table, short_names, short_names_text
from kit.search_records import make_row

LONG = "XA^2/3 XAB^1/3 YA^53/120 YB^13/120 YAB^9/20 AB^1/30"
OTHER = LONG.replace("2/3", "3/5")


def test_a_legend_has_each_short_name_once_in_the_order_of_the_numbers():
    rows = [
        make_row("s10", structure=OTHER),
        make_row("s2 moe 2/8", structure=LONG, num_experts=8),
        make_row("s2", structure=LONG),
        make_row("btt(rank = 2) moe 2/8", structure="btt(rank = 2)", num_experts=8),
        make_row("dense"),
        make_row(" ", structure="btt"),
    ]
    assert list(short_names(rows).items()) == [("s2", LONG), ("s10", OTHER)]
    assert short_names_text(rows) == f"s2   {LONG}\ns10  {OTHER}"
    assert short_names_text(rows[3:]) == ""


def test_a_row_with_a_short_name_is_one_line_of_80_columns():
    wide = {"low": 0.05, "high": 123.45, "multiplier": 12.34, "wins": 1.0, "runs": 25}
    rows = [make_row(name, structure=LONG, **wide) for name in ("s1", "s12", "dense", "kronecker")]
    lines = leaderboard_table(rows, 80).splitlines()
    assert max(map(len, lines)) <= 80
    body = lines[1 + next(k for k, line in enumerate(lines) if set(line) == {"-"}) :]
    assert [line.split()[0] for line in body] == [row.label for row in rows]
    assert all("0.05-123.45" in line and line.endswith("100%") for line in body)
