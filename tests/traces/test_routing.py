"""Routing models: each part of a score does what it says, alone; files are data; the same seed draws the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.traces.files import bundled
from moereplay.traces.geometry import known
from moereplay.traces.routing import (
    GENERIC,
    PARTS,
    RoutingModel,
    as_toml,
    draw,
    draws,
    named,
    read,
    routings_for,
    scores_of,
    shipped,
    text_of,
)
from moereplay.traces.schema import TraceError
from moereplay.traces.store import open_trace
from moereplay.traces.summary import summarise
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.command import moereplay_here, unfolded

STRONG = 1e5  #: beside noise of scale 1


def model(layers: int = 2, experts: int = 16, k: int = 3, **parts: float) -> RoutingModel:
    values = dict.fromkeys(PARTS, 0.0) | {"slow_tokens": 50.0, "fast_tokens": 2.0} | parts
    strengths: dict[str, Any] = {part: (float(values[part]),) * layers for part in PARTS}
    return RoutingModel(name="a test", layers=layers, experts=experts, k=k, **strengths)


def sets(ids: np.ndarray) -> list[frozenset[int]]:
    return [frozenset(row) for row in ids[:, 0].tolist()]


def test_popularity_alone_is_a_fixed_set_of_experts_that_differs_between_layers() -> None:
    ids = draw(model(hot=STRONG, cold=STRONG), [20, 20])
    assert len(set(sets(ids))) == 1
    assert set(ids[0, 0]) != set(ids[0, 1])


def test_a_topic_alone_is_a_set_for_each_request() -> None:
    first, second = sets(draw(model(request=STRONG), [20, 20]))[:20], sets(draw(model(request=STRONG), [20, 20]))[20:]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_a_kind_of_token_alone_always_has_the_same_experts() -> None:
    made = model(kind=STRONG)
    kinds, found = text_of(made, [300], 0), sets(draw(made, [300]))
    by_kind: dict[int, set[frozenset[int]]] = {}
    for kind, experts in zip(kinds.tolist(), found, strict=True):
        by_kind.setdefault(kind, set()).add(experts)
    assert all(len(each) == 1 for each in by_kind.values())
    assert 1 < len(by_kind) < 200  # kinds recur


def test_noise_alone_uses_experts_equally_and_reuses_by_chance() -> None:
    ids = draw(model(layers=1), [4000])
    counts = np.bincount(ids.ravel(), minlength=16)
    assert counts.min() > 0.85 * counts.mean()
    reuse = np.mean([len(a & b) / 3 for a, b in zip(sets(ids), sets(ids)[1:], strict=False)])
    assert reuse == pytest.approx(3 / 16, abs=0.02)


def test_what_fades_has_the_correlation_of_its_time() -> None:
    made = model(layers=1, slow=STRONG, slow_tokens=10.0)
    scores = next(scores_of(made, [20_000], 0)) / STRONG
    for lag in (1, 5, 20):
        found = np.mean(scores[lag:] * scores[:-lag])
        assert found == pytest.approx(np.exp(-lag / 10), abs=0.05)
    two = next(scores_of(made, [1] * 2000, 0)) / STRONG  # a request starts anew
    assert np.mean(two[1:] * two[:-1]) == pytest.approx(0, abs=0.05)


def test_the_same_seed_draws_the_same_ids_and_another_does_not() -> None:
    made = model(hot=1, request=1, kind=1, slow=1, fast=1)
    assert np.array_equal(draw(made, [30, 5], 3), draw(made, [30, 5], 3))
    assert not np.array_equal(draw(made, [30, 5], 3), draw(made, [30, 5], 4))
    ids = draw(made, [30, 5], 3)
    assert all(len(set(row)) == 3 for row in ids.reshape(-1, 3).tolist())
    fewer = made.model_copy(update={"k": 2, "kind": (3.0, 3.0)})  # drawn together, as each alone
    assert all(map(np.array_equal, draws([made, fewer], [30, 5], 3), [ids, draw(fewer, [30, 5], 3)]))
    with pytest.raises(ValueError, match="differ"):
        draws([made, model(experts=17)], [3])


def test_a_model_at_another_shape_takes_the_numbers_of_its_relative_depth() -> None:
    made = model(layers=2).model_copy(update={"hot": (1.0, 9.0)})
    scaled = made.scaled(6, 64, 8)
    assert scaled.hot == (1.0, 1.0, 1.0, 9.0, 9.0, 9.0)
    assert draw(scaled, [4]).shape == (4, 6, 8)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = model(hot=1.25, kind=0.5)
    (tmp_path / "a.toml").write_text(as_toml(made))
    assert read(tmp_path / "a.toml") == made == named(str(tmp_path / "a.toml"))


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    text = as_toml(model())
    for wrong in (
        "",
        "[",
        text.replace("layers = 2", "layers = 3"),
        text.replace("k = 3", "k = 99"),
        text.replace("hot = [0, 0]", "hot = [-1, 0]"),
        text.replace("hot = [0, 0]", "hot = [nan, 0]"),
        text.replace("slow_tokens = [50, 50]", "slow_tokens = [0, 0]"),
        text + "surprise = 1\n",
    ):
        (tmp_path / "a.toml").write_text(wrong)
        with pytest.raises(TraceError):
            read(tmp_path / "a.toml")
    with pytest.raises(TraceError, match="unknown routing model"):
        named("no-such-model")
    with pytest.raises(TraceError, match=r"synthesise --model deepseek-v3 --like OTHER.*: gemma-4-26b-a4b, "):
        named("deepseek-v3")


def test_a_synthetic_trace_has_the_statistics_of_a_routing_model_and_says_so() -> None:
    made = model(hot=STRONG, cold=STRONG)
    geometry = known("olmoe-1b-7b").geometry
    trace = synthesise(Synthetic(kind="fitted", like=made, geometry=geometry, requests=2, decode_tokens=8, bf16=False))
    ids = trace.read("chosen")
    assert ids.shape == (80, 16, 8)
    assert len({frozenset(row) for row in ids[:, 5].tolist()}) == 1
    assert trace.header.provenance.synthetic == "routing model a test"
    with pytest.raises(ValueError, match="routing model"):
        Synthetic(kind="fitted", geometry=geometry)


def test_models_that_ship_are_complete() -> None:
    for name, each in shipped().items():
        assert each.name == name and each.source and each.summary and each.error, name
        assert known(each.model).geometry.experts == each.experts, name


def test_a_model_has_its_own_routing_or_the_generic_one_at_its_shape_from_little_to_much_locality() -> None:
    olmoe, other = known("olmoe-1b-7b").geometry, known("glm-4.5-air").geometry
    own = routings_for("someone_OLMoE-1B-7B-0924-Q4_K_M.gguf", olmoe)
    assert [each.name for each in own] == ["olmoe-1b-7b"] and own[0].own
    generic = routings_for("glm-4.5-air", other)
    assert tuple(each.name for each in generic) == GENERIC and not any(each.own for each in generic)
    assert {(each.routing.layers, each.routing.experts, each.routing.k) for each in generic} == {(45, 128, 8)}
    drawn = draws([each.routing.at_layers([0]) for each in generic], [200])
    low, middle, high = [(ids[1:, 0, :, None] == ids[:-1, 0, None, :]).any(-1).mean() for ids in drawn]
    assert 8 / 128 < low < middle < high
    cut = olmoe.model_copy(update={"layers": 8, "expert_bytes": olmoe.expert_bytes[:8]})
    assert not routings_for("olmoe-1b-7b", cut)[0].own  # of another shape: not this model's


def test_look_ahead_of_a_routing_model_has_the_recall_asked_for() -> None:
    made = model(hot=1, cold=1, request=1, slow=1, kind=1)
    geometry = known("olmoe-1b-7b").geometry
    config = Synthetic(
        kind="fitted", like=made, geometry=geometry, requests=3, decode_tokens=100, bf16=False, recall=(0.85, 0.6)
    )
    trace = synthesise(config)
    looks = trace.request(1).lookahead
    chosen = trace.request(1).chosen
    for depth, asked, look in ((1, 0.85, looks[0]), (2, 0.6, looks[1])):
        best = np.argsort(-look[:, :-depth], axis=-1)[..., :8]
        found = (chosen[:, depth:, :, None] == best[:, :, None, :]).any(-1).mean()
        assert found == pytest.approx(asked, abs=0.02)


def test_a_routing_model_has_the_look_ahead_that_was_recorded(tmp_path: Path) -> None:
    recorded = [each.recall for each in summarise(open_trace(bundled(Path("miniature")))).layers]
    stated = named("miniature").recall
    assert stated == pytest.approx([np.mean([each[d] for each in recorded if d in each]) for d in (1, 2)], abs=1e-4)
    said = moereplay_here(
        "synthesise", "--like", "miniature", "--requests", "3", "--out", str(tmp_path / "a.zarr")
    ).stderr
    assert "look-ahead recall 0.8388, 0.7699, as recorded" in unfolded(said)
    drawn = [each.recall for each in summarise(open_trace(tmp_path / "a.zarr")).layers]
    assert stated == pytest.approx([np.mean([each[d] for each in drawn if d in each]) for d in (1, 2)], abs=0.02)
    other = moereplay_here("synthesise", "--like", "olmoe-1b-7b", "--requests", "1", "--out", str(tmp_path / "b.zarr"))
    assert "no look-ahead, whose recall was not recorded; --recall states one" in unfolded(other.stderr)
    assert open_trace(tmp_path / "b.zarr").header.lookahead_depth == 0
