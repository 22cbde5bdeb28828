"""Tables as plain text: aligned, within a width, and nothing lost where it is small."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from einlinear.show.tables import RULE, facts_text, text_table, wrapped

HEAD = ("name", "kind", "size")
ROWS = [("a", "matrix", "1"), ("blocks.0", "bias", "1,024")]


def test_names_are_to_the_left_and_numbers_to_the_right():
    assert text_table(HEAD, ROWS, left=2).splitlines() == [
        "name      kind     size",
        "-----------------------",
        "a         matrix      1",
        "blocks.0  bias    1,024",
    ]


def test_sections_and_rules_cross_the_table():
    lines = text_table(HEAD, ["first:", ROWS[0], RULE, ROWS[1]], left=2).splitlines()
    assert lines[2] == "first:"
    assert lines[4] == lines[1] == "-" * len(lines[0])


def test_a_column_without_text_is_left_out():
    assert text_table(("a", "", "b"), [("1", "", "2")]).splitlines() == ["a  b", "----", "1  2"]


def test_a_name_that_is_too_long_gets_its_own_line():
    rows = [("a.very.long.name.of.a.layer", "matrix", "1"), *ROWS]
    assert text_table(HEAD, rows, left=2, width=26).splitlines() == [
        "name         kind     size",
        "--------------------------",
        "a.very.long.name.of.a.layer",
        "             matrix      1",
        "a            matrix      1",
        "blocks.0     bias    1,024",
    ]


def test_where_names_are_short_the_widest_cells_are_wrapped():
    text = text_table(("step", "axes"), [("new", "XA XB XC XD XE XF XG")], left=2, width=20)
    assert text.splitlines()[2:] == ["new   XA XB XC XD XE", "      XF XG"]


def test_the_head_is_wrapped_and_columns_move_closer_before_cells_are_wrapped():
    head, rows = ("name", "FLOPs x", "90 %"), [("blocks.0", "1.25", "0.90 to 1.40")]
    lines = [text_table(head, rows, width=width).splitlines() for width in (31, 29, 28, 27, 26)]
    assert lines[0] == [
        "name      FLOPs x          90 %",
        "-------------------------------",
        "blocks.0     1.25  0.90 to 1.40",
    ]
    assert lines[1][0::3] == ["name      FLOPs          90 %", "blocks.0   1.25  0.90 to 1.40"]
    assert lines[1][1].split() == ["x"]
    assert lines[2][-1] == "blocks.0   1.25 0.90 to 1.40"
    assert lines[3][-1] == "blocks.0  1.25 0.90 to 1.40"
    assert lines[4][-1].strip() == "1.40", "now the widest cell"


def test_bold_rows_are_bold_in_a_terminal():
    plain, bold = text_table(HEAD, ROWS), text_table(HEAD, ROWS, bold={1})
    assert bold.splitlines()[3] == f"\x1b[1m{plain.splitlines()[3]}\x1b[0m"
    assert bold.splitlines()[:3] == plain.splitlines()[:3]


WORDS = st.text("abc", min_size=1, max_size=30)


NUMBERS = st.text("abc", min_size=1, max_size=20)  # 40 columns hold one, and two of words


@given(st.lists(st.tuples(WORDS, WORDS, NUMBERS), min_size=1), st.integers(40, 100))
def test_no_line_is_too_long_and_no_letter_is_lost(rows, width):
    text = text_table(HEAD, rows, left=2, width=width)
    assert max(map(len, text.splitlines())) <= width
    body = text.splitlines()[2:]
    for letter in "abc":
        wanted = sum(cell.count(letter) for row in rows for cell in row)
        assert sum(line.count(letter) for line in body) == wanted


CURVE = ("step", "tokens", "training FLOPs", "seconds", "validation loss", "training loss")


@pytest.mark.parametrize("width", [30, 50, 60, 70])
def test_words_of_the_head_and_numbers_stay_whole(width):
    text = text_table(
        CURVE, [("24", "1,536,000", "1.2e-10", "3.0", "4.1", "4.0")], left=0, width=width
    )
    words = text.split()
    for word in (*" ".join(CURVE).split(), "1,536,000", "1.2e-10"):
        assert word in words
    if width > 50:
        assert max(map(len, text.splitlines())) <= width


def test_columns_are_aligned_where_symbols_are_spelled_out(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    rows = [("\u03c9", "d\u00b2"), ("psi", "1")]
    assert text_table(("\u03bd", "size"), rows).splitlines() == [
        "nu     size",
        "-----------",
        "omega   d^2",
        "psi       1",
    ]
    assert facts_text({"\u03c9": 1, "rank": 2}) == "omega  1\nrank   2"
    assert wrapped("\u03c9 \u03c9", 9) == "omega\n  omega"


def test_facts_are_wrapped_under_their_value():
    facts = {"rank": 4, "equation": "abc,def->ghi, of three factors"}
    assert facts_text(facts).splitlines() == [
        "rank      4",
        "equation  abc,def->ghi, of three factors",
    ]
    assert facts_text(facts, 27).splitlines()[1:] == [
        "equation  abc,def->ghi, of",
        "          three factors",
    ]


@pytest.mark.parametrize("indent", ["", "    "])
def test_a_paragraph_keeps_its_own_indent(indent):
    assert wrapped("  one two three four", 12, indent).splitlines() == [
        "  one two",
        f"  {indent}three" + ("" if indent else " four"),
        *([f"  {indent}four"] if indent else []),
    ]
