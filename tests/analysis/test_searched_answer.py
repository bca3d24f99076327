"""The sentences of a search by replays: what was compared, what engines have, what memory gives, what is not known."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from moereplay.analysis import answer as told
from moereplay.analysis.comparisons import NOTHING
from moereplay.analysis.statistics import Interval
from moereplay.simulator.capacity import Memory
from moereplay.simulator.config import configure
from moereplay.sweeps.recommend.draft_replays import Decoded, Step
from moereplay.sweeps.recommend.runner import QUICK, Runner
from moereplay.sweeps.recommend.search import Answer, Question
from moereplay.sweeps.recommend.searched import Searched
from moereplay.sweeps.recommend.space import ALL_FIT
from moereplay.traces.schema import Geometry
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.every import every

MB = 1_000_000
SETS = ("lru", "fifo", "lfu")


def searched_of(platform: str = "rtx4090-pcie4", eviction: str = "lru", **more: Any) -> Searched:
    """The answer with three plain sets in 12 of 32 MB, made without a search; the fields of `more` are replaced."""
    geometry = Geometry(
        layers=3, experts=8, k=2, expert_bytes=(MB, MB, 2 * MB), dense_params=1_000, head_params=500, kv_bytes=7
    )
    kinds = {"requests": 3, "prompt_tokens": 2, "decode_tokens": 20, "reuse": 0.5, "geometry": geometry, "seed": 0}
    trace = synthesise(Synthetic.model_validate({"kind": "markov", **kinds}))
    question = Question(trace, Memory(12 * MB + 10, 4, 3, 3), {"platform": platform}, pace=QUICK)
    names = (eviction, *(name for name in SETS if name != eviction))
    sets = [configure(platform=platform, eviction=name, capacity=f"{12 * MB}B") for name in names]
    best, second, third = Runner(trace).tried(sets)
    sizes = [sets[0].model_copy(update={"capacity": f"{size}B"}) for size in (6 * MB, 12 * MB - 28, 24 * MB)]
    curve = tuple(Runner(trace).tried(sizes))
    answer = Answer(ALL_FIT, 3, None, best, second, best, best, None, None, curve, None, (third,), None)
    return Searched(question, replace(answer, **more), "here.zarr", trace, 9, ("a context (--context)",))


def text_of(of: Searched) -> str:
    return "\n".join(told.lines(of))


def test_numbers_have_no_exponents_and_sizes_next_to_each_other_are_one() -> None:
    text = text_of(searched_of())
    (line,) = [line for line in text.splitlines() if line.startswith("memory: ")]
    assert re.fullmatch(r"memory: 12 MB more: \+\d+% tokens/s; 6 MB less: -\d+% tokens/s", line)
    assert re.search(r"\de[+-]\d", text) is None and len(text.splitlines()) <= 25
    assert "12 MB experts (9 of mean size, 3 of each layer)" in text


def test_a_peak_above_the_machines_memory_is_said_and_marked_in_the_table() -> None:
    of = searched_of(f"rtx4090-pcie4:memory_bytes={13 * MB}:reserve_bytes={2 * MB}")
    assert "warning: peak: 14 MB with 2 MB for the system, but the machine has 13 MB: every set here" in text_of(of)
    assert "will page" in "\n".join(told.lines(of, verbose=True))
    fits = text_of(searched_of(f"rtx4090-pcie4:memory_bytes={15 * MB}:reserve_bytes={2 * MB}"))
    assert "  peak: 14 MB with 2 MB for the system, of 15 MB" in fits and "every set here will page" not in fits


def test_what_a_lossy_set_costs_in_quality_is_never_passed_over() -> None:
    of = searched_of()
    low = of.best.config.model_copy(update={"miss": "fetch:bits=2"})
    text = text_of(searched_of(lossy=tuple(Runner(of.question.trace).tried([low]))))
    assert "lossy (what that costs in quality is not known here: docs/quality.md): miss fetch:bits=2" in text
    assert "every expert at 2 bits instead of 16" in text


def test_a_set_that_no_engine_has_is_marked_and_the_best_of_engines_stands_beside_it() -> None:
    assert "  engines that have this set: preset freetoken" in text_of(searched_of())
    of = searched_of(eviction="fifo")
    assert "  no known engine has this set\n" in text_of(of)
    known = replace(of, answer=replace(of.answer, known=of.answer.second))
    assert "no known engine has this set; the best that one has (preset freetoken): " in text_of(known)
    assert told.document(known)["best_known"]["engines"] == ["preset freetoken"]


def test_measured_runs_of_the_platform_correct_the_figure_or_there_are_none() -> None:
    """20 runs of the phone took 1.80 to 3.13 times the predicted time."""
    of = searched_of("phone-ufs4")
    least, most = (of.best.tokens_per_s / times for times in (of.about["band_most"], of.about["band_least"]))
    (line,) = [line for line in told.lines(of) if "measured runs" in line]
    low, high = (float(each.replace(",", "")) for each in re.findall(r"([\d,.]+) to ([\d,.]+) tokens/s", line)[0])
    assert low == pytest.approx(least, rel=0.01) and high == pytest.approx(most, rel=0.01)
    assert "  not compared with measured runs: " in text_of(searched_of())


@every(
    "requests, low, answer, facts, not_said",
    (
        (5, None, "can't tell", ("no interval: fewer than 6 requests", "which may be chance"), "95%"),
        (6, 30.0, "can't tell", ("95% interval over 6 requests: 30 to 50", "which may be chance"), "no interval"),
        (6, 30.0, "yes", ("95% interval over 6 requests: 30 to 50",), "chance"),
    ),
)
def test_the_second_is_compared_only_as_far_as_it_was_tested(
    requests: int, low: float | None, answer: str, facts: tuple[str, ...], not_said: str
) -> None:
    interval = Interval(40.0, low, low and 50.0, requests, "" if low else "fewer than 6 requests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moereplay.sweeps.recommend.searched.synthetic", lambda provenance: "")
        patch.setattr(told, "estimate", lambda rows, figure: interval)
        patch.setattr(told, "compare", lambda one, other, figure: NOTHING._replace(answer=answer))
        text = text_of(searched_of())
    assert "second: eviction fifo: " in text and not_said not in text
    assert all(fact in text for fact in facts)


def test_drafts_and_streams_are_told_in_the_words_of_the_other_answer() -> None:
    none = Step(0, 1.0, 10.0, 19.0, 0.5, 1e6, 0.0, MB, {"miss": "fetch"})
    one = none._replace(drafts=1, tokens_per_s=12.0, throughput_tokens_per_s=23.0)
    of = replace(
        searched_of(), decoded=Decoded(2, 1, "as given", (none, one), none._replace(tokens_per_s=15.0), 0.2, True)
    )
    text = text_of(of)
    assert "2 streams: 23 tokens/s together, 12 each; one stream alone has 15" in text
    assert "drafts pay: 1 draft per pass 20% more tokens/s than none (12 in place of 10)" in text
    assert "drafts are right with chances as given" in text
    assert told.document(of)["decoding"]["steps"][1]["drafts"] == 1
