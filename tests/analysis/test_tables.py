"""Tables fit the width and keep numbers whole, and lines are folded."""

from __future__ import annotations

from moereplay.analysis.tables import csv, definitions, drawn, folded, latex, markdown, table
from tests.kit.every import every

ROW = {"capacity": "5%", "eviction": "least_stale", "hit": 0.084782, "limit": 0.9846, "note": "same"}
ROWS = [ROW, ROW | {"capacity": "25%", "eviction": "lru", "hit": 1234.56}]


def test_a_table_that_fits_has_every_column() -> None:
    assert table(ROWS, width=80).splitlines() == [
        "capacity  eviction         hit   limit  note",
        "────────────────────────────────────────────",
        "5%        least_stale  0.08478  0.9846  same",
        "25%       lru          1,234.6  0.9846  same",
    ]
    assert table([{"change": -1234.56}], width=80).splitlines()[-1].strip() == "-1,234.6"


def test_what_does_not_vary_moves_above_a_table_that_is_too_wide() -> None:
    first, head, *_ = table(ROWS, width=36).splitlines()
    assert (first, head.split()) == ("all: limit 0.9846; note same", ["capacity", "eviction", "hit"])


def test_columns_that_can_be_spared_are_named() -> None:
    rows = [ROW, ROW | {"hit": 0.5, "limit": 0.5, "eviction": "lru"}]
    shown = table([{name: row[name] for name in ("eviction", "hit", "limit")} for row in rows], "", ["limit"], 22)
    assert shown.splitlines()[-1] == "more with --csv: limit"
    assert "0.9846" not in shown and "0.08478" in shown


def test_a_row_that_is_still_too_wide_becomes_a_line_above_its_numbers() -> None:
    rows = [
        {"eviction": name, "prefetch": f"of_{name}", "hit": 0.5, "n": at} for at, name in enumerate(("lru", "fifo"))
    ]
    assert table(rows, width=24).splitlines() == [
        "all: hit 0.5",
        "eviction  prefetch  n",
        "─────────────────────",
        "lru       of_lru    0",
        "fifo      of_fifo   1",
    ]
    assert table(rows, width=20).splitlines() == [
        "all: hit 0.5",
        "  n",
        "───",
        "eviction lru;",
        "prefetch of_lru",
        "  0",
        "eviction fifo;",
        "prefetch of_fifo",
        "  1",
    ]


@every("width", [20, 30, 40, 60, 80, 120])
def test_no_line_is_wider_and_no_number_is_cut(width: int) -> None:
    rows = [{"eviction": "lru", "what": "a text of several words that is long", "n": 1234567, "rate": 0.12345}] * 2
    shown = table(rows, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert "1,234,567" in shown and "0.1235" in shown


def test_heads_of_several_words_break_before_anything_is_lost() -> None:
    assert table([{"distinct in 8": 22.69, "recall": 0.43}], width=16).splitlines()[:2] == [
        "distinct  recall",
        "    in 8",
    ]


def test_a_ranking_has_short_heads_and_says_what_they_mean() -> None:
    row = {"eviction": "lru", "hit_rate": 0.5, "belady_hit_rate": 0.6, "tokens_per_s": 9.0}
    shown, *legend = drawn([row])
    assert shown.split()[:4] == ["eviction", "hit", "belady", "tok/s"] and "50.00%" in shown
    assert all(len(line) <= 80 for line in legend) and legend[0].startswith("belady, limit:")
    unbounded = drawn([row | {"belady_hit_rate": None}])  # a column without a value, and its meaning, are left out
    assert "tok/s" in unbounded[0] and not any("belady" in line for line in unbounded)


def test_what_a_wide_ranking_spares_is_not_in_its_legend() -> None:
    figures = {"hit_rate": 0.5, "belady_hit_rate": 0.6, "collisions_per_miss": 0.1, "tpot_ms": 1.5, "tokens_per_s": 9.0}
    rows = [
        {
            "capacity": f"{at}%",
            "prefetch": "x" * 30,
            "platform": "y" * 12,
            **figures,
            "hit_rate": at / 9,
            "tokens_per_s": at + 0.5,
            "collisions_per_miss": at / 9,
            "tpot_ms": at / 7,
        }
        for at in (1, 2)
    ]
    rows[1] |= {"prefetch": "z", "platform": "u", "belady_hit_rate": 0.7}
    shown, *legend = drawn(rows)
    assert "more with --csv: coll" in shown and max(map(len, shown.splitlines())) <= 80
    assert not any(line.startswith("coll:") for line in legend)


def test_heads_break_after_underscores() -> None:
    assert table([{"relaxed_belady hits": 1, "nine_tenths": 2}], width=17).splitlines()[:3] == [
        "relaxed_    nine_",
        "  belady   tenths",
        "    hits",
    ]


def test_csv_and_markdown_have_whole_names() -> None:
    assert csv([{"hit_rate": 1 / 3, "tpot_ms": None}]) == "hit_rate,tpot_ms\n0.3333333333333333,"
    assert markdown([{"eviction": "a|b", "n": 1000}]) == "| eviction | n |\n| --- | --: |\n| a\\|b | 1,000 |"


# ---------------------------------------------------------------- lines


def test_a_line_is_folded_and_what_is_pasted_is_whole() -> None:
    command = "moereplay replay TRACE --capacity 5%,25% --out runs/of/mine"
    assert folded(f"no replay here; make some with: {command}", 30).splitlines() == [
        "no replay here; make some",
        "  with:",
        f"  {command}",
    ]
    assert folded("lists them: `moereplay models`, all", 25).splitlines() == [
        "lists them:",
        "  `moereplay models`, all",
    ]
    assert folded(f"  warning: {'ab ' * 20}", 30).splitlines()[1].startswith("    ab")


def test_a_definition_that_cannot_be_folded_has_a_line_of_its_own() -> None:
    assert definitions([("write", "--miss a:b=c:d=e:f=g:h=i")], 22) == ["write", "  --miss a:b=c:d=e:f=g:h=i"]


def test_definitions_are_folded_below_their_texts() -> None:
    assert definitions([("what", "one two three four"), ("", ""), ("a", "b")], 22) == [
        "what  one two three",
        "      four",
        "",
        "a     b",
    ]


def test_a_latex_table_has_intervals_in_math_and_no_command_of_a_name() -> None:
    rows = [
        {
            "identity": "a1",
            "eviction": r"my_own\input{x}$1$",
            "hit_rate": 0.5,
            "hit_rate_low": 0.25,
            "hit_rate_high": 0.75,
        }
        | {"tokens_per_s": 1234.56, "tpot_ms": 2.0, "gb_moved": 4e24, "n": 1000, "nothing": None},
        {"identity": "b2", "eviction": "lru", "hit_rate": 0.125, "hit_rate_low": None, "hit_rate_high": None}
        | {"tokens_per_s": None, "tpot_ms": 12.345, "gb_moved": 0.5, "n": 7, "nothing": None},
    ]
    assert latex(rows, ["SIMULATED"]).splitlines() == [
        "% SIMULATED",
        r"\begin{tabular}{lrrrrr}",
        r"\toprule",
        r"eviction & hit (\%) & tok/s & TPOT (ms) & GB & n \\",
        r"\midrule",
        r"my\_own\textbackslash{}input\{x\}\$1\$ & $50.00\ [25.00,\,75.00]$ & $1{,}234.6$ & $2.000$ & $4\times10^{24}$"
        r" & $1{,}000$ \\",
        r"lru & $12.50$ & -- & $12.35$ & $0.5000$ & $7$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    compared = latex([{"difference": -0.5, "low": -0.75, "high": -0.25}], shares=["difference"])
    assert r"$-50.00\ [-75.00,\,-25.00]$" in compared and "half" not in compared
