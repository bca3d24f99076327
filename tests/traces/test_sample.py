"""A sample of a trace: whole requests, evenly spaced, or the trace itself."""

import numpy as np

from moereplay.traces.schema import Geometry
from moereplay.traces.selection import accesses_of, sampled
from moereplay.traces.synthetic import Synthetic, synthesise

#: Ten requests of 6 tokens, each of which chooses 2 experts in 3 layers: 36 accesses a request.
WHOLE = synthesise(
    Synthetic.model_validate(
        {
            "kind": "markov",
            "geometry": Geometry(layers=3, experts=8, k=2, expert_bytes=(1,) * 3),
            "requests": 10,
            "prompt_tokens": 2,
            "decode_tokens": 4,
            "reuse": 0.5,
            "recall": (0.8,),
        }
    )
)


def test_every_nth_request_is_taken_whole():
    assert accesses_of(WHOLE) == 360
    few = sampled(WHOLE, 150)
    assert few.requests == 4 and accesses_of(few) == 144
    for at, of in enumerate((0, 3, 6, 9)):
        ours, theirs = few.request(at), WHOLE.request(of)
        assert ours.prompt_length == theirs.prompt_length == 2
        assert np.array_equal(ours.chosen, theirs.chosen) and np.array_equal(ours.lookahead[0], theirs.lookahead[0])
    assert few.capabilities == WHOLE.capabilities


def test_at_least_one_request_and_at_most_all_of_them():
    assert sampled(WHOLE, 1).requests == 1
    assert sampled(WHOLE, 360) is WHOLE
    one = sampled(WHOLE, 1)
    assert sampled(one, 1) is one, "a request is not cut"
