"""Predictions of the prefetch policy: what it suggests at a gate, and how much of it the target step demands."""

from __future__ import annotations

from moereplay.policies.contract import IN_FLIGHT, NONE, QUEUED, RESIDENT
from moereplay.simulator.compiled.cache import find
from moereplay.simulator.compiled.counters import PREDICTABLE, PREDICTED, PREDICTED_DEMANDED, count, count_here
from moereplay.simulator.compiled.links import cancel, prefetch
from moereplay.simulator.compiled.state import BAD_NAME, expert_of, fail, layer_of
from moereplay.simulator.compiled.uses import predict
from moereplay.simulator.jit.marks import called, fast


@fast
def count_predicted(s, x):
    """Count the predictions of expert x since its layer's last gate, and how many were possible."""
    if s["has_suggest"] == 1:
        count_here(s, PREDICTED_DEMANDED, s.predictions[x])
        count_here(s, PREDICTABLE, max(gates_before(s), s.predictions[x]))


@fast
def gates_before(s):
    """Return how many gates may have predicted an expert of this layer."""
    if s["next_pass"] == 1:
        return 1 if s["reset"]["passes"] > 0 else 0
    return min(s.now["layer"], s["reach"])


@called
def forget_predictions(s):
    for x in range(s["n_experts"]):
        s.predictions[x] = 0


@fast
def suggest(s, hooks):
    """Call the prefetch policy, and queue the absent copies that it predicts."""
    layer = s.now["layer"]
    for x in range(layer * s["experts"], (layer + 1) * s["experts"]):
        s.predictions[x] = 0  # predictions for this gate have been counted
    for i in range(predicted_copies(s, hooks.suggest)):
        record_prediction(s, hooks, s.suggested[i])


@fast
def predicted_copies(s, hook):
    """Return how many copies the prefetch policy predicts; 0, with an error set, if one is invalid."""
    if s["renews"] == 1:  # the policy repeats suggestions that it still needs
        cancel(s, s.now["step"] + s["layers"])
    total = hook(s)
    if not 0 <= total <= s["n_copies"]:
        fail(s, BAD_NAME, total)
        return 0
    for i in range(total):
        if not 0 <= s.suggested[i] < s["n_copies"]:
            fail(s, BAD_NAME, s.suggested[i])
            return 0
    return total


@fast
def record_prediction(s, hooks, y):
    """Record the prediction of copy y, and prefetch it if it is absent."""
    x, layer = expert_of(s, y), layer_of(s, y)
    precision = y - x * s["precisions"]
    count(s, PREDICTED, layer, 1)
    s.predictions[x] += 1
    resident = find(s, x, precision, RESIDENT)
    if resident != NONE:
        predict(s, hooks, resident)
    elif find(s, x, precision, IN_FLIGHT) == NONE and find(s, x, precision, QUEUED) == NONE:
        prefetch(s, y, s.now["step"] + (s["layers"] if s["next_pass"] == 1 else layer - s.now["layer"]))
