"""Experiment files: what they expand to, and what a wrong one is told."""

import json
import math
import re
from pathlib import Path

import pytest

from moereplay.policies.contract import PolicyError
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.experiment import schema
from moereplay.sweeps.experiment.expand import configurations
from moereplay.sweeps.experiment.file import from_yaml, read
from moereplay.sweeps.experiment.schema import configuration
from moereplay.traces.documents import DocumentError, from_json, from_toml
from tests.kit.every import every

ROOT = Path(__file__).resolve().parents[2]


def expanded(tmp_path: Path, text: str, *changes: str, name: str = "e.toml") -> list[ReplayConfig]:
    file = tmp_path / name
    file.write_text(text if name.endswith("yaml") else f'traces = ["a.zarr"]\n{text}')
    return configurations(read(file, changes), file)


def refusal(tmp_path: Path, text: str, *changes: str) -> str:
    with pytest.raises((ConfigError, PolicyError)) as refused:
        expanded(tmp_path, text, *changes)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def settings(configs: list[ReplayConfig], *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(config, name) for name in names) for config in configs]


def test_a_file_without_axes_is_one_configuration(tmp_path):
    assert expanded(tmp_path, "[base]\ncapacity = '7%'") == [configure(capacity="7%")]


def test_a_grid_is_every_combination_in_the_order_of_the_file(tmp_path):
    found = expanded(tmp_path, "[grid]\ncapacity = ['5%', '9%']\neviction = ['lru', 'fifo']")
    assert settings(found, "capacity", "eviction") == [("5%", "lru"), ("5%", "fifo"), ("9%", "lru"), ("9%", "fifo")]


def test_zipped_lists_move_in_step_and_multiply_the_grid(tmp_path):
    text = "[grid]\nseed = [1, 2]\n[[zip]]\neviction = ['lru', 'fifo']\ncapacity = ['5%', '9%']"
    assert settings(expanded(tmp_path, text), "seed", "eviction", "capacity") == [
        (1, "lru", "5%"),
        (1, "fifo", "9%"),
        (2, "lru", "5%"),
        (2, "fifo", "9%"),
    ]


def test_included_configurations_join_and_repeated_ones_count_once(tmp_path):
    text = "[grid]\neviction = ['lru']\n[[include]]\neviction = 'belady'\n[[include]]\neviction = 'lru'"
    assert settings(expanded(tmp_path, text), "eviction") == [("lru",), ("belady",)]


def test_an_excluded_policy_stands_for_all_its_parameters(tmp_path):
    text = "[grid]\neviction = ['lru', 'least_stale:order=a']\ncapacity = ['5%', '9%', '12%']\n"
    text += "[[exclude]]\neviction = 'least_stale'\ncapacity = ['5%', '9%']"
    kept = settings(expanded(tmp_path, text), "eviction", "capacity")
    assert kept == [("lru", "5%"), ("lru", "9%"), ("lru", "12%"), ("least_stale:order=a", "12%")]


def test_an_excluded_default_counts_where_nothing_is_said(tmp_path):
    text = "[grid]\neviction = ['lru', 'fifo']\n[[exclude]]\nprefetch = 'none'\neviction = 'fifo'"
    assert settings(expanded(tmp_path, text), "eviction") == [("lru",)]


def test_a_policy_whose_name_begins_with_that_of_an_excluded_one_stays(tmp_path):
    text = "[grid]\neviction = ['lru', 'lru_k']\n[[exclude]]\neviction = 'lru'"
    assert settings(expanded(tmp_path, text), "eviction") == [("lru_k",)]


def test_what_a_preset_sets_is_excluded_by_it(tmp_path):
    """specmd-4 evicts by lru, specmd-5 by least_stale: [[exclude]] sees what a configuration has, not how it got it."""
    text = "[grid]\npreset = ['specmd-4', 'specmd-5']\n[[exclude]]\neviction = 'least_stale'"
    assert {config.eviction for config in expanded(tmp_path, text)} == {"lru"}
    assert "leaves no configuration" in refusal(tmp_path, "[base]\npreset = 'specmd-5'\n" + EXCLUDED)


EXCLUDED = "[[exclude]]\neviction = 'least_stale'"


def test_a_parameter_with_a_dot_is_excluded_by_either_spelling(tmp_path):
    text = "[base]\nprefetch = 'top_k'\n[grid]\nprefetch.depth = [1, 2]\n[[exclude]]\n"
    for pattern in ("prefetch = 'top_k:depth=2'", "prefetch.depth = 2"):
        assert settings(expanded(tmp_path, text + pattern), "prefetch") == [("top_k:depth=1",)]


@every("axis", ({"low": 1e9, "high": 8e9}, {"low": 2e6, "high": 3e6, "integer": True}))
def test_a_range_with_a_suffix_has_no_exponents(axis):
    """`4.5e+09B` is no capacity."""
    drawn = schema.Range(suffix="B", **axis).at(0.5)
    assert drawn in ("4500000000B", "2500000B")
    assert configuration({"capacity": drawn}).capacity == drawn


def test_each_integer_of_a_range_has_the_same_part_of_it():
    whole = schema.Range(low=1, high=3, integer=True)
    assert [whole.at((at + 0.5) / 300) for at in range(300)] == [1] * 100 + [2] * 100 + [3] * 100
    assert whole.at(1) == 3


def test_settings_with_a_dot_become_part_of_their_owner(tmp_path):
    text = "[base]\nprefetch = 'top_k'\n[grid]\nprefetch.depth = [1, 2]\n'platform.link.bytes_per_s' = [1e9]"
    assert settings(expanded(tmp_path, text), "prefetch", "platform") == [
        ("top_k:depth=1", "a100-5gbps:link.bytes_per_s=1000000000"),
        ("top_k:depth=2", "a100-5gbps:link.bytes_per_s=1000000000"),
    ]


def test_a_random_draw_is_a_part_of_the_grid_and_the_same_again(tmp_path):
    text = "[grid]\nseed = [0,1,2,3,4,5,6,7,8,9]\neviction = ['lru', 'fifo', 'lfu']\n"
    whole, drawn = expanded(tmp_path, text), expanded(tmp_path, text + "[random]\nn = 12\nseed = 3")
    assert len(drawn) == 12
    assert set(drawn) < set(whole)
    assert drawn == expanded(tmp_path, text + "[random]\nn = 12\nseed = 3")
    assert drawn != expanded(tmp_path, text + "[random]\nn = 12\nseed = 4")
    assert set(expanded(tmp_path, text + "[random]\nn = 99")) == set(whole)


def test_ranges_are_drawn_between_their_ends(tmp_path):
    text = "[grid]\ncapacity = {low = 1, high = 50, log = true, suffix = '%'}\n"
    text += "seed = {low = 3, high = 9, integer = true}\n"
    drawn = expanded(tmp_path, text + "[random]\nn = 40\nseed = 1")
    percents = [float(config.capacity.removesuffix("%")) for config in drawn]
    assert all(1 <= percent <= 50 for percent in percents)
    assert sorted(percents)[len(percents) // 2] < 15  # the middle of a logarithmic range is near 7
    assert {config.seed for config in drawn} == {3, 4, 5, 6, 7, 8, 9}


def test_settings_from_the_command_line_stand_above_the_file(tmp_path):
    text = "[base]\ncapacity = '5%'\n[grid]\neviction = ['lru']"
    found = expanded(tmp_path, text, "base.capacity=9%", 'grid.eviction=["fifo", "lfu"]', "base.seed=4")
    assert settings(found, "capacity", "eviction", "seed") == [("9%", "fifo", 4), ("9%", "lfu", 4)]


def test_yaml_says_the_same_as_toml(tmp_path):
    text = "traces: [a.zarr]\ngrid:\n  eviction: [lru, fifo]\n  prefetch: ['none']\nrandom: {n: 1, seed: 2}\n"
    toml = "[grid]\neviction = ['lru', 'fifo']\nprefetch = ['none']\n[random]\nn = 1\nseed = 2"
    assert expanded(tmp_path, text, name="e.yaml") == expanded(tmp_path, toml)


@every(
    "text, value",
    [
        *(
            ("no", "no"),
            ("on", "on"),
            ("Yes", "Yes"),
            ("1:30", "1:30"),
            ("1_000", "1_000"),
            ("2020-01-01", "2020-01-01"),
        ),
        *(("true", True), ("FALSE", False), ("~", None), ("", None), ("null", None), ("'no'", "no"), ('"010"', "010")),
        *(("12", 12), ("-7", -7), ("+3", 3), ("0", 0), ("0o17", 15), ("0xff", 255), ("0b1", "0b1"), ("-0x1", "-0x1")),
        *(
            ("1.5", 1.5),
            (".5", 0.5),
            ("1e3", 1000.0),
            ("5.", 5.0),
            ("-.inf", -math.inf),
            ("1.2.3", "1.2.3"),
            ("=", "="),
        ),
        *(("[1, [a]]", [1, ["a"]]), ("{b: {c: 010x}}", {"b": {"c": "010x"}}), ("|\n  x\n", "x\n"), ("!!str a", "a")),
    ],
)
def test_yaml_is_that_of_version_1_2(text, value):
    found = from_yaml(f"a: {text}".encode())["a"]
    assert (found, type(found)) == (value, type(value))


@every(
    "text, said",
    [
        ("grid: {eviction: [lru], capacity: ['25%'], eviction: [lfu]}", "'?eviction'? is repeated in one table"),
        ("base: {a: 1}\ngrid: {b: 1}\nbase: {c: 1}", "base is repeated"),
        ("a: [{b: 1, 'b': 2}]", "b is repeated"),
        ("a: 010", "010 is octal in YAML 1.1 and decimal in YAML 1.2; write 10"),
        ("a: [-007]", "-007 is octal"),
        ("x: &x {a: 1}\ny: {<<: *x, b: 2}", "<< merges tables"),
        ("a: !!python/object/apply:os.system [x]", "unknown tag tag:yaml.org,2002:python/object/apply:os.system"),
        ("a: !mine x", "unknown tag !mine"),
        ("a: !!float 1", "unknown tag"),
        ("a: !!set {x}", "unknown tag"),
        ('traces: ["\\ud800.zarr"]', "unpaired surrogate"),
        ('"\\udcff": 1', "unpaired surrogate"),
        ("1: 2", "the key 1 "),
        ("[a]: 2", "in quotes"),
        ("a: &a [*a]", "contains it"),
        (
            "a: &a [1, 1]\n"
            + "\n".join(f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]" for n in range(22)),
            "aliases",
        ),
        (f"a: {'9' * 5000}", "an integer of more than 300 digits"),
        ("a: " + "[" * 1000, "nested"),
    ],
    apart=True,
)
def test_yaml_that_readers_take_differently_is_refused_in_one_line(tmp_path, text, said):
    with pytest.raises(DocumentError, match=said) as refused:
        from_yaml(text.encode())
    assert "\n" not in str(refused.value) and str(refused.value).isprintable()
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"e\.yaml: "):
        read(tmp_path / "e.yaml")


def test_a_key_that_json_or_toml_has_twice_is_refused():
    for text in ('{"a": 1, "a": 2}', '[{"b": {"a": 1, "c": 1, "a": 1}}]'):
        with pytest.raises(DocumentError, match="'a' is repeated in one table"):
            from_json(text)
    for text in ("a = 1\na = 2", "[a]\nb = 1\n[a]\nc = 1"):
        with pytest.raises(DocumentError):
            from_toml(text)


REFUSALS = {
    "table": ("[gird]\neviction = ['lru']", "e.toml: unknown key 'gird': did you mean grid?"),
    "setting": ("[grid]\nevicton = ['lru']", "e.toml: [grid]: unknown setting 'evicton': did you mean eviction?"),
    "zipped setting": ("[[zip]]\nsed = [1]", "e.toml: [[zip]] 1: unknown setting 'sed': did you mean seed?"),
    "policy": ("[grid]\neviction = ['lur']", "[grid] eviction: unknown eviction policy 'lur': did you mean lru?"),
    "parameter": (
        "[base]\nprefetch = 'top_k'\nprefetch.dept = 2".replace("prefetch.dept", "'prefetch.dept'"),
        "has no parameter 'dept': did you mean depth?",
    ),
    "platform": ("[base]\nplatform = 'a100'", "[base] platform: unknown platform 'a100'"),
    "figure": ("[base]\n'platform.link.bytes' = 1", "did you mean link.bytes_per_s=?"),
    "word": ("[grid]\ncontract = ['atomc']", "[grid] contract: unknown value 'atomc': did you mean atomic?"),
    "empty list": ("[grid]\neviction = []", "grid.eviction"),
    "list for a value": ("[base]\neviction = ['lru']", "base.eviction"),
    "unequal lists": ("[[zip]]\nseed = [1, 2]\neviction = ['lru']", "[[zip]] 1: lists of equal length are required"),
    "endless grid": ("[grid]\nseed = {low = 1, high = 2}", "[random] with n"),
    "a range of no capacity": ("[grid]\ncapacity = {low = 1, high = 2, suffix = 'x'}\n[random]\nn = 1", "capacity"),
    "a range without an integer": (
        "[grid]\nseed = {low = 1.2, high = 1.8, integer = true}\n[random]\nn = 1",
        "no integer lies between",
    ),
    "falling range": ("[grid]\nseed = {low = 2, high = 1}\n[random]\nn = 1", "expected low < high"),
    "an excluded policy that does not exist": (
        "[grid]\neviction = ['lru', 'fifo']\n[[exclude]]\neviction = ['fifo', 'lruu']",
        "[[exclude]] eviction: unknown eviction policy 'lruu'",
    ),
    "nothing left": ("[[exclude]]\neviction = 'lru'", "[[exclude]] leaves no configuration"),
    "no TOML": ("[grid", "expected an experiment in TOML"),
}


@every("name", REFUSALS, apart=True)
def test_a_wrong_file_is_told_where_and_what_was_meant(name, tmp_path):
    text, said = REFUSALS[name]
    answer = refusal(tmp_path, text)
    assert said in answer
    assert "e.toml: " in answer


def test_a_wrong_change_is_told_what_to_write(tmp_path):
    assert "table.key=value" in refusal(tmp_path, "", "capacity")
    assert "did you mean base?" in refusal(tmp_path, "", "bas.capacity=5%")


def test_the_example_in_the_documentation_is_valid(tmp_path):
    """Of the module; the page about sweeps shows the same kind of file."""
    examples = [re.sub(r"(?m)^    ", "", (schema.__doc__ or "").split("\n\n", 1)[1])]
    examples += re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "sweeps.md").read_text(), re.DOTALL)
    assert len(examples) >= 2
    policy = re.search(r"```python\n(\"\"\"newest\.py: .*?)```", (ROOT / "docs" / "policies.md").read_text(), re.DOTALL)
    (tmp_path / "newest.py").write_text(policy[1] if policy else "")
    for text in examples:
        (tmp_path / "e.toml").write_text(text)
        assert configurations(read(tmp_path / "e.toml"), tmp_path / "e.toml")


def test_the_published_schema_is_the_one_of_the_code():
    """`moereplay sweep schema > docs/experiment.schema.json` writes it anew."""
    published = json.loads((ROOT / "docs" / "experiment.schema.json").read_text())
    assert published == schema.json_schema()
    tables = ("base", "grid")
    settings = {*ReplayConfig.model_fields, "preset"}
    assert all(set(published["properties"][name]["properties"]) == settings for name in tables)


def test_a_preset_lies_below_every_other_setting():
    whole = configuration({"preset": "specmd-1", "eviction": "fifo"})
    assert (whole.eviction, whole.capacity) == ("fifo", configuration({"preset": "specmd-1"}).capacity)
    with pytest.raises(ConfigError, match="did you mean specmd-1"):
        configuration({"preset": "specmd1"})


def test_a_setting_is_checked_as_the_command_line_checks_it():
    assert configuration({"prefetch": "top_k", "prefetch.factor": 1.5}) == configure(prefetch="top_k:factor=1.5")
