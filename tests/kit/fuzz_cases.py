"""The cases of the fuzz: every verb that reads files, beside every kind of damage; and options that no one means."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from moereplay.traces.stored import metadata_digest
from tests.kit import count_samples
from tests.kit.damage import NINES, Damage, damages, json_damage
from tests.kit.fuzz_documents import JSONS, TOMLS, YAMLS
from tests.kit.fuzz_materials import CHECKPOINT, COMMANDS, REPLAY, TOTALS
from tests.kit.fuzz_options import OPTIONS
from tests.kit.recordings import ROOT

Build = Callable[[Path, Path, Random], None]
Judge = Callable[[Path, int, str], list[str]]
JSON_TIMES = 12  #: draws of `json_damage` per document


@dataclass(frozen=True)
class Case:
    """A folder to prepare and a command to run in it."""

    name: str  #: verb/file/damage
    words: tuple[str, ...]
    build: Build
    codes: tuple[int, ...] = ()  #: exit codes that are right beside 0 and 2
    judge: Judge | None = None  #: (materials, exit code, stdout) -> what is wrong
    needs: str = ""  #: the material that takes time to make


def cases() -> list[Case]:
    """All of them, with names that differ."""
    found = [*_of_files(), *_of_stores(), *_of_checkpoints(), *_of_documents(), *_of_options()]
    assert len({case.name for case in found}) == len(found)
    return found


# Damaged files


def _of_files() -> Iterator[Case]:
    """A good file of each kind in `in/`, damaged."""
    for verb, file, words in FILES:
        kinds = damages()
        if file.endswith(".json"):
            kinds |= {f"json{at}": json_damage for at in range(JSON_TIMES)}
        for name, damage in kinds.items():
            taken = file.split("/")[0]
            build = partial(_damaged, taken=taken, file=file, damage=damage)
            yield Case(f"{verb}/{file}/{name}", _words(words), build, needs=taken if taken in COMMANDS else "")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _damaged(materials: Path, folder: Path, rng: Random, *, taken: str, file: str, damage: Damage) -> None:
    _take(materials, folder, taken)
    if (materials / "tiny.zarr").exists() and taken != "tiny.zarr":
        _take(materials, folder, "tiny.zarr")
    damage(sorted((folder / "in").glob(file))[0], rng)


def _take(materials: Path, folder: Path, name: str) -> None:
    """A material, linked: what damages it makes a new file."""
    source, target = materials / name, folder / "in" / name
    target.parent.mkdir(exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    else:
        os.link(source, target)


IMPORT = "--expert-bytes 100 --out out.zarr"
OWN_NAMES = "--columns token=pos,layer=moe_layer,experts=topk,weights=gate"
PROFILE = "--out profile.json"
CONTRIBUTED = [file.name for file in sorted((ROOT / "contrib/importers/tests/samples").iterdir()) if file.suffix]
COUNTS = [sample.name for sample in count_samples.ALL if "." in sample.name]
SWEEP = "sweep run in/experiment.{} --dry-run --engine reference --workers 1 --out out"
PLAIN = "replay in/tiny.zarr --engine reference --workers 1 --capacity 40%"
#: (verb, the file that is damaged, words of the command).
FILES = (
    ("import", "samples/generic.csv", f"import in/samples/generic.csv {IMPORT}"),
    ("import", "samples/generic.jsonl", f"import in/samples/generic.jsonl {IMPORT}"),
    ("import", "samples/route_trace.csv", f"import in/samples/route_trace.csv {IMPORT}"),
    ("import", "samples/own_names.tsv", f"import in/samples/own_names.tsv {OWN_NAMES} {IMPORT}"),
    ("import", "samples/own_names.parquet", f"import in/samples/own_names.parquet {OWN_NAMES} {IMPORT}"),
    ("import", "samples/array.npy", f"import in/samples/array.npy {IMPORT}"),
    ("import", "samples/sglang_recorder/*_0.pt", f"import in/samples/sglang_recorder {IMPORT}"),
    ("import", "samples/sglang_response.jsonl", f"import in/samples/sglang_response.jsonl {IMPORT}"),
    ("import", "samples/vllm_response/a.json", f"import in/samples/vllm_response {IMPORT}"),
    ("import", "samples/router_logits.pt", f"import in/samples/router_logits.pt {IMPORT}"),
    ("import", "samples/gptoss_json/run_a.json", f"import in/samples/gptoss_json {IMPORT}"),
    ("import", "samples/gptoss_npz/decode.npz", f"import in/samples/gptoss_npz {IMPORT}"),
    ("import", "samples/gptoss_npz/decode.meta.json", f"import in/samples/gptoss_npz {IMPORT}"),
    *(("import", f"contributed/{name}", f"import in/contributed/{name} {IMPORT}") for name in CONTRIBUTED),
    *(("import", f"counts/{name}", f"import in/counts/{name} {PROFILE}") for name in COUNTS),
    ("import", "counts/ranks/rank_0.csv", f"import in/counts/ranks {PROFILE}"),
    ("replay", "platform.toml", f"{PLAIN} --platform in/platform.toml --out out"),
    ("platforms", "platform.toml", "platforms in/platform.toml"),
    ("replay", "warm.json", f"{PLAIN} --warm in/warm.json"),
    ("replay --profile", "warm.json", f"{PLAIN} --eviction static:profile=given --profile in/warm.json"),
    ("replay", "policy.py", f"{PLAIN} --policy-file in/policy.py --eviction newest --out out"),
    ("policies", "policy.py", "policies --policy-file in/policy.py newest"),
    ("sweep run", "experiment.toml", SWEEP.format("toml")),
    ("sweep run", "experiment.yaml", SWEEP.format("yaml")),
    ("tune", "experiment.toml", "tune in/experiment.toml --trials 1 --workers 1 --sampler random --out out"),
    ("validate", "sets.toml", "validate in/tiny.zarr --sets in/sets.toml --model miniature"),
    ("record", "prompts.txt", "record nowhere/at/all --prompts in/prompts.txt --out out.zarr"),
    ("record", "prompts.jsonl", "record nowhere/at/all --prompts in/prompts.jsonl --field prompt --out out.zarr"),
    ("record", "prompts.jsonl.gz", "record nowhere/at/all --prompts in/prompts.jsonl.gz --out out.zarr"),
    ("record", "prompts.csv", "record nowhere/at/all --prompts in/prompts.csv --out out.zarr"),
    ("record", "prompts.parquet", "record nowhere/at/all --prompts in/prompts.parquet --out out.zarr"),
    ("record --text", "prompts.txt", "record nowhere/at/all --text in/prompts.txt --out out.zarr"),
    ("live", "prompts.jsonl", "live nowhere/at/all --prompts in/prompts.jsonl --record out.zarr"),
    ("plot", "replays/part-*/layers.parquet", "plot in/replays --out figures --figure hit_rate_by_capacity"),
    ("plot", "before/replays/part-*.parquet", "plot in/before/replays --out figures --figure hit_rate_by_capacity"),
    ("plot", "curves/curve-*.parquet", "plot in/curves --out figures"),
    ("sweep show", "sweep/part-*/provenance.json", "sweep show in/sweep"),
    ("sweep show", "sweep/part-*/configurations.parquet", "sweep show in/sweep --json"),
    ("sweep merge", "sweep/part-*/provenance.json", "sweep merge in/sweep --out out"),
    ("sweep merge", "sweep/part-*/bounds.parquet", "sweep merge in/sweep --out out"),
    ("plot", "sweep/part-*/layers.parquet", "plot in/sweep --out figures --figure hit_rate_by_capacity"),
)


# Hostile stores: whoever edits one can also write the digest that fits


def _of_stores() -> Iterator[Case]:
    for verb, words, codes in STORES:
        for file in ("zarr.json", "chosen/zarr.json", "chosen/c.0.0.0"):
            for name, damage in damages().items():
                build = partial(_damaged, taken="tiny.zarr", file=f"tiny.zarr/{file}", damage=damage)
                judge = _same_totals if verb == "replay" else None
                yield Case(f"{verb}/{file}/{name}", words, build, codes, judge)
        for file in ("zarr.json", "chosen/zarr.json", "request_offsets/zarr.json", "lookahead/zarr.json"):
            for at in range(JSON_TIMES if verb == "replay" else JSON_TIMES // 3):
                yield Case(f"{verb}/{file}/resealed{at}", words, partial(_resealed, file=file), codes)
        for name, change in EDITS.items():
            yield Case(f"{verb}/chosen/zarr.json/{name}", words, partial(_edited, change=change), codes)


STORES = (
    ("replay", ("replay", "in/tiny.zarr", *REPLAY), ()),
    ("inspect", ("inspect", "in/tiny.zarr", "--full"), (1,)),
    ("curve", ("curve", "in/tiny.zarr", "--eviction", "lru", "--out", "out"), ()),
    ("traces merge", ("traces", "merge", "in/tiny.zarr", "in/tiny.zarr", "--out", "out.zarr"), ()),
)


def _same_totals(materials: Path, code: int, out: str) -> list[str]:
    """A replay that ends well has the result of the undamaged trace."""
    if code:
        return []
    expected = json.loads((materials / TOTALS).read_text())["totals"]
    return [] if json.loads(out)["totals"] == expected else ["other totals"]


def _resealed(materials: Path, folder: Path, rng: Random, *, file: str) -> None:
    _take(materials, folder, "tiny.zarr")
    json_damage(folder / "in" / "tiny.zarr" / file, rng)
    _seal(folder / "in" / "tiny.zarr")


def _edited(materials: Path, folder: Path, rng: Random, *, change: Callable[[dict[str, Any]], object]) -> None:
    _take(materials, folder, "tiny.zarr")
    path = folder / "in" / "tiny.zarr" / "chosen" / "zarr.json"
    document = json.loads(path.read_bytes())
    change(document)
    _write(path, json.dumps(document))
    _seal(folder / "in" / "tiny.zarr")


def _seal(store: Path) -> None:
    try:
        group = json.loads((store / "zarr.json").read_bytes())
        group["attributes"]["digest"] = metadata_digest(store, group)
        text = json.dumps(group)
    except Exception:  # what is too broken for a digest stays so
        return
    _write(store / "zarr.json", text)


def _write(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def _grid(shape: list[Any]) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["chunk_grid"]["configuration"].update(chunk_shape=shape)


def _inner(shape: list[Any]) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["codecs"][0]["configuration"].update(chunk_shape=shape)


def _nested(document: dict[str, Any]) -> None:
    """Shards within shards within shards."""
    for _ in range(200):
        outer = json.loads(json.dumps(document["codecs"][0]["configuration"]) if _ == 0 else "{}")
        inner = {"name": "sharding_indexed", "configuration": outer or {"codecs": document["codecs"]}}
        document["codecs"] = [inner]


#: Of an array's zarr.json.
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "chunk_0": _grid([0, 0, 0]),
    "chunk_negative": _grid([-1, 3, 2]),
    "chunk_huge": _grid([2**62, 2**62, 2**62]),
    "chunk_flat": _grid([]),
    "chunk_text": _grid(["a", None, {}]),
    "inner_0": _inner([0, 0, 0]),
    "inner_huge": _inner([2**40, 3, 2]),
    "shape_huge": lambda document: document.update(shape=[2**62, 3, 2]),
    "shape_negative": lambda document: document.update(shape=[-1, 3, 2]),
    "shape_text": lambda document: document.update(shape="all"),
    "shape_nested": lambda document: document.update(shape=[[1], [2], [3]]),
    "no_codecs": lambda document: document.update(codecs=[]),
    "unknown_codec": lambda document: document.update(codecs=[{"name": "pickle"}]),
    "codec_number": lambda document: document.update(codecs=[7]),
    "nested_shards": _nested,
    "type": lambda document: document.update(data_type="string"),
    "type_object": lambda document: document.update(data_type={"name": "structured"}),
    "fill_text": lambda document: document.update(fill_value="zero"),
    "version_2": lambda document: document.update(zarr_format=2),
    "group": lambda document: document.update(node_type="group"),
    "separator": lambda document: document["chunk_key_encoding"].update(configuration={"separator": "../"}),
    "transformer": lambda document: document.update(storage_transformers=[{"name": "x"}]),
}


# Hostile checkpoints


def _of_checkpoints() -> Iterator[Case]:
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        kinds = damages()
        if file.endswith(".json"):
            kinds |= {f"json{at}": json_damage for at in range(JSON_TIMES)}
        for name, damage in kinds.items():
            build = partial(_damaged, taken="checkpoint", file=f"checkpoint/{file}", damage=damage)
            words = _words("record in/checkpoint --prompts in/prompts.txt --max-new-tokens 1 --out out.zarr")
            yield Case(f"record/{file}/{name}", words, partial(_with_prompts, build=build), needs=CHECKPOINT)
    for name, header in HEADERS.items():
        words = _words("record in/checkpoint --prompts in/prompts.txt --max-new-tokens 1 --out out.zarr")
        build = partial(_headed, header=header)
        yield Case(f"record/safetensors/{name}", words, partial(_with_prompts, build=build), needs=CHECKPOINT)


def _with_prompts(materials: Path, folder: Path, rng: Random, *, build: Build) -> None:
    build(materials, folder, rng)
    _take(materials, folder, "prompts.txt")


def _headed(materials: Path, folder: Path, rng: Random, *, header: str) -> None:
    _take(materials, folder, "checkpoint")
    path = folder / "in" / "checkpoint" / "model.safetensors"
    path.unlink()
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(64))


#: Of safetensors files that claim what they do not hold.
HEADERS = {
    "715_gib": '{"x": {"dtype": "F32", "shape": [191931351040], "data_offsets": [0, 767725404160]}}',
    "negative": '{"x": {"dtype": "F32", "shape": [-4], "data_offsets": [-16, 64]}}',
    "digits": f'{{"x": {{"dtype": "F32", "shape": [4], "data_offsets": [0, {NINES}]}}}}',
    "huge": f'{{"x": {{"dtype": "F32", "shape": [4], "data_offsets": [0, {"9" * 4000}]}}}}',
    "infinite": '{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, Infinity]}}',
    "float": '{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 6.4e1]}}',
    "deep": "[" * 100_000,
    "list": "[]",
    "unknown": '{"x": {"dtype": "EVIL", "shape": [16], "data_offsets": [0, 64]}}',
    "other": '{"x": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}',
}


# Hostile documents, written for it


def _of_documents() -> Iterator[Case]:
    for suffix, texts in (("toml", TOMLS), ("yaml", YAMLS), ("json", JSONS)):
        for name, text in texts.items():
            for verb, words in READERS[suffix].items():
                build = partial(_written, name=f"given.{suffix}", text=text)
                yield Case(f"{verb}/given.{suffix}/{name}", _words(words), build)


def _written(materials: Path, folder: Path, rng: Random, *, name: str, text: str) -> None:
    _take(materials, folder, "tiny.zarr")
    (folder / "in" / name).write_bytes(text.encode("utf-8", "surrogatepass"))


READERS = {
    "toml": {
        "sweep run": "sweep run in/given.toml --dry-run --engine reference --workers 1 --out out",
        "platforms": "platforms in/given.toml",
        "replay": f"{PLAIN} --platform in/given.toml",
        "validate": "validate in/tiny.zarr --sets in/given.toml --model miniature --device none",
    },
    "yaml": {"sweep run": "sweep run in/given.yaml --dry-run --engine reference --workers 1 --out out"},
    "json": {
        "replay --warm": f"{PLAIN} --warm in/given.json",
        "replay --profile": f"{PLAIN} --eviction static:profile=given --profile in/given.json",
        "import": f"import in/given.json {IMPORT}",
        "record": "record nowhere/at/all --prompts in/given.json --out out.zarr",
    },
}


# Options


def _of_options() -> Iterator[Case]:
    for row, (verb, words, options) in enumerate(OPTIONS):
        for option, texts in options.items():
            for at, text in enumerate(texts):
                typed = (*_words(words), f"{option}={text}") if option else (*_words(words), text)
                yield Case(f"{verb}/{option or 'name'}/{row}.{at}", typed, partial(_trace_and_experiment))


def _trace_and_experiment(materials: Path, folder: Path, rng: Random) -> None:
    for name in ("tiny.zarr", "experiment.toml"):
        _take(materials, folder, name)
