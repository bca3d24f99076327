"""Drafts and streams that decode together in the closed form: unions, prices, memory, verdicts; replays beside it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.analysis.drafting_answer import in_words, verdict, with_dense_rows
from moereplay.analysis.figures.chart import rows_of
from moereplay.analysis.figures.machines import speed_by_drafts
from moereplay.simulator.capacity import Memory
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Machine, assembled, of_platform
from moereplay.simulator.platform import Roofline
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import replay
from moereplay.sweeps.recommend.draft_replays import with_drafts
from moereplay.sweeps.recommend.drafting import Asked, asked, drafted
from moereplay.sweeps.recommend.hits import (
    GLOBAL_LRU,
    LRU,
    PLAIN,
    POINTS,
    STATIC,
    Decoding,
    Hits,
    Work,
    of_model_at,
    of_trace_at,
)
from moereplay.sweeps.recommend.placements import Scheme
from moereplay.sweeps.recommend.quick import Load, estimates, leader
from moereplay.sweeps.recommend.quick_document import decoding_document
from moereplay.sweeps.recommend.search import Question
from moereplay.sweeps.recommend.token_time import prices, token
from moereplay.traces.drafts import Drafts
from moereplay.traces.passes import schedule
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import named
from moereplay.traces.schema import Geometry
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every

GB = 10**9
LINE = np.linspace(0, 1, POINTS)


def shape(layers: int = 8, experts: int = 16, k: int = 2, size: int = 100_000_000, dense: int = GB) -> Geometry:
    bits = {"expert_bits": 4.5, "dense_bytes": dense, "kv_bytes": 100_000}
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=(size,) * layers, **bits)


def drafts_of(many: int, *accept: float, streams: int = 1, head: bool = False) -> Decoding:
    return Decoding(streams, Drafts(many, accept or (0.7,)), head)


def held(work: Work | None, line: np.ndarray = LINE) -> Hits:
    return Hits("a line", {LRU: line, GLOBAL_LRU: line, STATIC: line}, work)


def load(decoding: Decoding = PLAIN, work: Work | None = None, context: int = 0, line: np.ndarray = LINE) -> Load:
    return Load(shape(), context, 0, (held(work, line),), "", decoding)


def machine(**parts: str) -> Machine:
    """VRAM is in powers of ten, as the models here."""
    parts |= {"vram": parts["vram"].replace("GB", "000000000B")} if "vram" in parts else {}
    return assembled(**{"gpu": "RTX 3090", "ram": "64GB", "ram_rate": "50GB/s", "disk": "3GB/s", **parts})


# -- what a pass demands


def test_the_tokens_of_a_pass_are_those_that_chances_and_a_schedule_give() -> None:
    # the known token, then .5, .5 x .8, .5 x .8 x .8: the last chance repeats
    assert Drafts(3, (0.5, 0.8)).kept == pytest.approx(1 + 0.5 + 0.4 + 0.32)
    assert Drafts(0).kept == 1 and Decoding(4, Drafts(1, (0.5,))).tokens == 6
    trace = from_arrays(np.zeros((20_000, 1, 1), int), shape(1, 2, 1))
    passes = len(schedule(trace, "token+draft=3:accept=0.5/0.8:rejected=other:seed=0"))
    assert 20_000 / passes == pytest.approx(Drafts(3, (0.5, 0.8)).kept, rel=0.02)


def two_streams(experts: int = 4) -> Any:
    """Four requests of 12 tokens: those of even number use experts 0 and 1, the others 1 and 2, in both layers."""
    ids = [[[request % 2, request % 2 + 1]] * 2 for request in range(4) for _ in range(12)]
    return from_arrays(np.array(ids), shape(2, experts, 2, 1 << 20), lengths=[12] * 4)


def test_rows_that_share_experts_demand_their_union_once() -> None:
    plain, together = of_trace_at(two_streams(), (PLAIN, Decoding(2)))
    assert plain.work is None
    # two rows choose 0 1 and 1 2: three experts, of which one is of both rows
    assert together.work == Work(3, ((1, 2 / 3), (2, 1 / 3)))
    # a list of one expert of four, the one that both use: half of a token's, a third of a pass's
    assert plain.at(STATIC, 1 / 4) == pytest.approx(1 / 2)
    assert together.at(STATIC, 1 / 4) == pytest.approx(1 / 3)
    # a pool of two for a layer keeps what was used last, of three: demand order is 1 (both rows), 0, 2, so 0 and 2 stay
    assert together.at(LRU, 2 / 4) == pytest.approx(2 / 3, abs=0.02) and together.at(LRU, 3 / 4) == pytest.approx(1)


def test_drafts_of_one_request_that_never_changes_demand_no_more_experts() -> None:
    same = of_trace_at(two_streams(), (Decoding(1, Drafts(2, (1.0,))),))[0].work
    assert same == Work(2, ((3, 1.0),))  # two experts, each of three rows


def test_streams_need_as_many_requests() -> None:
    with pytest.raises(ConfigError, match="--concurrency 8: the trace has 4 requests"):
        of_trace_at(two_streams(), (Decoding(8),))
    assert of_trace_at(two_streams(), (Decoding(4),))[0].work is not None  # halves of requests are history
    with pytest.raises(ConfigError, match="no pass has all 20 rows"):
        of_trace_at(two_streams(), (Decoding(1, Drafts(19, (0.0,))),))


def test_unions_rise_with_rows_and_a_cache_holds_less_of_them() -> None:
    ways = [Decoding(streams, Drafts(many)) for streams in (1, 2, 4) for many in range(4)]
    routing = named("gpt-oss-20b")
    found = dict(zip(ways, of_model_at(routing, ways), strict=True))
    unions = {way: hits.work.union if hits.work else routing.k for way, hits in found.items()}
    for streams in (1, 2, 4):
        of = [unions[Decoding(streams, Drafts(many))] for many in range(4)]
        assert of == sorted(of) and of[-1] < 4 * of[0]
        for filled in (LRU, STATIC):
            share = [found[Decoding(streams, Drafts(many))].at(filled, 0.5) for many in range(4)]
            assert share == sorted(share, reverse=True)
    # consecutive tokens share experts: two rows of one request have fewer than one of each of two would at random
    at_random = 4 + 4 * (1 - 4 / 32)
    assert unions[Decoding(1, Drafts(1))] < unions[Decoding(2)] < at_random
    # studies/pages/drafts.md has 1.61 k and 2.49 k for 2 and 4 rows of the recorded gpt-oss-20b at .7
    assert unions[Decoding(1, Drafts(1))] / 4 == pytest.approx(1.61, rel=0.05)
    assert unions[Decoding(1, Drafts(3))] / 4 == pytest.approx(2.49, rel=0.05)


# -- what a pass takes


def test_a_pass_worked_out_by_hand() -> None:
    # three rows that demand four experts: two of one row each, two of two
    work = Work(4, ((1, 0.5), (2, 0.5)))
    plain = prices(machine(), shape(), 0)
    several = prices(machine(), shape(), 0, drafts_of(2), work)
    assert (several.k, several.demanded) == (4, 32)
    # read once, an expert takes as long for two rows as for one; computed for each of its 1.5 rows, 1.5 times as long
    assert several.cpu == plain.cpu == pytest.approx(100e6 / 50 + 1000)
    assert several.cpu_apart == pytest.approx(1.5 * (100e6 / 50 + 1000))
    apart = Scheme("layers", "cpu").mode.model_copy(update={"rows_apart": True, "layer_us": 0})
    shared = apart.model_copy(update={"rows_apart": False})
    assert token(several, shared, 0, 1, 1).cpu == pytest.approx(8 * 4 * 2_001_000)
    assert token(several, apart, 0, 1, 1).cpu == pytest.approx(8 * 4 * 1.5 * 2_001_000)
    assert token(plain, apart, 0, 1, 1) == token(plain, shared, 0, 1, 1)


def test_a_head_takes_a_layer_and_a_platform_may_state_its_drafts_instead() -> None:
    work = Work(4, ((1, 1.0),))
    without, with_head = (prices(machine(), shape(), 0, drafts_of(2, head=each), work) for each in (False, True))
    # a layer's dense part is an eighth of 1 GB at 936 GB/s, beside two resident experts of 100 MB; each with a launch
    each = 1e9 / 8 / 936 * 1 + 1000 + 2 * (100e6 / 936 + 1000)
    assert with_head.dense - without.dense == pytest.approx(2 * each, rel=0.02)
    assert with_head.launches == pytest.approx(without.launches * 10 / 8)
    stated = of_platform(platform("desktop-24gb:draft.ns_per_token=7"), "24GB", "64GB")
    same = of_platform(platform("desktop-24gb"), "24GB", "64GB")
    more = prices(stated, shape(), 0, drafts_of(2, streams=3, head=True), work).dense
    assert more - prices(same, shape(), 0, drafts_of(2, streams=3), work).dense == 2 * 3 * 7


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 5), st.floats(0, 1), st.floats(0, 1), st.floats(2, 10), st.sampled_from(["cpu", "fetch", "split"])
)
def test_better_chances_are_never_slower_and_larger_unions_never_faster(
    many: int, less: float, more: float, union: float, miss: str
) -> None:
    def speed(chance: float, union: float) -> float:
        of = load(drafts_of(many, chance), Work(union))
        price = prices(machine(), shape(), 0, of.decoding, of.hits[0].work)
        return of.decoding.tokens / token(price, Scheme(STATIC, miss).mode, 0.5, 1, 1).total

    low, high = sorted((less, more))
    assert speed(high, union) >= speed(low, union)
    assert speed(low, union) >= speed(low, 1.1 * union)


# -- memory


def test_each_stream_has_a_kv_cache_and_a_head_its_layer() -> None:
    one, four = load(context=10_000), load(Decoding(4), Work(5), 10_000)
    assert (one.kv_bytes, four.kv_bytes) == (GB, 4 * GB)
    head = load(drafts_of(1, head=True), Work(3), 10_000)
    assert head.head_bytes == 16 * 100_000_000 + GB // 8 and load(drafts_of(1), Work(3)).head_bytes == 0
    assert head.fixed_bytes == one.fixed_bytes + head.head_bytes

    def layers(of: Load) -> int:
        return max(each.setting.gpu_layers for each in estimates(of, machine(vram="12GB"), chosen()))

    # 12 GB less 1 GB of dense weights and 1 GB of KV cache hold six layers of 1.6 GB; with 3 GB more, or a head, less
    assert (layers(one), layers(four), layers(head)) == (6, 4, 5)


def chosen(*names: str) -> tuple[Any, ...]:
    from moereplay.sweeps.recommend.engines import engine

    return tuple(map(engine, names or ("llama.cpp",)))


# -- whether to draft


def loads(of: Asked, unions: dict[int, float], line: np.ndarray = LINE) -> list[Load]:
    """A load for each number of drafts; `unions` are the experts of so many rows."""
    rows = {each: Work(unions[each.rows], ((1, 1.0),)) for each in of.decodings if each.rows > 1}
    return [load(each, rows.get(each), line=line) for each in of.decodings]


SHARED = {1: 2, 2: 2.2, 3: 2.4, 4: 2.6, 5: 2.8, 6: 3.0}
APART = {rows: 2.0 * rows for rows in SHARED}


def test_drafts_pay_where_rows_are_cheap_and_lose_where_each_is_paid_and_few_are_right() -> None:
    cheap = Asked(1, 1, 4, Drafts(4, (0.8,)), False)
    resident = drafted(loads(cheap, SHARED), cheap, machine(vram="24GB"))
    assert resident is not None and resident.best > 0 and decoding_document(resident)["pays"]
    # everything on the CPU of llama.cpp, which computes an expert again for each row: 4 rows take 4 times as long
    weak = Asked(1, 1, 4, Drafts(4, (0.2,)), False)
    lost = drafted(loads(weak, APART), weak, machine(vram="2GB"), "llama.cpp")
    assert lost is not None and lost.best == 0
    known = decoding_document(lost)
    assert known["pays"] is False and known["drafts"] == 0 and "do not draft" in verdict(known)
    assert known["steps"][4]["plain_passes"] > 4.0
    # drafts that are never right yield one token per pass, and so the speed of the pass
    never = Asked(1, 1, 3, Drafts(3, (0.0,)), False)
    none = drafted(loads(never, SHARED), never, machine(vram="2GB"), "ktransformers")
    assert none is not None
    steps = [step.estimate.tokens_per_s.middle for step in none.steps]
    assert steps == sorted(steps, reverse=True) and none.best == 0


def test_the_answer_changes_if_unions_are_ignored() -> None:
    # rows that share no expert: 2 experts each. On a CPU that reads them, a pass of n rows takes n times as long, so
    # 1.7 tokens in two plain passes lose; if each pass demanded a token's two experts alone, they would win
    of = Asked(1, 1, 1, Drafts(1, (0.7,)), False)
    found = drafted(loads(of, APART), of, machine(vram="2GB"), "ktransformers")
    ignored = drafted(loads(of, {2: 2.0}), of, machine(vram="2GB"), "ktransformers")
    assert found is not None and ignored is not None
    gains = [decoding_document(each)["gain"]["middle"] for each in (found, ignored)]
    assert gains[0] < 0 < 0.5 < gains[1]


def test_engines_that_are_not_known_to_draft_are_not_asked_to() -> None:
    of = Asked(1, 1, 2, Drafts(2, (0.9,)), False)
    found = drafted(loads(of, SHARED), of, machine(vram="6GB"))
    assert found is not None
    rows = {each["engine"]: each for each in decoding_document(found)["by_engine"]}
    assert rows["freetoken"]["drafts"] is None and rows["llama.cpp"]["drafts"] == 2
    assert leader(estimates(found.load, machine(vram="6GB"), chosen("llama.cpp"))) == found.steps[-1].estimate


def test_passes_of_many_rows_take_another_way_or_leave_a_cache_out() -> None:
    def modes(streams: int, name: str) -> set[str]:
        of = load(Decoding(streams), Work(8))
        found = estimates(of, machine(vram="8GB"), chosen(name))
        return {each.setting.mode.miss for each in found if each.machine.kind == "gpu"}

    assert modes(31, "llama.cpp") == {"cpu"} and modes(32, "llama.cpp") == {"fetch"}
    assert modes(32, "llama.cpp-moe-cache") == {"fetch"} and not modes(33, "llama.cpp-moe-cache")


@every(
    "draft, model, lengths, accept",
    [
        ("auto", "", (0, 1, 2, 3, 4, 5), (0.7,)),
        ("auto", "Qwen3.6-35B-A3B", (0, 1, 2), (0.86, 0.86)),
        ("auto:accept=.9", "Qwen3.6-35B-A3B", (0, 1, 2, 3, 4, 5), (0.9,)),
        ("auto:accept=.9/.5/.1", "", (0, 1, 2, 3), (0.9, 0.5, 0.1)),
        ("auto:accept=deepseek-v4-nextn", "", (0, 1), (0.9,)),
        ("3", "", (0, 3), (0.7,)),
        ("0", "", (0,), (0.7,)),
    ],
)
def test_lengths_are_those_of_the_head(draft: str, model: str, lengths: tuple[int, ...], accept: tuple[float]) -> None:
    found = asked(2, draft, model)
    assert found is not None and found.lengths == lengths and found.drafts.accept == accept
    assert [each.drafts.many for each in found.decodings] == [0, *lengths]
    assert {each.streams for each in found.decodings[1:]} == {2}


def test_one_stream_without_drafts_asks_nothing() -> None:
    assert asked(None, "0", "") is None and asked(1, "0", "") is not None


@every(
    "concurrency, draft, told",
    [
        (0, "0", "invalid --concurrency 0"),
        (65, "0", "from 1 to 64"),
        (1, "auto:accept=2", "invalid --draft 'auto:accept=2'"),
        (1, "17", "at most 16 drafts"),
        (1, "2:head=some", "expected head=layer or head=none"),
        (1, "2:head=layer:head=none", "once"),
        (1, "many", "invalid --draft 'many'"),
    ],
)
def test_wrong_values_are_a_line(concurrency: int, draft: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        asked(concurrency, draft, "")
    assert told in str(raised.value) and "\n" not in str(raised.value)


# -- beside replays


@pytest.mark.slow
@every(
    "streams, many, within",
    [(1, 0, 0.1), (1, 1, 0.1), (1, 3, 0.1), (2, 0, 0.1), (2, 2, 0.1), (4, 0, 0.1), (4, 1, 0.1)],
)
def test_the_time_of_a_pass_is_that_of_a_replay_with_its_hits(streams: int, many: int, within: float) -> None:
    geometry = replace_bytes(shape(4, 16, 2, 10_000_000, 80_000_000))
    drawn = np.random.default_rng(1)
    ids = np.stack([[drawn.choice(16, 2, replace=False) for _ in range(4)] for _ in range(8 * 60)])
    trace = from_arrays(ids, geometry, lengths=[60] * 8)
    way = Decoding(streams, Drafts(many, (0.6,)), head=False)
    work = of_trace_at(trace, (way,))[0].work
    machine_of = of_platform(platform("desktop-ram"))
    given_ = {"platform": "desktop-ram", "capacity": "320MB", "eviction": "lru", "miss": "fetch", "passes": way.passes}
    totals = replay(trace, configure(**given_, draft=way.drafts.text), engine="reference").totals
    price = prices(machine_of, geometry, 0, way, work)
    hit = totals["hits"] / totals["accesses"]
    of = Scheme(GLOBAL_LRU, "fetch").mode.model_copy(update={"layer_us": 0, "step_us": 0})
    told = token(price, of, hit, 1 - hit**price.k, 1).total - price.launches
    spent = totals["time_ns"] / 480  # a token; drafts that are right and streams share a pass
    assert told / way.tokens == pytest.approx(spent, rel=within)


def replace_bytes(of: Geometry) -> Geometry:
    return of.model_copy(update={"kv_bytes": 0})


# -- the command


@pytest.mark.slow
def test_the_command_answers_with_a_verdict_and_a_document() -> None:
    told = ("recommend", "miniature", "--vram", "1GB", "--ram", "2.5GB", "--engine", "llama.cpp")
    plain = moereplay(*told, "--json")
    asked_for = moereplay(*told, "--draft", "auto:accept=.8", "--concurrency", "2", "--json")
    assert plain.returncode == asked_for.returncode == 0, asked_for.stderr
    known = json.loads(asked_for.stdout)["decoding"]
    assert "decoding" not in json.loads(plain.stdout)
    assert known["concurrency"] == 2 and [each["drafts"] for each in known["steps"]] == [0, 1, 2, 3, 4, 5]
    for each in known["steps"]:
        tokens = 2 * Drafts(each["drafts"], (0.8,)).kept
        assert each["tokens_per_pass"] == pytest.approx(tokens)
        assert each["tokens_per_s"]["middle"] == pytest.approx(1e9 * tokens / each["pass_ns"])
        assert each["tokens_per_s_per_stream"] == pytest.approx(each["tokens_per_s"]["middle"] / 2)
    best = next(each for each in known["steps"] if each["drafts"] == known["drafts"])
    assert json.loads(asked_for.stdout)["best"]["tokens_per_s"] == best["tokens_per_s"]
    text = unfolded(moereplay(*told, "--draft", "auto", "--concurrency", "2").stdout)
    for part in (
        "drafts: do not draft: the best, 1 draft per pass",
        "more than one without drafts",
        "by number of drafts, llama.cpp",
        "a draft is right with 0.7",
    ):
        assert part in text
    wrong = moereplay(*told, "--concurrency", "0")
    assert wrong.returncode == 2 and "invalid --concurrency 0" in unfolded(wrong.stderr)


def test_a_gain_that_depends_on_the_routing_is_said_so() -> None:
    assert in_words({"least": -0.1, "middle": 0.1, "most": 0.3}) == "10% fewer to 30% more tokens/s"
    assert in_words({"least": -0.3, "middle": -0.2, "most": -0.2}) == "20% to 30% fewer tokens/s"
    assert in_words({"least": 0.0, "middle": 0.0, "most": 0.005}) == "as many tokens/s, no more"


@pytest.mark.slow
def test_a_search_by_replays_compares_numbers_of_drafts_and_counts_the_memory_of_streams() -> None:
    told = ("recommend", "miniature", "--platform", "phone-ufs4", "--memory", "512MB", "--json")
    found = moereplay(*told, "--concurrency", "2", "--draft", "auto:accept=.9:head=none")
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    known, best = document["decoding"], document["best"]["config"]
    assert [each["drafts"] for each in known["steps"]] == [0, 1, 2, 3, 4, 5] and known["concurrency"] == 2
    assert best["passes"] == "batch:2" and best["draft"].partition(":")[0] == str(known["drafts"])
    assert known["alone"]["drafts"] == 0 and known["alone"]["tokens_per_s"] > known["steps"][0]["tokens_per_s"]
    tokens = [each["tokens_per_pass"] for each in known["steps"]]
    assert tokens == sorted(tokens) and tokens[0] == 1
    for wrong, said in (
        (("--concurrency", "7"), "the trace has 6 requests"),
        (("--concurrency", "2", "--passes", "token"), "--concurrency N cannot be combined with --passes"),
    ):
        refused = moereplay(*told, *wrong)
        assert refused.returncode == 2 and said in unfolded(refused.stderr)


def test_a_head_and_the_caches_of_streams_take_memory_of_a_search() -> None:
    trace = from_arrays(np.tile(np.arange(2), (40, 8, 1)), shape(), lengths=[10] * 4)
    memory = Memory(20 * GB, GB, GB, 0)
    question = Question(trace, memory, {"platform": "desktop-ram"})
    of = Asked(4, 1, 2, Drafts(2, (0.9,)))
    none, two = (with_drafts(question, of, many) for many in (0, 2))
    assert none.memory.cache_bytes == (20 - 1 - 4) * GB
    assert two.memory.cache_bytes == none.memory.cache_bytes - 16 * 100_000_000 - GB // 8
    assert none.base["platform"] == "desktop-ram"
    # a layer's eighth of 1 GB and two experts of 100 MB at the rate of the card, with a launch of each
    named, _, ns = two.base["platform"].partition(":draft.ns_per_token=")
    compute = platform(named).compute
    assert isinstance(compute, Roofline)
    assert int(ns) == pytest.approx((GB / 8 + 2e8) / compute.memory_bytes_per_s * 1e9 + 3 * compute.launch_ns, abs=1)
    with pytest.raises(ConfigError, match="4 streams with 2 drafts leave no room"):
        with_drafts(Question(trace, Memory(6 * GB, GB, GB, 0), question.base), of, 2)


def test_what_is_left_if_further_rows_cost_dense_work_by_hand():
    # Two streams at 80 tokens/s for 50 alone: a pass takes 2 / 80 s, a plain one 1 / 50 s, .8 of it. A tenth of it for
    # each further row: passes of 1.08 without drafts, and 1.5 + .08 x 3 = 1.74 with one, which yields 3.4 tokens for 2:
    # 3.4 / 2 x 1.08 / 1.74 = 1.0552. Two streams have 1.6 / 1.08 = 1.48 times the tokens of one.
    none = {"drafts": 0, "rows": 2, "tokens_per_pass": 2, "plain_passes": 1, "tokens_per_s": _speeds(80)}
    one = {"drafts": 1, "rows": 4, "tokens_per_pass": 3.4, "plain_passes": 1.5, "tokens_per_s": _speeds(90.7)}
    known = {"steps": [none, one], "concurrency": 2, "engine": "llama.cpp", "alone": {"tokens_per_s": _speeds(50)}}
    (line,) = with_dense_rows(known)
    assert "+5.5% tokens/s with 1 draft" in line
    assert "streams" not in line
    assert list(with_dense_rows(known | {"steps": [none], "concurrency": 1, "alone": None})) == []
    chart = speed_by_drafts({"name": "a model", "machine": {"name": "a machine"}, "decoding": known})
    drawn = [(row["x"], row["y"], row["low"]) for row in rows_of(chart)]
    # 2 tokens in 25 + 2 ms, and 3.4 in 37.5 + 6 ms.
    assert drawn[:2] == [(0, 80, 79), (1, 90.7, 89.7)]
    assert [y for _, y, _ in drawn[2:]] == pytest.approx([2 / 0.027, 3.4 / 0.0435])


def _speeds(middle: float) -> dict[str, float]:
    return {"least": middle - 1, "middle": middle, "most": middle + 1}
