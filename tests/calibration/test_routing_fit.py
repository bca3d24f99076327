"""Fitting routing: a drawn trace of known statistics is found again, judged on requests that were not fitted."""

from __future__ import annotations

import numpy as np
import pytest

from moereplay.calibration.routing import error, fit, fitted_and_judged
from moereplay.simulator.errors import ConfigError
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import FOLDER, as_toml, draw
from moereplay.traces.schema import Geometry
from studies.routing_transfer import checked, generic, held, measured
from tests.traces.test_routing import model


def shape(layers: int = 2, experts: int = 16, k: int = 3) -> Geometry:
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=(100,) * layers)


@pytest.mark.slow
def test_a_fit_has_the_hit_rates_of_routing_that_it_never_saw() -> None:
    truth = model(hot=1.5, cold=0.5, request=1.0, slow=1.0, kind=1.5)
    lengths = [100] * 8
    trace = from_arrays(draw(truth, lengths, 9), shape(), lengths=lengths, prompt_lengths=[1] * 8)
    found = fit(trace, "again", steps=3)
    assert found.error is not None and found.error.requests == 4
    assert found.error.hit_points < 3
    assert found.error.halves is not None and found.error.hit_points < found.error.halves + 2
    ids = draw(truth, lengths, 9)
    halves = [(ids[at * 400 : (at + 1) * 400], lengths[:4]) for at in (0, 1)]
    plain = error(model(), halves[0], halves[1], shape(), 1)
    assert plain.hit_points > 3 * found.error.hit_points
    assert fit(trace, "again", steps=3) == found


def test_what_cannot_be_fitted_is_refused() -> None:
    ids = draw(model(), [70], 0)
    ids[:9, 1] = -1  # 61 tokens are routed in every layer
    with pytest.raises(ConfigError, match="61 tokens"):
        fit(from_arrays(ids, shape()), "x", steps=1)
    with pytest.raises(ConfigError, match="tokens"):
        fit(from_arrays(draw(model(), [9], 0), shape()), "x", steps=1)


def test_a_fit_is_judged_from_the_end_of_the_recording() -> None:
    ids = draw(model(), [10] * 7, 0)
    fitted, judged = fitted_and_judged(from_arrays(ids, shape(), lengths=[10] * 7), 25)
    assert fitted[1] == judged[1] == [10, 10, 5]
    assert np.array_equal(fitted[0], ids[[*range(10), *range(20, 30), *range(40, 45)]])
    assert np.array_equal(judged[0], ids[[*range(50, 60), *range(30, 40), *range(10, 15)]])


def test_generic_routing_is_what_the_study_makes_of_all_models() -> None:
    assert all((FOLDER / f"{made.name}.toml").read_text() == as_toml(made) for made in generic(measured()))


@pytest.mark.slow
def test_the_range_of_generic_routing_holds_the_hits_of_models_that_were_left_out() -> None:
    """The share of real hit rates inside the range, the range's width and the middle's error are in docs/routing.md."""
    texts = held(measured())
    assert all(inside >= 0.8 for model in texts.values() for inside, _, _ in model)
    means = np.mean([np.mean(model, axis=0) for model in texts.values()], axis=0)
    assert means == pytest.approx([0.985, 0.351, 0.060], abs=0.005)
    assert all(low < real < high for low, real, high in checked())
