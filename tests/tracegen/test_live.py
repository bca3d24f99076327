"""Live runs: what the model computes under policies, what is measured beside it, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moereplay.policies.contract import PolicyError
from moereplay.policies.routing import prune
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.reference.counters import Counters, count_fidelity
from moereplay.simulator.source import Gate, Mixture, Pass
from moereplay.tracegen.decoding import Decoding, Stepper, continued, seed_of
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.quality import Score, score
from moereplay.tracegen.live.run import Live, LiveRequest, check_same_model, prepare, requests_of, run
from moereplay.tracegen.live.source import Emulation
from moereplay.traces import routers
from moereplay.traces.demand import union_of
from moereplay.traces.schema import memory_trace
from tests.kit.every import every
from tests.kit.live_runs import DTYPES, TO_RUN, live, loaded, modules, tokens
from tests.kit.tiny_models import FAMILIES

#: Nothing is changed: fetch runs what the router chose, and a lift of nothing lifts nothing.
UNCHANGING = ({}, {"routing": "cache_prior:lam=0", "prefetch": "top_k"}, {"miss": "split", "contract": "sequential"})


def logits_of(family: str, dtype: torch.dtype, settings: dict[str, Any] | None) -> list[Tensor]:
    """Return the logits of every pass of a request with 6 prompt and 4 new tokens; without settings, unmodified."""
    model, ids = loaded(family, dtype), tokens(10)
    stepper = Stepper(model.model)
    if settings is None:
        return [stepper.step(part) for part in _parts(ids)]
    config = configure(capacity="30%", **settings)
    ready = prepare(model, [LiveRequest(ids, 6)], config, modules=modules(family, dtype))
    emulation = Emulation(ready.modules, ready.plan, log=False, lookahead=ready.header.lookahead_depth)
    return [emulation.forward(partial(stepper.step, part), len(part), 0, len(part) > 1) for part in _parts(ids)]


def _parts(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[:6], *([token] for token in ids[6:])]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_policies_that_change_nothing_leave_every_bit_of_the_model_alone(family: str) -> None:
    for dtype, every_setting in zip(DTYPES, (UNCHANGING, UNCHANGING[1:2]), strict=True):
        alone = logits_of(family, dtype, None)
        for settings in every_setting:
            watched = logits_of(family, dtype, settings)
            assert all(torch.equal(*pair) for pair in zip(alone, watched, strict=True)), (dtype, settings)


# ---------------------------------------------------------------- what is executed


class Puppet:
    """Forces a model's gates, by hooks of its own, to say what a live run executed."""

    def __init__(self, family: str, run: Live, prunes: bool = False) -> None:
        """`prunes`: what was not executed was dropped by the routing policy, not at a miss."""
        self.modules, self.run, self._prunes = modules(family), run, prunes
        self.seen: list[list[np.ndarray]] = []

    def request(self, number: int) -> np.ndarray:
        """Router logits (T, L, E) of a request, pass by pass."""
        request, stepper = self.run.requests[number], Stepper(self.modules.model)
        ids, prompt = request.token_ids, request.prompt_length
        assert ids is not None
        parts = [ids[:prompt].tolist()] if prompt else []
        seen, at = [], 0
        for part in parts + [[token] for token in ids[prompt:].tolist()]:
            seen.append(self._pass(stepper, part, number, slice(at, at + len(part))))
            at += len(part)
        return np.concatenate(seen)

    def _pass(self, stepper: Stepper, part: Sequence[int], number: int, rows: slice) -> np.ndarray:
        seen: list[np.ndarray] = []

        def force(gate: torch.nn.Module, args: tuple, output: tuple) -> tuple:
            site = self.modules.sites[len(seen)]
            logits, weights, ids = output[site.index : site.index + 3]
            forced = self._mixture(
                number, rows, len(seen), logits.float().numpy(), weights.float().numpy(), ids.numpy()
            )
            seen.append(logits.float().numpy().copy())
            changed = list(output)
            changed[site.index + 1 : site.index + 3] = [
                torch.from_numpy(forced[1]).to(weights),
                torch.from_numpy(forced[0]).to(ids),
            ]
            return tuple(changed)

        handles = [site.gate.register_forward_hook(force) for site in self.modules.sites]
        try:
            stepper.step(part)
        finally:
            for handle in handles:
                handle.remove()
        return np.stack(seen, axis=1)

    def _mixture(
        self, number: int, rows: slice, layer: int, logits: np.ndarray, weights: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Apply the documented rule: new experts, or fewer by routing, reweight the token; otherwise dropped ones
        weigh 0 and the others stay."""
        ran = self.run.executed[number][rows, layer].astype(np.int64)
        out = np.zeros(ran.shape, np.float32)
        for t, row in enumerate(ran):
            own = {int(e): weight for e, weight in zip(ids[t], weights[t], strict=True)}
            if set(row) - set(own) - {-1} or (self._prunes and -1 in row):
                out[t] = routers.weigh(self.modules.geometry.router, logits[t], row)
            else:
                out[t] = [own.get(int(e), 0) for e in row]
            unused = [e for e in range(logits.shape[-1]) if e not in row]
            ran[t] = [e if e >= 0 else unused.pop() for e in row]  # weighs 0, so any expert that is not there will do
        return ran, out


CHANGING = (
    {"routing": "cache_prior:lam=1:top_j=1"},
    {"miss": "drop:keep=1"},
    {"miss": "substitute:tolerance=1"},
    {"miss": "substitute_band:alpha=.5"},
    {"routing": "prune:keep=1"},
    {"routing": "cache_prior:lam=1:top_j=0", "miss": "drop:keep=0", "contract": "sequential"},
)


def total(ran: Live) -> Score:
    assert ran.quality is not None
    return ran.quality.total


OTHERS = ("deepseek_v3", "gpt_oss", "qwen3_moe")


@pytest.mark.slow
@every("family, settings", [*product(["olmoe"], CHANGING), *zip(OTHERS * 2, CHANGING, strict=True)])
def test_the_model_runs_what_the_policies_decided(family: str, settings: dict[str, Any]) -> None:
    ran = live(family, **settings)
    assert any((each != request.chosen).any() for each, request in zip(ran.executed, ran.requests, strict=True))
    puppet = Puppet(family, ran, prunes="prune" in settings.get("routing", ""))
    for number, request in enumerate(ran.requests):
        assert request.logits is not None
        np.testing.assert_allclose(puppet.request(number), request.logits, atol=2e-4, rtol=1e-3)


def test_a_routing_policy_that_drops_without_saying_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # the model's own experts would run what has no id
    monkeypatch.setattr("moereplay.policies.routing.prune.POLICY", replace(prune.POLICY, drops=False))
    with pytest.raises(PolicyError, match=r"routing prune dropped an expert .*drops=True"):
        live("olmoe", routing="prune:keep=1")


@pytest.mark.slow
def test_rounded_experts_change_the_output_and_the_finest_do_so_least() -> None:
    scores = [total(live("olmoe", quality=True, miss=f"fetch:bits={bits}")) for bits in (32, 8, 4, 2)]
    assert scores[0].kl == 0
    assert 0 < scores[1].kl < scores[2].kl < scores[3].kl


def test_the_same_arguments_give_the_same_run() -> None:
    settings: dict[str, Any] = {"routing": "cache_prior:lam=.5", "miss": "drop"}
    one, other = (live("deepseek_v3", quality=True, **settings) for _ in range(2))
    assert one.result == other.result
    assert one.quality == other.quality
    assert one.trace().digest == other.trace().digest


def test_a_mixture_in_another_order_is_the_same_mixture() -> None:
    # a routing policy may rank the router's own experts anew; half of |w - w'| is then 0
    gate = Gate([[0, 1]], union_of([[0, 1]], [[75, 25]]), [[75, 25]], choice=[[2.0, 1.0, 0.0]])
    counters = Counters(1)
    here = Pass.of_slice(0, 0, 1, 1, 0)
    counters.begin_pass(0, here)
    nothing_to_weigh: Any = None
    mixture = Mixture(gate, gate.ids, [[1, 0]], {})
    count_fidelity(counters, nothing_to_weigh, here, 0, mixture)
    totals = counters.totals(0)
    assert [totals[name] for name in ("assignments_kept", "mass_kept", "variation")] == [2, 100, 0]


# ---------------------------------------------------------------- text that the model writes


@pytest.mark.parametrize(
    "decoding",
    [Decoding(max_new_tokens=9), Decoding(max_new_tokens=9, temperature=0.8, top_k=20, top_p=0.9)],
    ids=["greedy", "sampled"],
)
def test_under_policies_that_change_nothing_it_writes_what_generate_writes(decoding: Decoding) -> None:
    model, to_run = loaded("olmoe"), [LiveRequest(tokens(6, seed), 6) for seed in range(3)]
    ran = run(model, to_run, configure(capacity="30%", seed=4), decoding=decoding, quality=False)
    for number, (given, request) in enumerate(zip(to_run, ran.requests, strict=True)):
        written = continued(model.model, given.token_ids, decoding, seed_of(4, number))
        assert request.token_ids is not None
        assert request.token_ids.tolist() == [*given.token_ids, *written[:-1]]
        assert request.prompt_length == 6


def test_a_text_ends_where_the_model_ends_it() -> None:
    model, decoding = loaded("olmoe"), Decoding(max_new_tokens=9)
    written = continued(model.model, tokens(6), decoding, 0)
    third = written[2]
    model.model.generation_config.eos_token_id = third
    try:
        ran = run(model, [LiveRequest(tokens(6), 6)], configure(capacity="30%"), decoding=decoding)
    finally:
        model.model.generation_config.eos_token_id = None
    assert len(ran.requests[0].chosen) == 6 + written.index(third)


# ---------------------------------------------------------------- quality


def test_an_unmodified_model_agrees_with_itself_exactly() -> None:
    ran = live("qwen3_moe", quality=True)
    assert ran.quality is not None
    found = total(ran)
    assert found.nll == found.nll_base and found.kl == 0 and found.top1 == 1
    # every token but the first of each request is predicted
    assert [each.tokens for each in ran.quality.per_request] == [len(given.token_ids) - 1 for given in TO_RUN]


def test_perplexity_is_that_of_the_recorded_nll() -> None:
    # nll is kept in float32 and its first entry is 0: nothing predicts a request's first token
    ran = live("qwen3_moe", quality=True, routing="cache_prior:lam=1:top_j=0")
    assert ran.quality is not None
    recorded = [float(request.nll.astype(np.float64).sum()) for request in ran.requests]  # type: ignore[union-attr]
    assert [each.nll for each in ran.quality.per_request] == pytest.approx(recorded, rel=1e-6)
    assert ran.quality.total.perplexity == pytest.approx(np.exp(sum(recorded) / ran.quality.total.tokens))
    assert total(ran).kl > 0


def test_scores_are_those_worked_out_by_hand() -> None:
    # unmodified (1/2, 1/2, 0), modified (3/4, 1/4, 0); the token that both rule out adds nothing
    base, modified = torch.tensor([[0.5, 0.5, 0.0]] * 70).log(), torch.tensor([[0.75, 0.25, 0.0]] * 70).log()
    found = score(base, modified, torch.zeros(70, dtype=torch.long))
    kl = 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)
    assert (found.tokens, found.agreed) == (70, 70)
    assert [found.perplexity_base, found.perplexity, found.mean_kl] == pytest.approx([2, 4 / 3, kl], rel=1e-6)


def test_nothing_predicted_has_no_perplexity_and_an_impossible_token_the_largest() -> None:
    assert Score().row() == dict.fromkeys(Score.__dataclass_fields__, 0) | dict.fromkeys(
        ("perplexity_base", "perplexity", "mean_kl", "top1", "identical")
    )
    assert Score(tokens=1, nll=float("inf")).perplexity == pytest.approx(sys.float_info.max)


# ---------------------------------------------------------------- failure


class RareError(Exception):
    pass


@every(
    "where, kind",
    product(["Gatekeeper.suggest", "count_fidelity", "caller"], [RareError, KeyboardInterrupt]),
    apart=True,
)
def test_a_failure_on_either_side_ends_the_run_and_leaves_the_model_as_it_was(
    kind: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = logits_of("olmoe", torch.float32, None)

    def fail(*arguments: object, **options: object) -> None:
        raise kind("once")

    ready = prepare(loaded("olmoe"), TO_RUN, configure(capacity="30%", miss="drop", prefetch="top_k"))
    if where != "caller":
        monkeypatch.setattr(f"moereplay.simulator.reference.gate.{where}", fail)
    with pytest.raises(kind, match="once"):
        ready.run(progress=fail if where == "caller" else lambda tokens: None)
    monkeypatch.undo()
    assert all(torch.equal(*pair) for pair in zip(alone, logits_of("olmoe", torch.float32, None), strict=True))


@every(
    "settings, said",
    [
        ({"eviction": "belady"}, "eviction belady needs the future, which a live run does not know"),
        ({"prefetch": "oracle"}, "prefetch oracle needs the future, which a live run does not know"),
        ({"eviction": "static"}, "eviction static needs the future, which a live run does not know"),
        ({"eviction": "pinned:profile=given"}, "requires --profile FILE"),
        (
            {"lookahead": "shuffled_tokens"},
            "--lookahead shuffled_tokens cannot be combined with a live run",
        ),
        ({"draft": "2"}, "--draft 2:.* cannot be combined with a live run, which has no drafts"),
        ({"passes": "token"}, "--passes token cannot be combined with a live run"),
        ({"capacity": "1experts", "scope": "per_layer"}, "1experts"),
    ],
)
def test_configurations_that_cannot_run_live_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((PolicyError, ConfigError), match=said):
        prepare(loaded("olmoe"), TO_RUN, configure(**settings))


@every(
    "to_run, said",
    [
        ([], "no request .*--limit"),
        ([LiveRequest((), 0)], "request 0: 0 prompt tokens of 0"),
        ([TO_RUN[0], LiveRequest((1, 2), 3)], "request 1: 3 prompt tokens of 2"),
        ([LiveRequest(tokens(257), 4)], "257 tokens exceed the model's context of 256"),
        ([LiveRequest((1, 96), 1)], "request 0 has token 96; the vocabulary has 96"),
    ],
)
def test_requests_that_the_model_cannot_run_are_refused(to_run: list[LiveRequest], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        prepare(loaded("olmoe"), to_run, configure())


def test_requests_come_back_from_the_trace_of_a_run() -> None:
    trace = live("olmoe").trace()
    assert requests_of(trace) == list(TO_RUN)
    assert requests_of(trace, 2) == list(TO_RUN[:2])


def test_traces_without_text_or_of_another_model_are_refused() -> None:
    ran = live("olmoe")
    bare = [type(request)(request.chosen, request.prompt_length) for request in ran.requests]
    with pytest.raises(RecordError, match="no token ids, so its text cannot be run; record one"):
        requests_of(memory_trace(ran.header, bare))
    trace = ran.trace()
    check_same_model(trace, loaded("olmoe"), modules("olmoe"))
    with pytest.raises(RecordError, match="another model: experts 16, tiny-mixtral has 8"):
        check_same_model(trace, loaded("mixtral"), modules("mixtral"))
    provenance = ran.header.provenance.model_copy(update={"source_sha256": "sha256:other"})
    other = memory_trace(ran.header.model_copy(update={"provenance": provenance}), list(ran.requests))
    with pytest.raises(RecordError, match="recorded from other weights"):
        check_same_model(other, loaded("olmoe"), modules("olmoe"))


def test_a_live_result_says_what_it_is() -> None:
    about = live("olmoe", miss="drop").result.about
    assert about["label"] == "LIVE, emulated"
    assert about["trace"].startswith("live-") and about["model"] == "tiny-olmoe"
    other = run(loaded("olmoe"), TO_RUN[:1], configure(capacity="30%", miss="drop"), quality=False)
    assert other.result.about["identity"] != about["identity"]
