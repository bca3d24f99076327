"""Files that nobody meant: each reader refuses them at once, in one line that says what is wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moereplay.commands.options import named_experts
from moereplay.policies.contract import PolicyError
from moereplay.policies.files import register
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import plan
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.experiment.schema import Range
from moereplay.sweeps.jobs import open_traces, parse_shard
from moereplay.sweeps.policy_sets import read_sets
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import Folder, read_config
from moereplay.tracegen.prompts import read_prompts
from moereplay.traces.documents import DocumentError, content, from_json, from_toml
from moereplay.traces.schema import TraceError
from moereplay.traces.store import open_trace
from tests.kit.collecting import case
from tests.kit.command import moereplay_here
from tests.kit.fuzz_documents import TOMLS, YAMLS
from tests.kit.sweeping import store_trace

REFUSALS = (ConfigError, PolicyError, RecordError, TraceError, DocumentError, OSError)


def refusal(work: Callable[..., object], *given: Any, **named: Any) -> str:
    """Call a function that must refuse what it is given: return the one line, which comes within seconds of CPU."""
    began = time.process_time()
    with pytest.raises(REFUSALS) as refused:
        work(*given, **named)
    assert time.process_time() - began < 10
    assert "\n" not in str(refused.value)
    return str(refused.value)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "experiment": ("a.toml", read),
    "yaml": ("a.yaml", read),
    "platform": ("a.toml", lambda path: platform(str(path))),
    "sets": ("a.toml", read_sets),
    "warm": ("a.json", lambda path: named_experts("--warm", path)),
    "policy": ("a.py", register),
    "prompts": ("a.txt", lambda path: read_prompts([path])),
    "parquet": ("a.parquet", lambda path: read_prompts([path])),
    "checkpoint": ("config.json", lambda path: read_config(Folder(path.parent, "made", ""))),
    "trace": ("zarr.json", lambda path: open_trace(path.parent)),
}


def test_what_is_no_file_or_without_an_end_is_refused_unread(tmp_path: Path) -> None:
    for reader, (name, opens) in READERS.items():
        for kind in ("pipe", "device", "sparse"):
            path = tmp_path / reader / kind / name
            path.parent.mkdir(parents=True)
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "device":
                path.symlink_to("/dev/zero")
            else:
                path.touch()
                os.truncate(path, 8 << 30)
            with case(reader, kind):
                assert refusal(opens, path)


def test_toml_that_no_stack_or_integer_holds_is_refused() -> None:
    for name in ["digits", "hex", "brackets", "brackets_closed", "braces", "dotted", "dotted_quoted"]:
        said = refusal(from_toml, TOMLS[name])
        assert "nested deeper than 64 levels" in said or "an integer of more than 300 digits" in said


@pytest.mark.slow
def test_hostile_yaml_is_refused_with_its_fault(tmp_path: Path) -> None:
    for name, why in [
        ("numeric_setting", "the key 1 "),
        ("boolean_key", "'yes'"),
        ("bomb", "its aliases expand to more than 1,000,000 values"),
        ("merge_bomb", "its aliases expand to more than 1,000,000 values"),
        ("cycle", "an alias refers to a list or table that contains it"),
        ("bad_int", "unknown tag tag:yaml.org,2002:int in line 2"),
        ("brackets", "nested too deep"),
        ("deep", "nested deeper than 64 levels"),
    ]:
        (tmp_path / "a.yaml").write_text(YAMLS[name])
        assert why in refusal(read, tmp_path / "a.yaml")


def test_yaml_may_name_a_table_and_use_it_again(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: &all {seed: 1}\ntraces: [a.zarr]\ninclude: [*all, {eviction: lru}]\n")
    assert read(tmp_path / "a.yaml").include == [{"seed": 1}, {"eviction": "lru"}]


def test_yaml_merges_no_tables(tmp_path: Path) -> None:
    """Merge keys are of YAML 1.1 alone."""
    (tmp_path / "a.yaml").write_text("base: &all {seed: 1}\ntraces: [a.zarr]\ninclude: [{<<: *all, eviction: lfu}]\n")
    assert "the key << merges tables only in YAML 1.1" in refusal(read, tmp_path / "a.yaml")


def test_json_that_no_stack_or_integer_holds_is_refused() -> None:
    for text in ["9" * 4301, "[" * 100_000, '{"a":' * 100_000, "[" * 70 + "]" * 70, f"[{10**310}]"]:
        assert refusal(from_json, text)


def test_a_document_within_the_limits_is_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[" * 64 + str(10**300) + "]" * 64)
    found = from_json(content(tmp_path / "a"))
    for _ in range(64):
        (found,) = found
    assert found == 10**300


def test_a_glob_of_traces_from_the_root_or_of_nothing_is_told(tmp_path: Path) -> None:
    for pattern in ["/proc/nonexist/*.zarr", "***", "a\0*", "**x"]:
        said = refusal(open_traces, [pattern], tmp_path, tmp_path / "e.toml")
        assert any(why in said for why in ("nothing matches", "invalid glob", "a zero byte"))


def test_an_address_without_a_name_is_refused(tmp_path: Path) -> None:
    for address in ["s3://", "s3:///", "file:///..", "a\0b"]:
        said = refusal(open_traces, [address], tmp_path, tmp_path / "e.toml")
        assert "s3://bucket/NAME.zarr" in said or "a zero byte" in said


def test_a_glob_from_the_root_finds_traces(tmp_path: Path) -> None:
    store_trace(tmp_path / "a.zarr")
    assert len(open_traces([f"{tmp_path}/*.zarr"], Path("/"), tmp_path / "e.toml")) == 1


def test_a_capacity_beyond_all_traces_is_refused(tmp_path: Path) -> None:
    trace = open_trace(store_trace(tmp_path / "a.zarr"))
    text = "99999999999999999999999GB"
    said = refusal(plan, trace, configure(capacity=text))
    assert said.startswith(f"capacity {text} is more than 2**62 bytes")
    assert "has 5,002 characters" in refusal(configure, capacity="9" * 5000 + "GB")


def test_a_figure_that_no_machine_has_is_refused() -> None:
    for figures in [
        "link.latency_ns=99999999999999999999",
        "link.depth=99999999999999999999",
        "compute.flops=1e-300",
        "compute.launch_ns=9223372036854775807",
    ]:
        assert figures.split("=")[0] in refusal(platform, f"a100-5gbps:{figures}")


def test_a_link_that_takes_years_is_refused(tmp_path: Path) -> None:
    trace = store_trace(
        tmp_path / "a.zarr", geometry={"layers": 1, "experts": 6, "k": 2, "expert_bytes": (10**9,)}, recall=()
    )
    slow = ("--platform", "a100-5gbps:link.bytes_per_s=1")
    done = moereplay_here("replay", trace, *slow, "--capacity", "50%", "--engine", "reference")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "more than eleven days for one expert or pass; raise its bytes_per_s" in done.stderr


def test_a_range_without_a_middle_is_refused() -> None:
    for ends in [(0, float("inf")), (float("nan"), 1), (-1e308, 1e308)]:
        with case(ends), pytest.raises(ValueError, match=r"finite"):
            Range(low=ends[0], high=ends[1])


def test_a_share_is_two_whole_numbers() -> None:
    for text in ["²/²", "1/" + "9" * 5000, "1/99999999999999999999"]:
        assert "--shard" in refusal(parse_shard, text)


def test_a_number_of_tokens_is_a_whole_number() -> None:
    for setting in [{"passes": "chunk:²"}, {"passes": "chunk:" + "9" * 5000}, {"reset": "²"}]:
        assert next(iter(setting)) in refusal(configure, **setting)


def test_a_message_stays_a_line_whatever_it_quotes(tmp_path: Path) -> None:
    done = moereplay_here("platforms", "x\n\x1b[31m" * 2000, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert len(done.stderr) < 1100 and "\x1b" not in done.stderr


def test_a_synthetic_trace_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    for setting in [("--exponent", "inf"), ("--exponent", 2**64), ("--decode-tokens", 99_999_999_999)]:
        done = moereplay_here("synthesise", "--out", tmp_path / "a.zarr", *setting)
        assert done.returncode == 2 and done.stderr.count("\n") in (1, 4)  # with two lines of usage, and an empty one
        assert any(said in done.stderr for said in ("expected at most 100", "a finite number", "too many for memory"))


def test_a_path_that_is_no_utf8_is_told(tmp_path: Path) -> None:
    done = moereplay_here("inspect", tmp_path / "\udce9.zarr")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "\\udce9.zarr does not exist" in done.stderr
