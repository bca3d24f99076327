"""A recommendation: the memory is divided as stated, and the search finds what trying everything finds."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.analysis.answer import document, lines
from moereplay.results.remarks import Ranked
from moereplay.simulator.capacity import RUNTIME, Memory, divided
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.recommend.runner import QUICK, THOROUGH, Budget, Runner, fastest_first
from moereplay.sweeps.recommend.search import WORTH, Answer, Question, judged, most_replays, search
from moereplay.sweeps.recommend.searched import Searched
from moereplay.sweeps.recommend.space import (
    ANY,
    EMPTY,
    LAYERS,
    STATIC,
    USED,
    Space,
    bits_of,
    can_replay,
    compulsory_limit,
    engines_of,
    filling,
    lossy_of,
    space_of,
    start_of,
    started,
)
from moereplay.traces.schema import Geometry, Header, Request, Trace, memory_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every

SIZE = 1_000_000
GEOMETRY = Geometry(layers=3, experts=8, k=2, expert_bytes=(SIZE,) * 3, dense_params=1_000, head_params=500, kv_bytes=7)


def trace_of(
    seed: int = 0,
    reuse: float = 0.5,
    geometry: Geometry = GEOMETRY,
    recall: tuple[float, ...] = (0.8,),
    requests: int = 3,
) -> Trace:
    kinds = {
        "requests": requests,
        "prompt_tokens": 2,
        "decode_tokens": 20,
        "reuse": reuse,
        "recall": recall,
        "seed": seed,
    }
    return synthesise(Synthetic.model_validate({"kind": "markov", "geometry": geometry, **kinds}))


def question_of(trace: Trace, experts: int, **more: Any) -> Question:
    base = {name: more.pop(name) for name in ("platform", "scope") if name in more}
    base = {"platform": "a100-5gbps"} | base
    return Question(trace, Memory(experts * SIZE + 10, 4, 3, 3), base, **more)


def told(question: Question, answer: Answer) -> Searched:
    return Searched(question, answer, "here.zarr", question.trace, most_replays(question))


@pytest.fixture(scope="module")
def found() -> Answer:
    """A search with the memory of six experts and the trace without changes."""
    return search(question_of(trace_of(), 6))


def test_the_memory_is_divided():
    found = divided(trace_of(), 10**9, context=100)
    assert found == Memory(10**9, 2 * (3 * 1_000 + 500), 700, RUNTIME)
    assert found.cache_bytes == 10**9 - 7_000 - 700 - RUNTIME
    assert divided(trace_of(), 20_000_000, 0, "1MB").cache_bytes == 19_000_000 - 7_000


def test_a_memory_that_holds_no_expert_says_what_is_missing():
    with pytest.raises(ConfigError, match=r"an expert of 1,000,000 bytes: 1\.01 MB are missing.*--dense-bits"):
        divided(trace_of(), 500_000_000, 0)


def test_the_space_is_what_can_be_used_without_changing_the_output():
    trace = trace_of()
    space = space_of(trace, {"platform": "rtx4090-pcie4", "capacity": "50%"})
    assert {"lru", "least_stale", "arc"} <= set(space.eviction) and not {"belady", "static"} & set(space.eviction)
    assert {"none", "top_k"} <= set(space.prefetch) and "oracle" not in space.prefetch
    assert "side_buffer" not in space.prefetch and "side_buffer:count=inside" in space.prefetch, "no memory beside"
    assert {"fetch", "cpu", "split:q=.25"} <= set(space.miss) and not {"drop", "cascade"} & set(space.miss)
    assert space_of(trace, {"platform": "phone-ufs4", "capacity": "50%"}).miss == ("fetch",), "it has no CPU beside"
    assert space.scope == ("global", "per_layer")
    assert space.combinations == 2 * len(space.eviction) * len(space.prefetch) * len(space.miss)


def test_lossy_sets_fetch_no_more_bits_than_are_stored():
    found = [bits_of({"miss": config.miss}) for config in lossy_of(trace_of(), {"capacity": "50%"})]
    assert sorted(filter(None, found)) == [2, 3, 4, 8]
    four = trace_of(geometry=GEOMETRY.model_copy(update={"expert_bits": 4.0}))
    assert sorted(filter(None, (bits_of({"miss": each.miss}) for each in lossy_of(four, {})))) == [2, 3]


@pytest.mark.long
@pytest.mark.parametrize("machine", ("phone-ufs4", pytest.param("rtx4090-pcie4", marks=pytest.mark.longest)))
@pytest.mark.parametrize(("seed", "reuse", "experts"), ((1, 0.4, 7), pytest.param(2, 0.8, 12, marks=pytest.mark.long)))
def test_the_search_finds_99_percent_of_what_trying_everything_finds(machine, seed, reuse, experts):
    trace = trace_of(seed, reuse)
    question = question_of(trace, experts, platform=machine)
    answer = search(question)
    everything = Runner(trace).tried(configs(question, answer.space))
    assert answer.best.tokens_per_s >= 0.99 * max(each.tokens_per_s for each in everything)
    assert answer.best.config in [each.config for each in everything] or answer.best.config.eviction == STATIC
    assert answer.replayed <= most_replays(question)


def configs(question: Question, space: Space) -> list[ReplayConfig]:
    base = question.at(question.memory.cache_bytes)
    every = (
        configure(**base | dict(zip(space.axes(), values, strict=True)))
        for values in itertools.product(*space.axes().values())
    )
    full = [started(question.trace, config, filling(question.trace, config.schedule)) for config in every]
    return [config for config in full if config is not None and can_replay(question.trace, config)]


@pytest.mark.slow
def test_the_curve_over_memory_rises_in_memory_and_holds_the_best(found):
    sizes = [each.result.about["capacity_bytes"] for each in found.curve]
    assert sizes == sorted(sizes) and len(sizes) == len(THOROUGH.shares)
    assert found.best in found.curve


@pytest.mark.slow
def test_the_smallest_memory_reaches_the_target_and_none_reaches_the_impossible():
    def reaching(target: float) -> Answer:
        return search(question_of(trace_of(), 6, scope="global", target_tokens_per_s=target, pace=QUICK))

    answer = reaching(1.0)
    assert answer.smallest is not None and answer.smallest.result.about["capacity_bytes"] < 2 * SIZE
    fastest = answer.curve[-1].tokens_per_s
    answer = reaching(fastest * 0.98)
    assert answer.smallest is not None and answer.smallest.tokens_per_s >= fastest * 0.98
    assert reaching(1e9).smallest is None


@pytest.mark.slow
def test_without_look_ahead_the_least_recall_that_would_pay_is_given():
    """Behind a slow link, where nothing that the trace can feed gains; replayed again at that recall and below."""
    trace = trace_of(reuse=0.31, geometry=GEOMETRY.model_copy(update={"experts": 32}), recall=())
    question = question_of(trace, 64, platform="phone-ufs4")
    answer = search(question)
    assert "top_k" not in answer.space.prefetch and answer.best.config.prefetch == "none"
    pays = answer.recall_that_pays
    assert pays is not None and 0.1 < pays < 1
    assert gain(question, answer, round(pays - 0.1, 1)) <= WORTH < gain(question, answer, pays)


def gain(question: Question, answer: Answer, recall: float) -> float:
    """The most that any lossless eviction gains by a predictor of that recall, over the best set."""
    base = {**question.at(question.memory.cache_bytes), "prefetch": f"oracle:recall={recall}:precision={recall}"}
    caches = itertools.product(answer.space.eviction, answer.space.scope)
    cold = (configure(**base, eviction=name, scope=scope) for name, scope in caches)
    full = (started(question.trace, config, filling(question.trace, config.schedule)) for config in cold)
    tried = Runner(question.trace).tried(config for config in full if config is not None)
    return max(each.tokens_per_s for each in tried) / answer.best.tokens_per_s - 1


@pytest.mark.slow
def test_the_document_has_what_a_program_needs_and_the_sentences_say_it(monkeypatch):
    question = question_of(trace_of(requests=6), 6, target_tokens_per_s=1.0, pace=QUICK)  # fewer have no interval
    answer = search(question)
    made_up = told(question, answer)
    said = json.loads(json.dumps(document(made_up)))
    assert set(said["memory"]) == {*Memory._fields, "cache_bytes"}
    assert set(said["searched"]) == {"axes", "combinations", "replayed", "screened_on", "judged_on", "at_most", "cut"}
    assert said["best"]["interval"] is None and "WITH SYNTHETIC ROUTING: markov, reuse 0.5" in "\n".join(lines(made_up))
    monkeypatch.setattr("moereplay.sweeps.recommend.searched.synthetic", lambda provenance: "")
    said = json.loads(json.dumps(document(made_up)))
    assert said["best"]["interval"]["low"] <= said["best"]["tokens_per_s"] <= said["best"]["interval"]["high"]
    text = "\n".join(lines(made_up, verbose=True))
    for word in (
        "95% interval over",
        "VRAM",
        "second:",
        "prefetch ",
        "target:",
        "searched:",
        "again: moereplay replay",
    ):
        assert word in text
    assert len(list(lines(made_up))) <= 25


@pytest.mark.slow
def test_the_document_has_the_peak_where_the_platform_states_its_reserve(found):
    question = question_of(trace_of(), 6, platform=f"a100-5gbps:memory_bytes={6 * SIZE + 110}:reserve_bytes=100")
    said = document(told(question, found))
    peak = {name: said["memory"][name] for name in ("peak_bytes", "reserve_bytes", "machine_bytes", "will_page")}
    assert list(peak.values()) == [6 * SIZE + 110, 100, 6 * SIZE + 110, False]
    assert [point["will_page"] for point in said["memory_curve"]] == [
        point["memory_bytes"] > 6 * SIZE + 10 for point in said["memory_curve"]
    ]


@pytest.mark.slow
def test_an_order_that_decisions_would_turn_is_a_warning_unless_the_platform_charges_them(found, monkeypatch):
    seen = []

    def turned(first: Ranked, second: Ranked, layers: int) -> str:
        seen.append((first, second, layers))
        return f"{second.name} would be faster"

    monkeypatch.setattr("moereplay.sweeps.recommend.searched.turned", turned)

    def warnings(platform: str) -> list[str]:
        question = question_of(trace_of(), 6, platform=platform)
        return [line for line in told(question, found).warnings if "faster" in line]

    assert warnings("a100-5gbps")
    first, second, layers = seen[0]
    assert layers == 3 and first.tokens_per_s >= second.tokens_per_s and first.name != second.name
    assert warnings("a100-5gbps:decisions.by_policy.fetch=1") == []


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> dict:
    search = ("--budget", "none", "--out", tmp_path_factory.mktemp("asked") / "lists", "--json")
    ended = moereplay("recommend", "miniature", "--platform", "phone-ufs4", "--memory", "510MB", *search)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@every("which", ("best", "best_known"))
def test_a_printed_command_gives_its_figure_where_recommend_was_typed(asked, which):
    """The lists are read where --out wrote them; sets that differ in their lists do not share a file."""
    words = asked[which]["command"].split()
    assert words[:3] == ["moereplay", "replay", "miniature"]
    ended = moereplay(*words[1:], "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["about"]["identity"] == asked[which]["identity"]
    assert found["metrics"]["tokens_per_s"] == pytest.approx(asked[which]["tokens_per_s"], rel=1e-12)


def test_refusals_are_one_line_and_come_first(tmp_path: Path):
    for arguments, said in (
        ((), "missing memory: pass exactly one of --memory 4GB and --vram"),
        (("--memory", "1GB", "--vram", "1GB"), "missing memory: pass exactly one of --memory 4GB and --vram"),
        (("--vram", "1GB", "--ram", "1MB"), "invalid --ram 1MB: expected at least"),
        (("--memory", "1MB"), "are missing"),
        (("--memory", "-3GB"), "invalid --memory '-3GB'"),
    ):
        ended = moereplay("recommend", "miniature", "--platform", "a100-5gbps", *arguments)
        assert (ended.returncode, ended.stdout) == (2, "") and said in unfolded(ended.stderr), ended.stderr


@pytest.mark.slow
def test_a_long_trace_is_searched_on_some_requests_and_answered_on_all(monkeypatch):
    """14 of 40 requests; whatever is named has the figure of a replay of all of them."""
    kinds = {"requests": 40, "prompt_tokens": 2, "decode_tokens": 10, "reuse": 0.5, "recall": (0.8,)}
    trace = synthesise(Synthetic.model_validate({"kind": "markov", "geometry": GEOMETRY, **kinds}))
    monkeypatch.setattr("moereplay.sweeps.recommend.search.SCREENED", 1_000)
    question = question_of(trace, 7, platform="phone-ufs4", scope="global")
    answer = search(question)
    assert answer.screened_on == 14
    whole = Runner(trace)
    for named in (answer.best, answer.second, answer.without_prefetch, *answer.curve, *answer.lossy):
        assert named is not None and whole.tried([named.config])[0].tokens_per_s == named.tokens_per_s
    everything = whole.tried(configs(question, answer.space))
    assert answer.best.tokens_per_s >= 0.98 * max(each.tokens_per_s for each in everything)


@pytest.mark.slow
def test_a_quick_search_is_near_the_best_of_all_sets():
    """Ranked on 300 accesses of two requests, judged on 1,800 of 2,640; every set is then replayed on all."""
    kinds = {"requests": 20, "prompt_tokens": 2, "decode_tokens": 20, "reuse": 0.5, "recall": (0.8,)}
    trace = synthesise(Synthetic.model_validate({"kind": "markov", "geometry": GEOMETRY, **kinds}))
    asked = replace(question_of(trace, 7, platform="phone-ufs4"), pace=replace(QUICK, judged=1_800, screened=300))
    question = judged(asked)
    answer = search(question)
    assert question.trace.tokens * 6 <= 1_900 and answer.screened_on == 2
    assert answer.replayed < answer.space.combinations
    said = document(replace(told(question, answer), whole=trace))
    assert said["trace"]["digest"] == trace.digest and said["searched"]["judged_on"]["of_tokens"] == trace.tokens
    assert any("--thorough" in line for line in lines(replace(told(question, answer), whole=trace)))
    whole = Runner(trace)
    best = max(each.tokens_per_s for each in whole.tried(configs(asked, answer.space)))
    assert whole.tried([answer.best.config])[0].tokens_per_s >= 0.95 * best


def test_where_every_expert_fits_no_policy_is_searched():
    answer = search(question_of(trace_of(), 100, platform="rtx4090-pcie4"))
    assert answer.space.combinations == 1 and answer.second is None and answer.recall_that_pays is None
    said = document(told(question_of(trace_of(), 100), answer))
    assert said["all_fit"] and said["flags"]["slots"] == 24, "no more than there are"


@pytest.mark.long
def test_main_memory_is_the_tier_above_a_disk(tmp_path: Path):
    """`--ram` says how large it is, and is no longer held to hold every expert."""
    tiers = '[[tiers]]\nname = "DRAM"\ncapacity = "64GiB"\nbytes_per_s = 7e9\nlatency_ns = 80_000\n'
    machine = tmp_path / "three.toml"
    machine.write_text(f'name = "three"\nbase = "rtx4090-pcie4"\nslow_tier = "NVMe"\n{tiers}')
    given = ("--platform", str(machine), "--vram", "510MB", "--ram", "12MB", "--passes", "token", "--json")
    ended = moereplay("recommend", "miniature", *given)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["platform"].endswith("three.toml:tiers.0.capacity=12582912B")


def test_starts_fill_the_cache_with_whole_layers_or_with_what_was_used_first():
    trace = trace_of()
    config = configure(capacity=f"{18 * SIZE}B")
    layers, used, some = (started(trace, config, start) for start in (LAYERS, USED, ANY))
    assert layers is not None and used is not None and some is not None
    assert set(layers.warm) == {(layer, expert) for layer in (1, 2) for expert in range(8)}
    assert start_of(trace, layers) == LAYERS
    assert len(used.warm) == len(some.warm) == 18 and set(used.warm) != set(some.warm)
    assert started(trace, configure(capacity=f"{7 * SIZE}B"), LAYERS) is None, "no layer fits"
    cold = started(trace, used, EMPTY)
    assert cold is not None and cold == config and start_of(trace, cold) == EMPTY
    pooled = started(trace, configure(capacity=f"{18 * SIZE}B", scope="per_layer"), USED)
    assert pooled is not None and len(pooled.warm) == 18 and can_replay(trace, pooled)


@pytest.mark.slow
def test_a_short_trace_makes_no_profile_that_knows_what_is_to_come():
    """Tokens that share no expert: filled by chance, a cache of half the experts hits half, not all."""
    geometry = GEOMETRY.model_copy(update={"experts": 64, "expert_bytes": (SIZE, SIZE, 4 * SIZE)})
    chosen = np.arange(2 * 20).reshape(20, 1, 2).repeat(3, axis=1)
    trace = memory_trace(Header(geometry=geometry), [Request(chosen.astype(np.int16), 0)])
    assert compulsory_limit(trace, "token") == 0 and filling(trace, "token") == ANY
    question = Question(trace, Memory(3 * 64 * SIZE, 0, 0, 0), {"platform": "rtx4090-pcie4", "passes": "token"})
    answer = search(question)
    assert 0.3 < answer.best.hit_rate < 0.7
    said = told(question, answer)
    assert any("makes no profile" in each for each in said.warnings) and said.lossy == ()


@pytest.mark.long
def test_more_memory_buys_what_preloaded_layers_give_however_short_the_trace():
    """Three tokens of 32 experts a layer: from an empty cache nearly every use is the first one."""
    geometry = GEOMETRY.model_copy(update={"experts": 32})
    kinds = {"requests": 1, "prompt_tokens": 0, "decode_tokens": 3, "geometry": geometry, "reuse": 0.1, "seed": 0}
    trace = synthesise(Synthetic.model_validate({"kind": "markov", **kinds}))
    assert compulsory_limit(trace, "recorded") < 0.4
    speeds = []
    for experts in (33, 65):
        question = question_of(trace, experts, platform="rtx4090-pcie4")
        answer = search(question)
        base = question.at(question.memory.cache_bytes)
        placed = started(trace, configure(**base, eviction=STATIC, miss="cpu"), LAYERS)
        assert placed is not None
        assert answer.best.tokens_per_s >= Runner(trace).tried([placed])[0].tokens_per_s
        assert answer.known is not None and answer.known.tokens_per_s <= answer.best.tokens_per_s
        warnings = told(question, answer).warnings
        assert any("short trace: a cache that begins empty hits at most" in each for each in warnings)
        speeds.append(answer.best.tokens_per_s)
    assert speeds[1] > speeds[0]


@every("budget", (Budget(interrupted=lambda: True), Budget(seconds=0.0), Budget(accesses=0)))
def test_a_search_that_may_not_go_on_answers_with_what_it_has(budget):
    question = question_of(trace_of(), 7, target_tokens_per_s=1e9)
    answer = search(question, budget=budget)
    assert answer.cut and 1 <= answer.replayed < 5 and answer.best.tokens_per_s > 0
    said = told(question, answer)
    assert json.loads(json.dumps(document(said)))["prefetch"]["pays"] is None
    text = "\n".join(lines(said))
    assert f"ended early, of at most {most_replays(question):,}: --budget none tries all" in text
    assert "prefetch may pay or not: the search ended before" in text and "1,000,000,000 tokens/s: not known" in text


def test_work_cuts_a_search_at_the_same_replay_on_every_machine(monkeypatch):
    """The trace has 396 accesses: 4,000 are 10 replays. Neither workers nor a clock that leaps an hour change any."""
    question = question_of(trace_of(), 7, platform="phone-ufs4")

    def searched(workers: int) -> dict[str, Any]:
        of = told(question, search(question, workers, budget=Budget(accesses=4_000)))
        return document(of) | {"lines": list(lines(of, verbose=True))}

    before = searched(1)
    assert before["searched"]["cut"] and 2 <= before["searched"]["replayed"] <= 10 < most_replays(question)
    clock = itertools.count(step=3600.0)
    monkeypatch.setattr("moereplay.sweeps.recommend.runner.time.monotonic", lambda: next(clock))
    assert json.dumps(searched(3)) == json.dumps(before)


def test_sets_of_equal_speed_keep_the_order_in_which_they_are_tried():
    """Where every expert fits, nothing is evicted."""
    sets = [
        configure(platform="phone-ufs4", capacity=f"{24 * SIZE}B", eviction=name) for name in ("lru", "fifo", "lfu")
    ]
    for configs in (sets, sets[::-1]):
        for workers in (1, 3):
            ranking = fastest_first(Runner(trace_of(), workers).tried(configs))
            assert [each.config for each in ranking] == configs and len({each.tokens_per_s for each in ranking}) == 1


def test_progress_and_answer_count_the_same_replays():
    for experts in (7, 100):
        question = question_of(trace_of(), experts, scope="global", pace=QUICK)
        seen: list[int] = []
        answer = search(question, advance=seen.append)
        assert sum(seen) == answer.replayed <= most_replays(question)


def test_engines_are_those_that_run_the_model_on_such_a_machine():
    def names(platform: str, model: str = "m", start: str = USED, **policies: str) -> list[str]:
        return engines_of(configure(platform=platform, capacity="50%", **policies), start, model)

    cache = {"eviction": "lru", "miss": "fetch"}
    assert names("rtx4090-pcie4", **cache) == ["preset freetoken"]
    assert names("rtx4090-pcie4", "qwen3.8-flash-next", **cache) == ["preset freetoken", "preset crow"]
    assert names("phone-ufs4", **cache) == ["preset bigmoeonedge"]
    uploads = {"eviction": "lru", "prefetch": "missed", "miss": "cpu", "scope": "per_layer"}
    assert names("rtx4090-pcie4", **uploads) == ["llama.cpp-pr-27861 --moe-expert-cache", "neurall --moe-expert-cache"]
    layers = names("rtx4090-pcie4", start=LAYERS, eviction=STATIC, miss="cpu")
    assert layers == ["llama.cpp --n-cpu-moe", "ik_llama.cpp --n-cpu-moe"]


@pytest.mark.slow
def test_a_slow_machine_gives_the_bytes_of_a_fast_one(monkeypatch):
    """A quick search has no limit of time, a thorough one of work; `--budget` has one, and the answer says so."""
    machine = ("recommend", "miniature", "--platform", "phone-ufs4", "--memory", "510MB")
    before = moereplay(*machine, "--json")
    clock = itertools.count(step=3600.0)
    monkeypatch.setattr("moereplay.sweeps.recommend.runner.time.monotonic", lambda: next(clock))
    slow = moereplay(*machine, "--json")
    assert (slow.returncode, slow.stdout) == (0, before.stdout) and "best so far" not in slow.stderr
    cut = moereplay(*machine, "--budget", "5m")
    assert "ended early" in unfolded(cut.stdout)


def test_options_of_a_search_are_refused_where_there_is_none():
    for arguments in (
        ("--budget", "5s"),
        ("--thorough",),
        ("--target-tokens-per-s", "5"),
        ("--scope", "per_layer"),
    ):
        for subject in ("miniature", "glm-4.5-air"):
            ended = moereplay("recommend", subject, "--gpu", "RTX 3090", "--ram", "64GB", *arguments)
            assert ended.returncode == 2 and f"{arguments[0]} requires a trace and --platform" in unfolded(ended.stderr)


def test_options_that_a_search_ignores_are_refused():
    for option, value in (("--prompt", "9"), ("--kv-bits", "4"), ("--disk", "3GB/s"), ("--figures", "new")):
        ended = moereplay("recommend", "miniature", "--platform", "phone-ufs4", "--memory", "510MB", option, value)
        assert ended.returncode == 2 and f"{option} requires settings of engines" in unfolded(ended.stderr)


def test_budgets_are_times():
    for text in ("soon", "-5s", "0", "1e9s"):
        machine = ("--platform", "phone-ufs4", "--memory", "510MB")
        ended = moereplay("recommend", "miniature", *machine, "--budget", text)
        assert ended.returncode == 2 and "expected a time such as 60s or 5m, or none" in unfolded(ended.stderr)
