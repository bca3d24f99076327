"""The answer for a model on a machine: settings as replays worked by hand, memory, ranges, and the command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.analysis.answer import document, lines, pays, span
from moereplay.analysis.figures.machines import speed_by_memory, token_time
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Machine, assembled, of_platform
from moereplay.simulator.platforms import platform
from moereplay.sweeps.parts import read_results
from moereplay.sweeps.recommend import load as loads
from moereplay.sweeps.recommend.answer import Range, Replays, answer, parts_of, prompt_of, replayed, surface
from moereplay.sweeps.recommend.decoding import PLAIN, Decoding
from moereplay.sweeps.recommend.engines import GLOBAL_LRU, LAYERS, NAMES, Engine, Mode, engine, engines
from moereplay.sweeps.recommend.load import Load, Options, Routing, model_load
from moereplay.sweeps.recommend.prompts import first_token, rule_of
from moereplay.sweeps.recommend.settings import (
    MAPPED,
    MARGIN,
    Setting,
    expert_us,
    kept_back,
    memory_of,
    of_layers,
    room_of,
    setting_at,
    settings,
    settings_of,
)
from moereplay.traces.drafts import Drafts
from moereplay.traces.geometry import last_layers
from moereplay.traces.routing import Candidate, named
from moereplay.traces.schema import Geometry
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every

GB = 10**9


def shape(layers: int = 8, experts: int = 16, k: int = 2, size: int = 100_000_000, dense: int = GB) -> Geometry:
    """12.8 GB of experts in eight layers of 1.6 GB."""
    bits = {"expert_bits": 4.5, "dense_bytes": dense, "kv_bytes": 100_000}
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=(size,) * layers, **bits)


def drawn(seed: int, same: float, geometry: Geometry, requests: int = 2) -> Routing:
    """Requests of 24 tokens; an expert of the token before is used again with a chance of `same`."""
    dice = np.random.default_rng(seed)
    ids = np.empty((48 * requests, geometry.layers, geometry.k), np.int16)
    for layer in range(geometry.layers):
        for token in range(len(ids)):
            again = token and dice.random() < same
            ids[token, layer] = ids[token - 1, layer] if again else dice.permutation(geometry.experts)[: geometry.k]
    half = len(ids) // 2
    return Routing(f"reuse {same}", ids[:half], ids[half:], (24,) * requests, "a generator")


def load(geometry: Geometry | None = None, reuse: tuple[float, ...] = (0.5,), **change: Any) -> Load:
    geometry = geometry or shape()
    requests = max(2, change.get("decoding", PLAIN).streams)
    about: dict[str, Any] = {
        "name": "a model",
        "model": "",
        "geometry": geometry,
        "context": 0,
        "kv_bits": 16,
        "runtime_bytes": 0,
        "buffer_bytes": 0,
        "routings": tuple(drawn(at, same, geometry, requests) for at, same in enumerate(reuse)),
        "grade": "estimated",
        "source": "a generator",
        "assumed": (),
    }
    return Load(**about | change)


def machine(**parts: Any) -> Machine:
    return assembled(**{"gpu": "RTX 3090", "ram": "64GB", "ram_rate": "50GB/s", "disk": "3GB/s", **parts})


def mode(**change: Any) -> Mode:
    base = {"name": "a", "flags": "-x", "holds": LAYERS, "miss": "cpu", "source": "a test"}
    return Mode.model_validate(base | change)


def only(of: Load, on: Machine, made: Mode, fast: int, layers: int = 0) -> Setting:
    (setting,) = setting_at(of, on, Engine(name="none", summary="", home="", modes=(made,)), made, fast, layers)
    return setting


def ms(of: Load, setting: Setting) -> float:
    return 1000 / replayed(of, setting, 0).tokens_per_s


# -- a setting as a replay


def test_layers_on_the_cpu_cost_the_same_each_worked_by_hand() -> None:
    # a layer on the CPU: two experts of 100 MB at 50 GB/s, less two at the card's rate, and 65 us of waiting
    of, on = load(), machine()
    rate = on.platform.compute.memory_bytes_per_s  # type: ignore[union-attr]
    times = [ms(of, only(of, on, mode(layer_us=65), of_layers(of, layers), layers)) for layers in (8, 6, 0)]
    each = 2 * (100e6 / 50e9 + 1e-6) - 2 * (100e6 / rate + 1e-6) + 65e-6
    assert times[1] - times[0] == pytest.approx(2000 * each, rel=1e-4)
    assert times[2] - times[0] == pytest.approx(8000 * each, rel=1e-4)
    # all on the card: 1 GB of dense weights and 16 experts at its rate, launches of every layer
    launches = 8 * on.platform.loading.gate_ns / 1e6 + 24 * 0.001  # of layers, and 1 us of each expert and dense part
    assert times[0] == pytest.approx(1000 * (1e9 + 16 * 100e6) / rate + launches, rel=1e-5)


def test_what_every_layer_costs_the_kv_cache_and_page_faults_are_prices_of_the_platform() -> None:
    of, on = load(), machine(ram="8GB")
    base = ms(of, only(of, on, mode(), of_layers(of, 4), 4))
    assert ms(of, only(of, on, mode(step_us=100), of_layers(of, 4), 4)) == pytest.approx(base + 8 * 0.1)
    far = load(context=10_000)
    rate = on.platform.compute.kv_bytes_per_s
    assert rate and ms(far, only(far, on, mode(), of_layers(of, 4), 4)) == pytest.approx(base + 1e12 / rate, rel=1e-3)
    assert ms(load(context=10_000, kv_bits=8), only(far, on, mode(), of_layers(of, 4), 4)) < base + 0.6e12 / rate
    none = of_layers(of, 0)  # 12.8 GB of experts over 6 GB of RAM
    direct, mapped = (only(of, on, mode(below=how), none) for how in ("direct", "mmap"))
    assert direct.disk_bytes == 12_800_000_000 - direct.ram_bytes > 0
    disk = [tier.bytes_per_s for setting in (direct, mapped) for tier in setting.platform(of).tiers]
    assert disk == [3e9, pytest.approx(3e9 * MAPPED)]
    assert ms(of, mapped) > 2 * ms(of, direct)
    # the parts of a token and the price of an expert are at the setting's rate, not at the drive's
    parts = [parts_of(of, setting, replayed(of, setting, 0)) for setting in (direct, mapped)]
    assert parts[1].disk - parts[0].disk > 0.9 * (sum(parts[1]) - sum(parts[0]))
    assert expert_us(of, mapped)["disk"] == pytest.approx(100e6 / (3e3 * MAPPED))


def test_a_cache_is_faster_with_more_reuse_and_a_list_of_much_used_experts_beats_arbitrary_ones() -> None:
    on = machine()
    for miss in ("fetch", "split", "cpu"):
        cache = mode(holds=GLOBAL_LRU, miss=miss, overlap=True)
        slow, fast = (ms(of, only(of, on, cache, 4 * GB)) for of in (load(reuse=(0.1,)), load(reuse=(0.9,))))
        assert fast < 0.9 * slow
    skewed = load()
    routing = skewed.routings[0]
    few = np.minimum(routing.history, 3), np.minimum(routing.ids, 3)
    ids = [np.stack([part[..., 0], (part[..., 0] + 1) % 16], 2) for part in few]
    skewed = load(routings=(Routing("skewed", ids[0], ids[1], routing.lengths),))
    # used are 0 to 4, and 3 most: a uniform list holds 0 to 3 of 16
    times = [ms(skewed, only(skewed, on, mode(holds=holds), 3_200_000_000)) for holds in ("static", "uniform")]
    assert times[0] <= times[1]
    warm = skewed.routings[0].order(skewed.geometry)
    assert {expert for _, expert in warm[:8]} <= {3, 4} and len(set(warm)) == 8 * 16


def test_what_is_in_no_memory_at_first_lies_in_ram_by_use() -> None:
    of, on = load(), machine(ram="8GB")
    setting = only(of, on, mode(holds=GLOBAL_LRU, miss="fetch", below="direct"), 3 * GB)
    config = setting.config(of, 0)
    assert len(config.warm) == 30 + setting.ram_bytes // 100_000_000 and len(set(config.warm)) == len(config.warm)
    assert list(config.warm) == list(of.orders[0][: len(config.warm)])


def test_streams_and_drafts_decode_together() -> None:
    on = machine()
    plain, four = load(), load(decoding=Decoding(4))
    alone, together = (replayed(of, only(of, on, mode(), of_layers(of, 8), 8), 0).tokens_per_s for of in (plain, four))
    assert alone < together < 4 * alone
    drafting = load(decoding=Decoding(1, Drafts(2, (1.0,)), head=False))
    sure = replayed(drafting, only(drafting, on, mode(), of_layers(drafting, 8), 8), 0).tokens_per_s
    assert 1.5 * alone < sure < 3 * alone
    head = load(decoding=Decoding(1, Drafts(1, (0.5,))))
    assert head.head_bytes == 16 * 100_000_000 + GB // 8 and plain.head_bytes == 0
    assert only(head, on, mode(), 0).platform(head).draft.ns_per_token > 0


# -- memory


def test_the_sums_of_memory_hold_everything_and_leave_a_margin() -> None:
    of = load(context=1000, runtime_bytes=5 * 10**8, buffer_bytes=3 * 10**8)
    for on in (machine(vram="12GB"), machine(gpu="M4 Max", ram_rate="", ram="36GB"), machine(gpu="none")):
        for made in engines():
            for setting in settings(of, on, made, ladder=True):
                memories = memory_of(of, setting, made)
                assert all(memory.total <= memory.size for memory in memories)
                divided = setting.machine.kind == "gpu" and setting.fast_bytes < of.expert_bytes
                assert memories[0].parts["kept free"] == kept_back(setting.machine) + divided * MARGIN > 0
                held = setting.fast_bytes + setting.ram_bytes + setting.disk_bytes
                assert held >= of.expert_bytes or setting.mode.copies
    assert load(context=1000, kv_bits=8).kv_bytes == pytest.approx(of.kv_bytes * 8.5 / 16)


def test_rows_of_a_prompt_have_logits_of_the_vocabulary() -> None:
    qwen = model_load("qwen3-30b-a3b", Options(quant="Q4_K_M"))
    assert qwen.buffer_bytes == pytest.approx(4 * 512 * (151_936 + 8 * 2_048), rel=0.01)


# -- answers


def test_the_answer_has_every_engine_that_can_run_it_and_why_not_the_others() -> None:
    of = load(reuse=(0.1, 0.5, 0.9))
    found = answer(of, machine(vram="8GB"))
    names = [estimate.setting.engine for estimate in found.engines]
    assert set(names) | set(found.left_out) == {made.name for made in engines()} and len(names) == len(set(names))
    speeds = [estimate.tokens_per_s.middle for estimate in found.engines]
    assert speeds == sorted(speeds, reverse=True)
    for estimate in (*found.engines, *(way.estimate for way in found.ways)):
        assert estimate.parts.total == pytest.approx(1e9 / estimate.tokens_per_s.middle, rel=1e-6)
        assert len(estimate.runs) == (3 if estimate.setting.by_routing else 1)
        assert estimate.tokens_per_s.least <= estimate.tokens_per_s.middle <= estimate.tokens_per_s.most
    assert answer(of, machine(vram="8GB"), "llama.cpp").engines[0].setting.engine == "llama.cpp"
    text = list(lines(found))
    assert len(text) <= 25 and len(list(lines(found, verbose=True))) > len(text)
    json.dumps(document(found))
    assert document(found) == document(answer(load(reuse=(0.1, 0.5, 0.9)), machine(vram="8GB")))


def test_more_of_what_binds_gains_and_a_gain_that_depends_on_the_routing_is_not_claimed() -> None:
    found = answer(load(), machine(vram="8GB"), "llama.cpp")
    assert found.binds == "RAM bandwidth" and found.more[0].what.startswith(("RAM read", "VRAM of"))
    assert all(more.gain > 0.01 for more in found.more)
    speeds = [more.tokens_per_s for more in answer(load(), machine(vram="10GB")).more if more.what[:4] == "VRAM"]
    assert len(speeds) == len({round(speed, 9) for speed in speeds}) > 0  # a larger card that gives no more is left out
    assert pays(Range(-0.1, 0.1, 0.3)) is None and span(Range(-0.1, 0.1, 0.3)) == "10% less to 30% more"
    assert pays(Range(0.02, 0.1, 0.3)) is True and span(Range(0.1, 0.2, 0.3)) == "10% to 30% more"
    assert pays(Range(-0.3, -0.2, -0.1)) is False and span(Range(0, 0.001, 0.002)) == "no more"


def test_where_everything_fits_nothing_is_compared_and_whole_layers_are_replayed_once() -> None:
    of = load(reuse=(0.1, 0.9))
    found = answer(of, machine(), "llama.cpp")
    assert found.ways == () and found.best.hit.least == 1 and len(found.best.runs) == 1
    assert "every expert fits into VRAM" in "\n".join(lines(found))
    replays = Replays(of)
    whole = replays.estimate(next(settings_of(of, machine(), engine("llama.cpp"), engine("llama.cpp").modes[0])))
    assert not replays.asked and len(whole.runs) == 1 == len(replays.asked)


def test_memory_over_a_disk_is_that_of_phones_and_of_unified_memory() -> None:
    phone = answer(load(), of_platform(platform("phone-ufs4"), memory="4GB"))
    assert phone.binds == "disk reads" and phone.best.setting.disk_bytes > 0 and phone.ways == ()
    assert any("fit in no memory" in warning for warning in phone.warnings)
    mac = answer(load(), machine(gpu="M4 Max", ram_rate=""))
    assert mac.best.setting.disk_bytes == 0 and "unified memory" in "\n".join(lines(mac))


def test_dense_weights_that_fit_no_gpu_leave_it_out() -> None:
    found = answer(load(shape(dense=10 * GB)), machine(gpu="RTX 3070"))
    assert found.best.setting.machine.kind == "cpu" and "the GPU is left out" in "".join(found.warnings)
    assert room_of(load(shape(dense=10 * GB)), machine(gpu="RTX 3070"), engine("llama.cpp")) < 0


def test_passes_of_many_rows_take_another_way_or_leave_a_cache_out() -> None:
    def misses(streams: int, name: str) -> set[str]:
        of = load(decoding=Decoding(streams), routings=())
        fitting = settings(of, machine(vram="8GB"), engine(name))
        return {setting.mode.miss for setting in fitting if setting.machine.kind == "gpu"}

    assert misses(31, "llama.cpp") == {"cpu"} and misses(32, "llama.cpp") == {"fetch"}
    assert misses(32, "llama.cpp-moe-cache") == {"fetch"} and not misses(33, "llama.cpp-moe-cache")


@every(
    "parts, told",
    [
        ({"name": "vllm"}, "unknown engine 'vllm'"),
        ({"name": "ktransformers", "vram": "6GB", "ram": "8GB"}, "no setting of engine ktransformers fits"),
        ({"name": "freetoken", "gpu": "none"}, "no setting of engine freetoken fits"),
        ({"name": "mixtral-offloading"}, "invalid --engine mixtral-offloading: it runs only mixtral, not gpt-oss"),
    ],
)
def test_what_cannot_be_answered_is_a_line(parts: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        name = parts.pop("name")
        answer(load(model="gpt-oss"), machine(**parts), name)
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_has_a_setting_on_a_machine_of_its_kind(name: str) -> None:
    kind = engine(name).modes[0].machines[0]
    apart = {"gpu": machine(vram="8GB"), "cpu": machine(gpu="none"), "unified": machine(gpu="M3 Max", ram_rate="")}
    on, of = apart[kind], load(model=(engine(name).models or ("a model",))[0])
    assert all("{" not in setting.flags for setting in settings(of, on, engine(name)))
    assert next(settings(of, on, engine(name)), None) is not None


# -- figures


def test_bars_add_up_to_the_time_of_a_token_and_the_map_has_the_machine_itself() -> None:
    found = answer(load(), machine(vram="8GB"), "llama.cpp")
    ((panel,), *_) = token_time(found).panels
    assert sum(part.size for part in panel.bars[0].parts) == pytest.approx(1000 / found.best.tokens_per_s.middle)
    points = surface(found)
    (here,) = [point["tokens_per_s"] for point in points if point["here"]]
    assert here == found.best.tokens_per_s.middle
    by_ram: dict[float, list[float]] = {}
    for point in points:
        by_ram.setdefault(point["ram_bytes"], []).append(point["tokens_per_s"])
    assert all(speeds == sorted(speeds) for speeds in by_ram.values())
    assert speed_by_memory(found, points).panels


# -- routing of a model that was not recorded is drawn once


def test_drawn_routing_is_kept_and_a_damaged_file_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "private_folder", lambda name: tmp_path)
    times = []
    monkeypatch.setattr(loads, "draws", lambda *given: times.append(given) or [np.ones((320, 3, 2), np.int16)])
    model = Candidate(named("miniature").scaled(3, 8, 2), "x", False)
    (first,), (again,) = loads._drawn([model], 1), loads._drawn([model], 1)
    assert len(times) == 1 and np.array_equal(first.ids, again.ids) and sum(first.lengths) == len(first.ids) == 192
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-2])
    loads._drawn([model], 1)
    assert len(times) == 2


# -- the command


@pytest.mark.slow
def test_two_doors_give_one_number(tmp_path: Path) -> None:
    """The answer, a replay of the printed command, and the folder's results agree to the digit."""
    out = tmp_path / "out"
    told = ("recommend", "miniature", "--vram", "700MB", "--ram", "2GB", "--runtime", "10MB", "--engine", "llama.cpp")
    ended = moereplay(*told, "--out", out, "--json")
    assert ended.returncode == 0, ended.stderr
    known = json.loads(ended.stdout)["best"]
    command = unfolded(ended.stderr).partition("the answer again: ")[2].split("\n")[0]
    again = moereplay(*shlex.split(command)[1:], "--json")
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout)
    assert result["metrics"]["tokens_per_s"] == pytest.approx(known["tokens_per_s"]["middle"], rel=1e-12)
    rows = read_results(out, "requests")
    mine = rows.filter(rows["identity"] == result["about"]["identity"])
    tokens, ns = (sum(mine[name].to_list()) for name in ("decode_tokens", "decode_ns"))
    speed = tokens / ns * 1e9
    assert speed == pytest.approx(known["tokens_per_s"]["middle"], rel=1e-12)


@pytest.mark.slow
def test_the_command_answers_in_25_lines_with_drafts_streams_and_figures(tmp_path: Path) -> None:
    told = ("recommend", "miniature", "--vram", "700MB", "--ram", "2GB", "--runtime", "10MB", "--engine", "llama.cpp")
    asked = moereplay(*told, "--draft", "auto:accept=.8", "--concurrency", "2", "--figures", tmp_path)
    assert asked.returncode == 0, asked.stderr
    text = unfolded(asked.stdout)
    assert "2 streams: " in text and "drafts " in text and "assumed: " in text
    names = {path.name for path in tmp_path.iterdir()}
    assert {"token_time.png", "speed_by_memory.csv", "speed_by_drafts.svg"} <= names
    for wrong, said in (
        (("--concurrency", "0"), "invalid --concurrency 0"),
        (("--kv-bits", "5"), "invalid --kv-bits '5': expected 16, 8, 4"),
        (("--out", tmp_path), "it is a folder; choose another name"),
    ):
        refused = moereplay(*told, *wrong)
        assert refused.returncode == 2 and said in unfolded(refused.stderr)


# -- published reports of what does not fit, and of what does


@every(
    "model, quant, context, parts, layers",
    [
        # llama.cpp#19711 and #27872: -c defaults to 131,072 positions, and --n-cpu-moe 32 of 45 is out of memory
        ("glm-4.5-air", "Q4_K_M", 131_072, {"gpu": "RTX 3090", "ram": "64GB"}, range(1)),
        # iogpu.wired_limit_mb: macOS lets a GPU use about 48 of 64 GB, and gpt-oss-120b has 63 GB
        ("gpt-oss-120b", "", 4_096, {"gpu": "M4 Max", "ram": "64GB"}, range(36)),
        ("gpt-oss-120b", "", 4_096, {"gpu": "M4 Max", "ram": "128GB"}, range(36, 37)),
        # ollama#16958: 4 to 6 layers of experts of Gemma 4 26B fit 8 GB at 8,192 positions
        ("gemma-4-26b-a4b", "Q4_K_M", 8_192, {"gpu": "RTX 4060", "ram": "32GB"}, range(4, 7)),
        # antirez/ds4#629: 150,000 positions of DeepSeek-V4-Flash are 2,011 MiB, so that one card still holds layers
        ("deepseek-v4-flash", "", 150_000, {"gpu": "RTX 3090", "ram": "256GB"}, range(1, 4)),
    ],
)
def test_published_reports_of_memory(
    model: str, quant: str, context: int, parts: dict[str, Any], layers: range
) -> None:
    of = model_load(model, Options(quant=quant, context=context))
    room = max(0, room_of(of, assembled(**parts), engine("llama.cpp")))
    assert last_layers(of.geometry, room) in layers


def test_layers_on_two_cards_are_named_by_card() -> None:
    # llama.cpp#15263, #15975, llm-rig#85: --n-cpu-moe 16 alone puts 35 GB on the last of two cards of 24 GB
    of = model_load("glm-4.5-air", Options(quant="Q4_K_M"))
    setting = next(settings(of, machine(gpu="2x RTX 3090"), engine("llama.cpp")))
    assert "-ts 23,23 -ot" in setting.flags and "--n-cpu-moe" not in setting.flags
    away = setting.flags.partition("blk\\.(")[2].partition(")")[0].split("|")
    assert len(away) == 45 - setting.gpu_layers
    by_card = [sum(at <= int(layer) < at + 23 for layer in away) for at in (0, 23)]
    assert abs(by_card[0] - by_card[1]) <= 1
    shared = next(settings(of, machine(gpu="2x RTX 3090"), engine("freetoken"))).machine
    assert shared.count == 1 and shared.memory_bytes == 24 << 30


def test_a_prompt_is_computed_by_the_rule_that_its_batch_reaches() -> None:
    of, on = load(model="a model"), machine(vram="8GB")
    setting = next(settings(of, on, engine("llama.cpp")))
    short, long = first_token(of, setting, 16), first_token(of, setting, 600)
    assert short and long and (short.how, long.how) == ("cpu", "touched") and short.seconds < long.seconds
    # 600 tokens in two batches of 512: experts outside VRAM cross the link twice
    # from memory that is not pinned
    link = 1.87 * 2 * (of.expert_bytes - setting.fast_bytes) / on.platform.links[0].bytes_per_s
    assert link < long.seconds < 1.3 * link
    found = prompt_of(answer(of, on, "llama.cpp"), 600)
    assert found.engines[0].seconds == long.seconds and found.streaming_from > 0
    assert rule_of((), 5, 2, 9) is None
