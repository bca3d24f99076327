"""Fitting routing: a drawn trace of known statistics is found again, judged on requests that were not fitted."""

from __future__ import annotations

import pytest

from moereplay.calibration.routing import error, fit
from moereplay.simulator.errors import ConfigError
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import draw
from moereplay.traces.schema import Geometry
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
