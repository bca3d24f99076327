"""Numbers in sentences have sensible digits whatever their size, and never an exponent."""

from __future__ import annotations

import random

import pytest

from moereplay.traces.texts import digits, duration, percent, points, rate, size


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (2.3, "230%"),
        (23.456, "2,346%"),
        (0.128, "13%"),
        (0.0994, "9.9%"),
        (0.0996, "10%"),
        (0.0664, "6.6%"),
        (0.0041, "0.41%"),
        (0.0001, "0.01%"),
        (5.7e-7, "<0.01%"),
        (0.0, "0%"),
        (-0.2, "-20%"),
    ],
)
def test_percent(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(("share", "text"), [(0.5, "+50%"), (-0.031, "-3.1%"), (1e-9, "0%"), (-1e-9, "0%")])
def test_a_change_in_percent_has_its_sign_and_what_is_nothing_has_none(share, text):
    assert percent(share, signed=True) == text


def test_sizes_rates_and_times_have_the_unit_that_fits():
    assert [size(each) for each in (0, 28, 999.9, 1536, 5e6, 32.38e9, 2.148e12)] == [
        *("0 B", "28 B", "1 kB", "1.54 kB", "5 MB", "32.4 GB", "2.15 TB"),
    ]
    assert rate(4.2e9) == "4.2 GB/s"
    assert [duration(each) for each in (0.4, 12, 45_600, 187_000_000, 4.5e9)] == [
        *("0.4 ns", "12 ns", "45.6 us", "187 ms", "4.5 s"),
    ]
    assert points(0.12) == "12 points" and points(5e-8) == "<0.01 points"


def test_no_number_has_an_exponent_and_each_says_what_it_is_of():
    dice = random.Random(0)
    for _ in range(2000):
        value = dice.choice((-1, 1)) * 10 ** dice.uniform(-15, 15)
        for text in (percent(value), percent(value, True), points(value), size(value), duration(value)):
            assert "e" not in text.removesuffix("points") and "inf" not in text, (value, text)
        assert float(digits(value, 4).replace(",", "")) == pytest.approx(value, rel=5e-4)
