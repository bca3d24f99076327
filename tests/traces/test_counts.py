"""Counts of other tools: recognised, read and ranked, and refused in one line where they are none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

from moereplay.traces.profiles import NAMES, contract
from moereplay.traces.profiles.contract import ranked
from moereplay.traces.profiles.texts import ENGINES, hash_of
from moereplay.traces.schema import TraceError
from tests.kit import importer_samples
from tests.kit.collecting import case
from tests.kit.command import moereplay_here as moereplay
from tests.kit.count_samples import (
    ALL,
    COUNTS,
    EXPERTS,
    IMATRIX,
    LAYERS,
    RANKING,
    CountSample,
    gguf,
    imatrix_tensors,
    write_models,
)
from tests.kit.damage import BYTES
from tests.kit.importing import DATA, on_real_data

each = pytest.mark.parametrize("sample", ALL, ids=lambda sample: sample.name)
CUTS, TIMES = 30, 2  #: truncations of a file, draws of every damage


def made(sample: CountSample, folder: Path) -> Path:
    sample.write(folder / sample.name)
    return folder / sample.name


def files_in(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def refusal(path: Path, form: str) -> str:
    with pytest.raises(TraceError) as refused:
        contract.load(form).read(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
    return str(refused.value)


def imatrix(folder: Path, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> Path:
    """The sample with other metadata or tensors."""
    file = folder / "other.gguf"
    file.write_bytes(gguf({**IMATRIX, **metadata}, imatrix_tensors() | tensors))
    return file


# ---------------------------------------------------------------- what is read


def test_every_form_has_a_sample() -> None:
    assert {sample.form for sample in ALL} == set(NAMES)


@each
def test_a_form_keeps_its_contract(sample: CountSample, tmp_path: Path) -> None:
    """Recognised by its own form alone, read, ranked, printed; what is cut off leaves nothing."""
    path, out = made(sample, tmp_path), tmp_path / "new" / "profile.json"
    assert [name for name in NAMES if contract.load(name).sniff(path)] == [sample.form]
    assert (found := contract.detect(path)) and found.name == sample.form
    counts = contract.load(sample.form).read(path)
    np.testing.assert_array_equal(counts.chosen, COUNTS)
    assert counts.notes == sample.notes
    assert ranked(counts.chosen, counts.layers) == sample.ranking
    ended = moereplay("import", path, "--out", tmp_path / "profile.json")
    assert ended.returncode == 0, ended.stderr
    assert [tuple(place) for place in json.loads((tmp_path / "profile.json").read_text())] == sample.ranking
    assert "no hit rate" in ended.stderr and all(note in ended.stderr for note in sample.notes)
    for file in files_in(path):
        file.write_bytes(file.read_bytes()[:-3])
    ended = moereplay("import", path, "--format", sample.form, "--out", out)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "Traceback" not in ended.stderr
    assert not out.parent.exists()


def test_no_trace_is_taken_for_counts() -> None:
    assert [sample.name for sample in importer_samples.ALL if contract.detect(sample.path)] == []


def test_a_layer_that_was_counted_for_fewer_tokens_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("layer,expert,count\n0,0,50\n0,1,50\n1,0,9\n1,1,9\n")
    counts = contract.load("count_table").read(tmp_path / "a.csv")
    assert any("MoE layers 1 have fewer choices" in note for note in counts.notes)


def test_engines_of_colibri_are_named_by_their_hash() -> None:
    # 32-bit FNV-1a of "a" and of "foobar", from draft-eastlake-fnv
    assert (hash_of("a"), hash_of("foobar")) == (0xE40C292C, 0xBF9CF968)
    assert len(set(map(hash_of, ENGINES))) == len(ENGINES)


# ---------------------------------------------------------------- on the command line


def test_the_best_experts_alone_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "best.json"
    assert moereplay("import", made(ALL[0], tmp_path), "--limit", 5, "--out", out).returncode == 0
    assert [tuple(place) for place in json.loads(out.read_text())] == RANKING[:5]


def test_a_profile_of_counts_is_what_a_replay_takes(tmp_path: Path) -> None:
    """Counts of a trace's own choices are the profile that `static` finds by itself."""
    from moereplay.traces.files import bundled
    from moereplay.traces.selection import profile
    from moereplay.traces.store import open_trace

    trace = open_trace(bundled(Path("miniature")))
    chosen = trace.read("chosen").astype(int)
    rows = [
        f"{layer} {expert} {count}"
        for layer in range(trace.geometry.layers)
        for expert, count in enumerate(np.bincount(chosen[:, layer].ravel(), minlength=trace.geometry.experts))
        if count
    ]
    (tmp_path / "m.coli_usage").write_text("\n".join(rows) + "\n")
    out = tmp_path / "p.json"
    assert moereplay("import", tmp_path / "m.coli_usage", "--out", out).returncode == 0
    assert [tuple(place) for place in json.loads(out.read_text())] == profile(trace)
    few = tmp_path / "few.json"
    assert moereplay("import", tmp_path / "m.coli_usage", "--limit", 60, "--out", few).returncode == 0
    common = ("replay", "miniature", "--capacity", "25%", "--passes", "token", "--json")
    given = moereplay(*common, "--eviction", "static:profile=given", "--profile", out, "--warm", few)
    assert given.returncode == 0, given.stderr
    own = moereplay(*common, "--eviction", "static", "--warm", few)
    hits = [json.loads(ended.stdout)["totals"]["hits"] for ended in (given, own)]
    assert hits[0] == hits[1] > 0


def test_what_means_nothing_for_counts_is_refused(tmp_path: Path) -> None:
    for words, said in [
        (("--out", "a.zarr"), "pass --out NAME.json"),
        (("--out", "a.json", "--resume"), "--resume cannot be combined with expert counts"),
        (("--out", "a.json", "--chunk", "4"), "--chunk cannot be combined with expert counts"),
        (("--out", "a.json", "--expert-bytes", "9"), "--expert-bytes cannot be combined with expert counts"),
        (("--out", "a.json", "--model", "olmoe-1b-7b"), "pass the model that was counted"),
        (("--out", "there.json"), "there.json exists"),
        (("--out", "m.coli_usage/a.json"), "is not a folder"),
    ]:
        made(ALL[1], tmp_path)
        (tmp_path / "there.json").write_text("mine")
        ended = moereplay("import", "m.coli_usage", *words, cwd=tmp_path)
        assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m.coli_usage", "there.json"]
        assert (tmp_path / "there.json").read_text() == "mine"


# ---------------------------------------------------------------- several models in one file


def test_counts_of_several_models_are_read_of_the_one_that_is_named(tmp_path: Path) -> None:
    write_models(tmp_path / "a.npz")
    for name in ("mine", "mine/a", "mine/a/counts"):
        out = tmp_path / f"{name.count('/')}.json"
        ended = moereplay("import", tmp_path / "a.npz", "--columns", f"counts={name}", "--out", out)
        assert ended.returncode == 0, ended.stderr
        assert [place[1] for place in json.loads(out.read_text())] == [place[1] for place in RANKING]


def test_an_archive_of_several_models_says_what_to_type(tmp_path: Path) -> None:
    for words, said in [
        ((), "2 models: mine (1 arrays), other (1 arrays); add --columns counts=mine"),
        (("--columns", "counts=x"), "missing counts x; found mine/a/counts, other/a/counts"),
        (("--columns", "counts=mine/a/cross"), "expected (layers, experts)"),
        (("--columns", "counts=mine,experts=b"), "--columns experts= cannot be combined with counts"),
        (
            ("--columns", "counts=other", "--model", "mixtral-8x7b", "--resume"),
            "--resume cannot be combined with expert counts",
        ),
    ]:
        write_models(tmp_path / "a.npz")
        ended = moereplay("import", "a.npz", *words, "--out", "p.json", cwd=tmp_path)
        assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_counts_of_more_layers_than_the_model_has_are_refused(tmp_path: Path) -> None:
    made(ALL[-1], tmp_path)
    words = ("import", ALL[-1].name, "--out", "p.json", "--model")
    for model in ("olmoe-1b-7b", "mixtral-8x7b"):  # of 16 and of 32 layers
        assert moereplay(*words, model, cwd=tmp_path).returncode == 0
        (tmp_path / "p.json").unlink()
    np.savez(tmp_path / "b.npz", counts=COUNTS)
    ended = moereplay("import", "b.npz", "--model", "olmoe-1b-7b", "--out", "p.json", cwd=tmp_path)
    assert ended.returncode == 2 and "pass the model that was counted" in ended.stderr


def test_counts_named_of_a_file_that_has_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("request,token,layer,expert_0\n0,0,0,1\n")
    ended = moereplay("import", "a.csv", "--columns", "counts=x", "--out", "a.zarr", cwd=tmp_path)
    assert (
        ended.returncode == 2
        and "a.csv: --columns counts= requires a file of counts" in ended.stderr
        and ended.stderr.count("\n") == 1
    )


# ---------------------------------------------------------------- refused


def test_a_gguf_of_weights_is_no_profile(tmp_path: Path) -> None:
    assert "general.type is model" in refusal(imatrix(tmp_path, {"general.type": "model"}, {}), "imatrix")


def test_matrices_that_disagree_are_refused(tmp_path: Path) -> None:
    other = {"blk.2.ffn_up_exps.weight.counts": np.ones((EXPERTS, 1))}
    assert "other tensors" in refusal(imatrix(tmp_path, {}, other), "imatrix")


def test_counts_without_experts_are_refused(tmp_path: Path) -> None:
    lone = {name: np.ones((1, 1)) for name in imatrix_tensors() if name.endswith("exps.weight.counts")}
    assert "not per expert" in refusal(imatrix(tmp_path, {}, lone), "imatrix")


def test_numbers_that_are_no_counts_are_refused(tmp_path: Path) -> None:
    for wrong in [-1.0, float("nan"), float("inf"), 1e30]:
        counts = np.full((LAYERS, EXPERTS), 1.0)
        counts[1, 2] = wrong
        np.save(tmp_path / "a.npy", counts)
        assert "invalid count" in refusal(tmp_path / "a.npy", "activation_matrix")
        np.save(tmp_path / "b.npy", np.stack([counts, counts]))
        assert "count" in refusal(tmp_path / "b.npy", "activation_matrix")


def test_a_history_that_is_not_as_documented_is_refused(tmp_path: Path) -> None:
    for text, said in [
        ("0 1 2\n0 1 3\n", "line 2: layer 0, expert 1 "),
        ("0 1 2\n0 x 3\n", "line 2"),
        ("0 1 2\n0 2 3", "no line end"),
        ("-1 1 8\n0 9 3\n", "its first lines state"),
        ("-2 7 1\n0 1 2\n", "version 7"),
        ("-1 4 8\n", "no expert was counted"),
    ]:
        (tmp_path / "a.coli_usage").write_text(text)
        assert said in refusal(tmp_path / "a.coli_usage", "coli_usage")


def test_a_report_without_counts_is_refused(tmp_path: Path) -> None:
    off = {"enabled": False, "mode": "off", "schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": []}
    (tmp_path / "a.json").write_text(json.dumps(off))
    assert "counting was off" in refusal(tmp_path / "a.json", "hot_cache")


@each
def test_a_damaged_sample_is_refused_in_one_line_or_still_counts(sample: CountSample, tmp_path: Path) -> None:
    path, rng = made(sample, tmp_path), Random(sample.name)
    for file in files_in(path):
        whole = file.read_bytes()
        for size in range(1, len(whole), max(1, len(whole) // CUTS)):
            file.write_bytes(whole[:size])
            with case(file.name, size, "bytes"):
                chosen = counted_or_refused(path, sample.form)  # a text may end with a whole line
                assert chosen is None or (chosen.sum() < COUNTS.sum() and path.suffix in (".coli_usage", ""))
        for how, damage in list(BYTES.items()) * TIMES:
            file.write_bytes(damage(whole, rng))
            with case(file.name, how):
                chosen = counted_or_refused(path, sample.form)
                assert chosen is None or (np.isfinite(chosen).all() and chosen.min() >= 0 and chosen.any())
        file.write_bytes(whole)


def counted_or_refused(path: Path, form: str) -> np.ndarray | None:
    try:
        return contract.load(form).read(path).chosen
    except TraceError as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 1000
        return None


# ---------------------------------------------------------------- published counts


@on_real_data
def test_a_published_history_of_colibri_is_ranked_as_plain_sorting_ranks_it() -> None:
    file = DATA / "olmoe-counts" / "olmoe_real.coli_usage"
    rows = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
    counts = contract.load("coli_usage").read(file).chosen
    assert counts.shape == (16, 64)
    assert ranked(counts) == [(layer, expert) for layer, expert, _ in sorted(rows, key=lambda row: (-row[2], row[:2]))]


@on_real_data
def test_published_counts_in_an_archive_are_ranked_as_plain_sorting_ranks_them() -> None:
    for named in ["olmoe", "olmoe/c4", "olmoe/c4/counts_top1", "olmoe-sft", "mistral"]:
        file = DATA / "olmoe-counts" / "expert_counts.npz"
        form = contract.detect(file)
        assert form is not None and form.name == "count_archive"
        with np.load(file) as stored:
            names = [name for name in stored if name == named or re.fullmatch(f"{named}/(.*/)?counts", name)]
            rows = np.stack([stored[name] for name in names]).sum(0)
        counts = form.read(file, named)
        np.testing.assert_array_equal(counts.chosen, rows)
        places = [
            (-count, (layer, expert))
            for layer, row in zip((0, 7, 15), rows, strict=True)
            for expert, count in enumerate(row)
        ]
        assert ranked(counts.chosen, counts.layers) == [place for count, place in sorted(places) if count]


@on_real_data
def test_published_counts_of_several_models_say_what_to_type(tmp_path: Path) -> None:
    file, out = DATA / "olmoe-counts" / "expert_counts.npz", tmp_path / "p.json"
    refused = moereplay("import", file, "--out", out)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "olmoe-dpo (1 arrays)" in refused.stderr and "--columns counts=mistral" in refused.stderr
    assert not out.exists()
    model = ("--columns", "counts=olmoe", "--model", "olmoe-1b-7b")
    assert moereplay("import", file, *model, "--out", out).returncode == 0
    assert {layer for layer, _ in json.loads(out.read_text())} == {0, 7, 15}
