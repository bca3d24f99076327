"""A cache in the words of engines: by hand, for a model of 4 layers of 8 experts in a memory of 100 MB.

Every flag that an engine may print is an option that its documents name, as `engines/help/` keeps them.
"""

import re
import tomllib
from importlib.resources import files
from itertools import product

import pytest

from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.recommend import engines as package
from moereplay.sweeps.recommend.engines import NAMES, Card, Engine, engine, engines, not_listed, placed
from moereplay.sweeps.recommend.searched import flags
from moereplay.traces.schema import Geometry

GEOMETRY = Geometry(layers=4, experts=8, k=2, expert_bytes=(1_000_000,) * 4)


def said_of(size: int, kind: str = "gpu") -> dict[str, str]:
    return flags(placed(GEOMETRY, size, (30_000_000 + size) / 100_000_000), kind)


def test_a_cache_of_18_experts():
    """Two whole layers are 16 experts; 18 are 4 of each of 4 layers."""
    said = said_of(18_000_000)
    assert said["llama.cpp"] == "-ngl 99 --n-cpu-moe 2"
    assert said["ktransformers"].split()[:2] == ["--kt-num-gpu-experts", "4"]
    assert said["moe-infinity"] == "--device-memory-ratio 0.48"
    assert said["mixtral-offloading"] == "offload_per_layer=4"


def test_all_of_them_and_none_of_them():
    assert said_of(32_000_000)["llama.cpp"] == "-ngl 99"
    said = said_of(3_999_999)
    assert said["llama.cpp"] == "-ngl 99 --n-cpu-moe 4" and "--kt-num-gpu-experts 0" in said["ktransformers"]


def test_a_phone_has_the_flags_of_engines_without_a_gpu():
    said = said_of(18_000_000, "cpu")
    assert said["llama.cpp"] == "-ngl 0" and "--cache-mb 17" in said["bigmoeonedge"] and "ktransformers" not in said


def test_experts_of_two_sizes_are_counted_alike_everywhere():
    """39 layers of 5.0625 MiB and 8 of 18: 65 of each layer, 3,055, and room for 3,084 of mean size."""
    small, large = 5_308_416, 18 * 2**20
    geometry = Geometry(layers=47, experts=256, k=10, expert_bytes=(large,) * 8 + (small,) * 39)
    some, whole = (placed(geometry, size, 0.5) for size in (23_500_000_000, 256 * (8 * large + 39 * small)))
    assert (some.gpu_experts, some.slots) == (65, 3_084) and (whole.gpu_experts, whole.slots) == (256, 47 * 256)


PLACED = placed(GEOMETRY, 18_000_000, 0.5)
HELP = files(package) / "help"


def documented(made: Engine) -> set[str]:
    """Return the options, variables and settings that an engine's documents name."""
    texts = [(HELP / f"{name}.txt").read_text("utf-8") for name in made.help or (made.name,)]
    assert all(text.startswith("# ") for text in texts), "the first line names the source"
    rows = [line.partition(" | ") for text in texts for line in text.splitlines() if not line.startswith("#")]
    assert all(words for _, _, words in rows), "every line says what its options do"
    return {option for options, _, _ in rows for option in options.split()}


def printed(text: str) -> set[str]:
    """Return the options and names of settings in flags, without the values."""
    return {word.partition("=")[0] for word in re.sub(r'"[^"]*"', "", text).split() if re.match(r"-\D|\w+=", word)}


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_that_an_engine_prints_is_one_that_its_documents_name(name: str) -> None:
    made = engine(name)
    known, said = documented(made), set[str]()
    many = PLACED._replace(cards=(Card(2, 1), Card(2, 1)))
    stated = {"context": 8192, "kv_type": "q8_0", "batch": 2048}
    for mode, of, more, disk in product(made.modes, (PLACED, many, placed(GEOMETRY, 10**9, 1)), ({}, stated), (0, 1)):
        said |= printed(mode.render(of._replace(**more), disk))
    assert said <= known, said - known
    assert made.version and len(made.documented) > 10 and made.command
    assert {rule.knob for rule in made.prompts} <= known | {""}
    assert [rule.least for rule in made.prompts] == sorted(rule.least for rule in made.prompts)


def test_flags_that_engines_dropped_or_never_had() -> None:
    said = " ".join(template for made in engines() for mode in made.modes for template in mode.templates)
    assert printed("-fmoe --n-cpu-moe 3 A=1 -3") == {"-fmoe", "--n-cpu-moe", "A"}  # what `printed` finds
    assert not printed(said) & {"-fmoe", "--no-mmap", "--mode", "--slots", "--cache-mib", "device_memory_ratio"}
    frequency = [mode.flags for mode in engine("ktransformers").modes if "frequency" in mode.flags]
    assert all("--init-expert-location FILE.pt" in each for each in frequency) and frequency
    assert "pull request" in engine("vllm-pr-37190").state and "pull request" in engine("llama.cpp-pr-27861").state
    assert {"cpu"} in [set(mode.machines) for mode in engine("ik_llama.cpp").modes]


def test_what_is_stated_is_printed_with_the_placement() -> None:
    mode = engine("llama.cpp").modes[0]
    stated = PLACED._replace(context=16384, kv_type="q8_0", batch=2048)
    kv = "--cache-type-k q8_0 --cache-type-v q8_0"
    assert mode.render(stated) == f"-ngl 99 --n-cpu-moe 2 -c 16384 -fa on {kv} -b 2048 -ub 2048"
    assert mode.render(stated, 1).endswith(" --no-repack")  # a copy of what is mapped would fill memory
    assert mode.render(placed(GEOMETRY, 10**9, 1)) == "-ngl 99"
    # of a model with 3 layers without experts the first 3 + 2 blocks are named
    assert mode.render(placed(GEOMETRY, 18_000_000, 0.5, first=3)) == "-ngl 99 --n-cpu-moe 5"


def test_several_cards_keep_the_experts_of_their_own_last_layers() -> None:
    """7 layers, the first 3 without experts; the first card has 4 layers, the second 3 with the experts of one."""
    mode, of = engine("llama.cpp").modes[0], placed(GEOMETRY, 18_000_000, 0.5, first=3)
    both = of._replace(cards=(Card(4, 0), Card(3, 1)))
    assert both.away == [3, 4, 5]
    assert mode.render(both) == r'-ngl 99 -ts 4,3 -ot "blk\.(3|4|5)\.ffn_.*_exps\.=CPU"'
    assert mode.render(both._replace(cards=(Card(4, 1), Card(3, 3)))) == "-ngl 99 -ts 4,3"
    assert engine("ktransformers").modes[0].render(both).endswith(" --tp-size 2")
    assert engine("freetoken").modes[0].render(both) == "--moe-strategy offload --moe-cache-size 18"  # one card only


def test_engines_without_a_profile_have_a_reason() -> None:
    rows = not_listed()
    assert {"Strata", "imp", "SGLang"} <= {row.name for row in rows}
    assert not {row.name for row in rows} & set(NAMES)
    assert all(len(text) > 10 for row in rows for text in (row.scheme, row.why, row.source))


def test_a_template_with_an_unknown_quantity_is_refused() -> None:
    text = (files(package) / "mlx.toml").read_text("utf-8").replace('flags = ""', 'flags = "--size {bytes}"')
    with pytest.raises(ValueError, match="flags of unified memory: unknown bytes: expected batch, cache_mib, context"):
        Engine.model_validate(tomllib.loads(text))
    with pytest.raises(ConfigError, match="did you mean"):
        engine("llama.ccp")
