"""Texts that a model reads under policies: alone as a live run reads them, together as alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moereplay.simulator.config import Origin, configure
from moereplay.simulator.replay import Plan, plan_for, replay
from moereplay.tracegen.decoding import Decoding, Sampler, Stepper, continued
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.requests import CAPABILITIES
from moereplay.tracegen.live.run import LiveRequest, run
from moereplay.tracegen.quality.session import Session, Subject, Tally, alone_because
from moereplay.tracegen.quality.texts import Continued, TeacherForced
from moereplay.traces.schema import Request, memory_trace
from tests.kit.every import every
from tests.kit.live_runs import loaded, modules, tokens
from tests.kit.tiny_models import FAMILIES

#: Policies that change what is run, by what is resident; with a random eviction, and with a prefetch policy.
CHANGING = (
    {"routing": "cache_prior:lam=.5", "eviction": "random"},
    {"routing": "max_rank", "prefetch": "top_k", "eviction": "least_stale"},
    {"miss": "drop", "contract": "sequential"},
    {"miss": "substitute", "eviction": "lfu"},
)


def plan(family: str, **settings: Any) -> Plan:
    geometry = modules(family).geometry
    origin = Origin(geometry, CAPABILITIES, geometry.layers, "live-tiny", family, live=True)
    return plan_for(origin, configure(**{"capacity": "40%", "reset": "request", **settings}))


def given() -> list[TeacherForced]:
    """Prompts and continuations of several lengths; the last has one token before all others."""
    return [
        TeacherForced(tokens(10, 1), 6, 6),
        TeacherForced(tokens(9, 2), 8, 8),
        TeacherForced(tokens(12, 3), 2, 2),
        TeacherForced(tokens(4, 4), 1, 1),
    ]


def read(
    family: str, ready: Plan | None, batch: int = 1, compare: bool = False
) -> tuple[list[TeacherForced], Tally, list[Request]]:
    texts, kept = given(), list[Request]()
    session = Session(Subject(loaded(family), modules(family), ready, 2), batch, keep=kept.append, compare=compare)
    session.read(texts)
    return texts, session.close(), kept


def logits_of(family: str, text: TeacherForced) -> Tensor:
    """After each token but the last, from the model's own passes: the prompt, then token by token."""
    stepper = Stepper(loaded(family).model)
    ids = text.ids
    return torch.cat([stepper.step(ids[: text.prompt]), *(stepper.step([each]) for each in ids[text.prompt : -1])])


def chances(logits: Tensor, text: TeacherForced) -> tuple[float, bool]:
    """Log-likelihood of the scored tokens, and whether each is the likeliest."""
    rows, wanted = logits[text.scored - 1 :].log_softmax(-1), torch.tensor(text.ids[text.scored :])
    return float(rows.gather(-1, wanted[:, None]).sum()), bool((rows.argmax(-1) == wanted).all())


def assert_scored_by_what_the_model_says(texts: list[TeacherForced], family: str) -> None:
    for text in texts:
        logprob, greedy = chances(logits_of(family, text), text)
        assert text.logprob == pytest.approx(logprob, rel=1e-6)
        assert text.greedy == greedy
        assert text.read == list(text.ids[:-1])


def test_a_text_that_is_read_in_passes_is_scored_as_in_one() -> None:
    texts, _, _ = read("olmoe", None)
    for text in texts:
        with torch.inference_mode():
            logits = loaded("olmoe").model(input_ids=torch.tensor([text.ids])).logits[0, :-1]
        assert text.logprob == pytest.approx(chances(logits, text)[0], abs=1e-4)


def exact(counters: dict[str, Any]) -> dict[str, Any]:
    """Without sums of gate weights: padded passes round them otherwise."""
    return {name: value for name, value in counters.items() if not name.startswith(("mass", "variation"))}


def same(some: np.ndarray | None, others: np.ndarray | None) -> bool:
    return some is not None and others is not None and np.array_equal(some, others)


def counts(tally: Tally) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return exact(tally.totals), [exact(row) for row in tally.requests]


@pytest.mark.slow
@every("family, settings", [*product(["olmoe"], CHANGING), ("deepseek_v3", CHANGING[0]), ("gpt_oss", CHANGING[3])])
def test_texts_read_together_are_read_as_alone(family: str, settings: dict[str, Any]) -> None:
    alone, apart, rows = read(family, plan(family, **settings), compare=True)
    together, side, others = read(family, plan(family, **settings), batch=3, compare=True)
    assert counts(apart) == counts(side)
    assert [text.logprob for text in alone] == pytest.approx([text.logprob for text in together], abs=1e-4)
    assert [text.compared.kl for text in alone] == pytest.approx([text.compared.kl for text in together], abs=1e-5)
    assert all(np.array_equal(one.chosen, other.chosen) for one, other in zip(rows, others, strict=True))
    assert sum(text.compared.kl for text in alone) > 1e-6, "these policies change something"


#: Padding reaches MiniMax's linear attention, and the tokens that DeepSeek-V3.2's indexer picks.
UNPADDED = ("deepseek_v32", "minimax")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_is_scored_by_what_the_model_says_of_its_tokens_and_padding_changes_none(family: str) -> None:
    """A model in which it would reads one by one, and this is said."""
    alone, _, rows = read(family, None)
    assert_scored_by_what_the_model_says(alone, family)
    together, _, others = read(family, None, batch=4)
    assert [text.logprob for text in alone] == pytest.approx([text.logprob for text in together], abs=2e-4)
    assert all(np.array_equal(one.chosen, other.chosen) for one, other in zip(rows, others, strict=True))
    why = alone_because(Subject(loaded(family), modules(family), None, 0))
    assert (why is not None and "padded" in why) == (family in UNPADDED)


def test_policies_that_leave_the_output_alone_leave_every_bit_of_it_alone() -> None:
    unmodified, _, _ = read("olmoe", None)
    under, _, _ = read("olmoe", plan("olmoe", eviction="least_stale", prefetch="top_k"))
    assert [text.logprob for text in under] == [text.logprob for text in unmodified]


@pytest.mark.slow
@every("settings", CHANGING)
def test_a_cache_that_goes_on_is_that_of_a_live_run(settings: dict[str, Any]) -> None:
    """The same texts, without their last tokens, through `tracegen.live`: the same counters, choices, logits."""
    config = plan("olmoe", reset="never", **settings).config
    to_run = [LiveRequest(tuple(text.ids[:-1]), text.prompt) for text in given()]
    live = run(loaded("olmoe"), to_run, config, modules=modules("olmoe"))
    texts, tally, rows = read("olmoe", plan("olmoe", reset="never", **settings), batch=3, compare=True)
    assert tally.totals == live.result.totals
    assert tally.requests == live.result.per_request
    assert all(same(one.logits, other.logits) for one, other in zip(rows, live.requests, strict=True))
    assert live.quality is not None
    assert all(text.compared.tokens == len(text.ids) - text.scored for text in texts)


def test_each_text_of_a_reset_cache_is_a_live_run_of_its_own() -> None:
    ready = plan("olmoe", routing="cache_prior", eviction="random")
    _, tally, rows = read("olmoe", ready, batch=2)
    runs = [
        run(loaded("olmoe"), [LiveRequest(tuple(text.ids[:-1]), text.prompt)], ready.config, modules=modules("olmoe"))
        for text in given()
    ]
    assert tally.totals["misses"] == sum(live.result.totals["misses"] for live in runs)
    assert [exact(row) for row in tally.requests] == [exact(row) for live in runs for row in live.result.per_request]
    assert all(np.array_equal(one.chosen, live.requests[0].chosen) for one, live in zip(rows, runs, strict=True))


def test_what_the_unmodified_model_did_is_a_trace() -> None:
    """Its replay counts what a live run under policies that change nothing counts."""
    ready = plan("olmoe", reset="never", eviction="lru")
    _, _, rows = read("olmoe", None, batch=3)
    live = run(loaded("olmoe"), [LiveRequest(tuple(t.ids[:-1]), t.prompt) for t in given()], ready.config)
    header = live.header.model_copy(update={"lookahead_depth": 2})
    trace = memory_trace(header, rows, live.router_bias)
    assert exact(replay(trace, ready.config, engine="reference").totals) == exact(live.result.totals)


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_a_continued_text_is_what_generate_gives(temperature: float) -> None:
    prompt, decoding = tokens(7, 5), Decoding(max_new_tokens=9, temperature=temperature)
    model = loaded("olmoe").model
    expected = continued(model, prompt, decoding, seed=11)
    text = Continued(prompt, 9, lambda added: False, Sampler(decoding, 11, torch.device("cpu")))
    Session(Subject(loaded("olmoe"), modules("olmoe"), None, 0)).read([text])
    assert text.added == expected
    stopped = Continued(prompt, 9, lambda added: len(added) == 3, Sampler(decoding, 11, torch.device("cpu")))
    Session(Subject(loaded("olmoe"), modules("olmoe"), None, 0)).read([stopped])
    assert stopped.added == expected[:3] and stopped.read == [*prompt, *expected[:2]]


def test_what_keeps_texts_from_being_read_together_is_said() -> None:
    def why(**settings: str) -> str | None:
        return alone_because(Subject(loaded("olmoe"), modules("olmoe"), plan("olmoe", **settings), 0))

    assert why() is None
    assert why(reset="never") == "with reset never the cache goes on from one to the next"
    rounded = why(miss="lowest_bit:bits=8/4")
    assert rounded is not None and "rounds an expert for all that run it" in rounded


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    model = loaded("olmoe")
    broken = replace_head(model, float("nan"))
    with pytest.raises(RecordError, match="logits are not numbers"):
        Session(Subject(broken, modules("olmoe"), None, 0)).read([replace(given()[0])])


def replace_head(model: Any, factor: float) -> Any:
    """Return the model with multiplied logits."""

    class Multiplied(torch.nn.Module):
        config = model.model.config

        def get_input_embeddings(self) -> Any:
            return model.model.get_input_embeddings()

        def forward(self, **given: Any) -> Any:
            seen = model.model(**given)
            seen.logits = seen.logits * factor
            return seen

    return model._replace(model=Multiplied())
