"""Loading a checkpoint: what a trace says of it, and one line for everything that can be wrong with it."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors

from moereplay.tracegen import folder as folders
from moereplay.tracegen.checkpoint import load
from moereplay.tracegen.errors import RecordError, require_torch
from moereplay.tracegen.folder import fingerprint, locate, weight_files
from tests.kit.every import every
from tests.kit.tiny_checkpoints import checkpoint
from tests.kit.tiny_models import tiny_model

SHARD = "200KB"  #: cuts the tiny model into several files


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-olmoe")


@pytest.fixture
def broken(whole, tmp_path) -> Path:
    """A copy, for a test to break."""
    return Path(shutil.copytree(whole, tmp_path / "tiny-olmoe"))


@pytest.fixture
def sharded(broken) -> Path:
    (broken / "model.safetensors").unlink()
    tiny_model("olmoe", max_position_embeddings=64).save_pretrained(broken, max_shard_size=SHARD)
    return broken


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def refusal(source: object, **settings: Any) -> str:
    """The one line with which a checkpoint is refused."""
    with pytest.raises(RecordError) as raised:
        load(str(source), **settings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# What is loaded


def test_a_folder_gives_model_and_tokenizer_and_says_what_they_are(whole, capfd):
    loaded = load(str(whole))
    assert not loaded.model.training
    assert loaded[2:] == ("tiny-olmoe", "", fingerprint([whole / "model.safetensors"]), "float32")
    assert loaded.tokenizer("ab")["input_ids"] == [67, 68]
    assert capfd.readouterr() == ("", "")
    assert str(whole) not in str(loaded.model.config.name_or_path)


def test_weights_are_those_of_the_files(whole):
    expected = tiny_model("olmoe", max_position_embeddings=64).state_dict()
    found = load(str(whole)).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_dtype_is_the_checkpoints_unless_asked_for(tmp_path):
    half = checkpoint(tmp_path / "half", dtype=torch.bfloat16)
    assert load(str(half)).dtype == "bfloat16"
    assert load(str(half), dtype="float32").model.dtype == torch.float32


def test_shards_load_as_one_file_does(sharded, whole):
    assert len(weight_files(folders.Folder(sharded, "x", ""))) > 1
    one, several = load(str(whole)).model.state_dict(), load(str(sharded)).model.state_dict()
    assert all(torch.equal(one[name], several[name]) for name in one)


# Fingerprints


def test_the_fingerprint_is_what_sha256sum_prints(sharded):
    files = weight_files(folders.Folder(sharded, "x", ""))
    single = subprocess.run(["sha256sum", files[0].name], cwd=sharded, capture_output=True, text=True, check=True)
    assert fingerprint(files[:1]) == single.stdout.split()[0]
    names = sorted(file.name for file in files)
    listing = subprocess.run(["sha256sum", *names], cwd=sharded, capture_output=True, check=True).stdout
    assert fingerprint(files) == hashlib.sha256(listing).hexdigest()


def test_a_large_checkpoint_is_sampled_and_a_change_shows(broken, monkeypatch):
    monkeypatch.setattr(folders, "WHOLE_HASH_BYTES", 1000)
    file = broken / "model.safetensors"
    first = fingerprint([file])
    assert first.startswith("sampled-")
    assert fingerprint([file]) == first
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert fingerprint([file]) != first


# The hub


def test_a_hub_id_is_fetched_without_pickles_and_known_by_its_commit(whole, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = Path(shutil.copytree(whole, tmp_path / commit))
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **settings: asked.update(settings) or str(snapshot)
    )
    loaded = load("owner/tiny", revision="main")
    assert (loaded.name, loaded.revision) == ("owner/tiny", commit)
    assert asked["revision"] == "main"
    assert not any(pattern in ("*.bin", "*.py", "*.pt", "*") for pattern in asked["allow_patterns"])


ANSWER: Any = SimpleNamespace(headers={}, request=None, status_code=404)  #: as much of one as the hub's errors want


@every(
    "error, said",
    [
        (errors.LocalEntryNotFoundError("x"), r"cannot be reached; run `hf download owner/tiny --local-dir DIR` on a"),
        (errors.GatedRepoError("x", response=ANSWER), "gated: accept its terms"),
        (
            errors.RepositoryNotFoundError("x", response=ANSWER),
            r"owner/tiny is neither a folder nor .* model on the Hugging Face hub",
        ),
        (errors.RevisionNotFoundError("x", response=ANSWER), "no revision 'v9'"),
        (errors.HfHubHTTPError("server\nbusy", response=ANSWER), "the Hugging Face hub says: server busy"),
    ],
    apart=True,
)
def test_what_the_hub_refuses_is_said_with_the_way_out(error, said, monkeypatch):
    def refuse(name, **settings):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(RecordError, match=said):
        locate("owner/tiny", "v9")


def test_a_path_that_is_no_folder_is_not_taken_for_a_hub_id(tmp_path):
    (tmp_path / "file.gguf").write_bytes(b"")
    assert "is a file: expected the folder" in refusal(tmp_path / "file.gguf")
    assert "without weights" in refusal("GLM-4.5-Air") and "zai-org/GLM-4.5-Air" in refusal("glm-4.5-air")
    assert "is an address" in refusal("https://example.org/a/model.gguf")
    for source in (tmp_path / "nowhere", "./nowhere", "../nowhere", "a b"):
        assert "does not exist: expected a folder, a Hugging Face id" in refusal(source)


# Settings


def test_settings_that_cannot_be_are_named_before_anything_is_loaded(tmp_path):
    nowhere = tmp_path / "nowhere"
    assert refusal(nowhere, dtype="int8") == "unknown --dtype 'int8': choose from auto, float32, float16, bfloat16"
    assert refusal(nowhere, device="tpu9").startswith("invalid --device 'tpu9'")
    assert refusal(nowhere, quantise="gguf").startswith("unknown --quantise 'gguf': choose from ")


def test_what_is_not_installed_is_named_with_its_pip_line(whole, monkeypatch):
    for package in ("accelerate", "bitsandbytes", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    assert refusal(whole, quantise="bnb-4bit") == "--quantise bnb-4bit needs bitsandbytes: pip install bitsandbytes"
    assert refusal(whole, device_map="auto") == "--device-map auto needs accelerate: pip install accelerate"
    with pytest.raises(RecordError, match=r"^recording needs torch and transformers: pip install .*\[record\]'?$"):
        require_torch()


# Broken checkpoints


def test_a_missing_or_broken_config_is_named(broken):
    edit(broken / "config.json", model_type=None)
    assert "config.json has no model_type" in refusal(broken)
    (broken / "config.json").write_text("{")
    assert "config.json is damaged" in refusal(broken)
    (broken / "config.json").write_text("[]")
    assert "config.json is damaged (not a JSON object)" in refusal(broken)
    (broken / "config.json").unlink()
    assert refusal(broken) == "tiny-olmoe is not a transformers checkpoint (no config.json); check the path"


def test_a_config_of_something_else_is_named(broken):
    edit(broken / "config.json", num_attention_heads="many")
    assert "config.json cannot be loaded" in refusal(broken)
    edit(broken / "config.json", model_type="mamba9")
    assert "unknown model_type 'mamba9'" in refusal(broken)
    transformers.ViTConfig().save_pretrained(broken)
    assert "(vit) is not a causal language model" in refusal(broken)


def test_a_shard_that_did_not_arrive_is_named(sharded):
    first, *_, last = weight_files(folders.Folder(sharded, "x", ""))
    last.unlink()
    assert f"{last.name} is missing; the download is not complete" in refusal(sharded)
    first.unlink()
    assert f"{first.name} (and 1 more of " in refusal(sharded)


@every("keep", [0, 4, 8, 100, -100])
def test_a_file_that_is_cut_short_is_named(whole, broken, keep):
    shutil.copy(whole / "model.safetensors", broken)
    cut(broken / "model.safetensors", keep)
    assert "model.safetensors" in refusal(broken)
    assert refusal(broken).endswith("download it again")


def test_a_file_that_is_no_safetensors_is_named(broken):
    (broken / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"not json at all, no" * 9)
    assert "model.safetensors is damaged" in refusal(broken)
    (broken / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b'{"a":7}'[:5] + bytes(9))
    assert "model.safetensors is damaged" in refusal(broken)


def test_an_index_cannot_lead_out_of_the_folder(sharded):
    edit(sharded / "model.safetensors.index.json", weight_map={"a": "../other/model.safetensors"})
    assert "does not say which file holds which weight" in refusal(sharded)
    edit(sharded / "model.safetensors.index.json", weight_map={})
    assert "does not say which file holds which weight" in refusal(sharded)


def test_weights_of_another_model_are_not_made_up(broken):
    """transformers draws what is missing at random, with a remark only."""
    edit(broken / "config.json", num_hidden_layers=4)
    assert "lacks model.layers.3." in refusal(broken)
    edit(broken / "config.json", num_hidden_layers=3, hidden_size=64)
    assert "has shape (96, 32), config.json says (96, 64)" in refusal(broken)


def test_a_missing_tokenizer_is_named(broken):
    (broken / "tokenizer.json").unlink()
    assert "tokenizer cannot be loaded" in refusal(broken)
    (broken / "tokenizer.json").write_text("{}")
    assert "tokenizer cannot be loaded" in refusal(broken)


def test_running_out_of_memory_while_loading_is_said(whole, monkeypatch):
    def refuse(*args, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    assert "tiny-olmoe does not fit into memory; use --device-map auto" in refusal(whole)


# Nothing of a checkpoint is run


def test_a_repositorys_own_code_is_never_run(broken, tmp_path):
    marker = tmp_path / "ran"
    (broken / "modeling_evil.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n")
    names = {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    edit(broken / "config.json", auto_map=names)
    edit(broken / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_evil.T", None]})
    load(str(broken))  # transformers has its own OLMoE
    edit(broken / "config.json", model_type="evil")
    assert "unknown model_type 'evil'; the repository's own code is never run" in refusal(broken)
    assert not marker.exists()


def test_pickled_weights_are_refused_unopened(broken):
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert "holds pytorch_model.bin but no safetensors; pickled weights can run code" in refusal(broken)
    (broken / "pytorch_model.bin").unlink()
    assert "model.safetensors is missing" in refusal(broken)
