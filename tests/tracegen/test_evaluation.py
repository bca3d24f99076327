"""Tasks under policy sets: what is kept, what is asked again, and that a set that changes nothing is not run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from moereplay.analysis.forecast import points_of
from moereplay.analysis.quality import document, judged, tables
from moereplay.results.errors import ResultError
from moereplay.results.quality import UNMODIFIED, counted_by, examples_of
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.tracegen.quality.evaluation import Evaluation
from moereplay.tracegen.quality.harness import Answers, Example, Measure
from moereplay.tracegen.quality.session import Session
from moereplay.tracegen.quality.texts import TeacherForced
from moereplay.traces.lock import Lock
from moereplay.traces.schema import TraceError
from moereplay.traces.store import open_trace
from moereplay.traces.stored import PARTIAL
from tests.kit.every import every
from tests.kit.live_runs import loaded, modules, tokens

SETS = {
    "lru": {"eviction": "lru"},
    "prior": {"routing": "cache_prior:lam=.5"},
    "drop": {"miss": "drop", "eviction": "lfu"},
}


@dataclass
class Likelihood:
    """A task of random tokens; its answers are log-likelihoods."""

    name: str = "likelihood"
    seeds: Sequence[int] = (1, 2, 3)
    asked: list[str] = field(default_factory=list)  #: policies of every session that came
    dies_at: int = -1  #: of those, the one in which it fails
    compared = False

    @property
    def definition(self) -> list[object]:
        return ["test", self.name, list(self.seeds)]

    def answers(self, session: Session) -> Answers:
        plan = session.subject.plan
        self.asked.append(plan.config.routing + "/" + plan.config.miss if plan else UNMODIFIED)
        texts = [TeacherForced(tokens(9, seed), 4, 4) for seed in self.seeds]
        session.read(texts[:1])
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        session.read(texts[1:])
        examples = [Example(str(n), f"prompt {n}", "likelihood", text.logprob) for n, text in enumerate(texts)]
        return Answers([Measure("likelihood", sum(each.value for each in examples) / 3, True)], examples)


def evaluation(out: Path, **more: Any) -> Evaluation:
    base = {"capacity": "40%", "reset": "request"}
    sets = {name: configure(**{**base, **own}) for name, own in (SETS | more).items()}
    return Evaluation(loaded("olmoe"), modules("olmoe"), sets, seed=0, batch=2, out=out)


@pytest.mark.slow
@every("bits", ("4", "8/4"), apart=True)
def test_a_forecast_finds_the_bits_that_experts_ran_at(tmp_path: Path, bits: str) -> None:
    frame = asked(tmp_path, [Likelihood()], bits={"miss": f"lowest_bit:bits={bits}"})
    found = [each for each in judged(frame) if each.change is not None]
    rounding = {point.set: point.change.rounding for point in points_of(frame, found, "likelihood")}
    assert rounding.pop("bits") == pytest.approx(1 / 15**2)
    assert set(rounding.values()) == {0}


def test_a_set_that_the_model_cannot_run_under_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy set small: capacity 1B gives"):
        evaluation(tmp_path, small={"capacity": "1B"})


def test_a_trace_that_another_process_records_is_left_alone(tmp_path: Path) -> None:
    path = evaluation(tmp_path).trace_of(Likelihood())
    partial = path.with_name(path.name + PARTIAL)
    partial.mkdir(parents=True)
    (partial / "rows").write_text("of another process")
    held = Lock(partial)
    with pytest.raises(TraceError, match="is being written by process"):
        asked(tmp_path, [Likelihood()])
    held.release()
    assert (partial / "rows").read_text() == "of another process"
    assert len(asked(tmp_path, [Likelihood()])) == 1 + len(SETS)


def test_figures_that_are_not_finite_are_null_in_json(frame: pl.DataFrame) -> None:
    endless = pl.element().struct.with_fields(pl.lit(float("inf")).alias("value"))
    written = json.dumps(document(frame.with_columns(pl.col("measures").list.eval(endless))), allow_nan=False)
    assert json.loads(written)["rows"][0]["measures"][0]["value"] is None


def test_a_measure_that_one_set_lacks_is_an_empty_cell(frame: pl.DataFrame) -> None:
    """As the harness's perplexity of a set that rules out a text: it is infinite, and not among the measures."""

    def lacking(name: str) -> pl.DataFrame:
        none = pl.lit([], dtype=frame.schema["measures"])
        return frame.with_columns(measures=pl.when(pl.col("set") == name).then(none).otherwise("measures"))

    rows = {row["set"]: row for row in tables(lacking("drop"))["likelihood"]}
    assert rows["drop"]["likelihood"] is None and rows["drop"]["loss"] is None
    assert rows["prior"]["loss"] is not None
    assert judged(lacking(UNMODIFIED)) == []


def asked(out: Path, tasks: Sequence[Likelihood], **more: Any) -> pl.DataFrame:
    return pl.concat(evaluation(out, **more).rows(tasks, lambda name, tokens: None, lambda job, before: None))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Likelihood], pl.DataFrame]:
    """A folder with the answers of two tasks, the tasks, and the frame."""
    out, tasks = tmp_path_factory.mktemp("undisturbed"), [Likelihood(), Likelihood("second", (4, 5, 6))]
    return out, tasks, asked(out, tasks)


@pytest.fixture(scope="module")
def frame(done: tuple[Path, list[Likelihood], pl.DataFrame]) -> pl.DataFrame:
    """The first task's part."""
    return done[2].filter(pl.col("task") == "likelihood")


def test_every_set_beside_the_unmodified_model(frame: pl.DataFrame, done: Any) -> None:
    task = done[1][0]
    assert frame["set"].to_list() == [UNMODIFIED, *SETS]
    assert frame["changes_output"].to_list() == [False, False, True, True]
    assert len(task.asked) == 3, "lru leaves the output alone and is not run"
    rows = {row["set"]: row for row in frame.to_dicts()}
    assert rows["lru"]["measures"] == rows[UNMODIFIED]["measures"]
    assert rows["lru"]["live"] == rows["lru"]["replayed"] and rows[UNMODIFIED]["live"] is None
    assert rows["prior"]["live"]["misses"] < rows["lru"]["live"]["misses"]
    assert rows["drop"]["live"]["dropped"] > 0
    assert rows["lru"]["bounds"]["belady_hits"] >= rows["lru"]["live"]["hits"]
    assert rows["prior"]["bounds"] is None, "routing changes the demand"


def test_the_trace_of_the_unmodified_model_is_what_sweeps_replay(frame: pl.DataFrame, done: Any) -> None:
    trace = open_trace(evaluation(done[0]).trace_of(done[1][0]))
    row = frame.row(by_predicate=pl.col("set") == "drop", named=True)
    config = configure(capacity="40%", reset="request", miss="drop", eviction="lfu")
    assert trace.digest == row["about"]["trace"] and trace.tokens == row["tokens"] == 3 * 8
    assert counted_by(replay(trace, config, engine="reference")) == row["replayed"]


@pytest.mark.slow
@every("dies_at", (1, 2, 4, 6), apart=True)
def test_cut_off_and_continued_is_as_undisturbed(tmp_path: Path, dies_at: int, done: Any) -> None:
    failing, second = Likelihood(dies_at=dies_at), Likelihood("second", (4, 5, 6), dies_at=dies_at - 3)
    with pytest.raises(KeyboardInterrupt):
        asked(tmp_path / "two", [failing, second])
    failing.dies_at = second.dies_at = -1
    continued = asked(tmp_path / "two", [failing, second])
    assert continued.equals(done[2])
    assert len(failing.asked) + len(second.asked) == 6 + 1, "only what was cut off is asked twice"
    assert not list((tmp_path / "two").rglob("*.partial"))


def test_a_set_more_asks_no_other_again_and_other_questions_are_asked_anew(
    tmp_path: Path, frame: pl.DataFrame, done: Any
) -> None:
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    again, other = Likelihood(), Likelihood(seeds=(7, 8, 9))
    after = asked(tmp_path, [again], more={"routing": "max_rank"})
    assert again.asked == ["max_rank/fetch"]
    assert after.filter(pl.col("set") != "more").equals(frame)
    asked(tmp_path, [other])
    assert len(other.asked) == 3


def test_a_damaged_part_is_refused_by_name(tmp_path: Path, done: Any) -> None:
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    part = sorted((tmp_path / "parts").iterdir())[0]
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(ResultError, match=rf"{part.name} is .*delete it"):
        asked(tmp_path, [Likelihood(), Likelihood("second", (4, 5, 6))])


def test_differences_are_of_the_same_examples(frame: pl.DataFrame) -> None:
    """Computed here once more from the flat table, example by example."""
    flat = examples_of(frame)
    by_set = {name: rows["value"].to_list() for (name,), rows in flat.group_by("set", maintain_order=True)}
    found = {each.set: each for each in judged(frame)}
    for name in SETS:
        pairs = [ours - theirs for ours, theirs in zip(by_set[name], by_set[UNMODIFIED], strict=True)]
        assert found[name].change == pytest.approx(sum(pairs) / 3, abs=1e-12) and found[name].examples == 3
        assert found[name].loss == pytest.approx(-sum(pairs) / 3, abs=1e-12), "a higher likelihood is better"
    assert found["lru"].change == found["lru"].off == 0
    assert [row["set"] for row in tables(frame)["likelihood"]] == [UNMODIFIED, *SETS]
    assert document(frame)["rows"][2]["differences"][0]["measure"] == "likelihood"
