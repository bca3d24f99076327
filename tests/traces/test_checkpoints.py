"""Sizes of a model from its own files: exact against the models themselves, and no file is trusted."""

from __future__ import annotations

import http.server
import io
import json
import math
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moereplay.traces import network
from moereplay.traces.checkpoints.config import KEYS, numbers_of
from moereplay.traces.checkpoints.found import explained, model_of
from moereplay.traces.checkpoints.gguf import TYPES, read_header
from moereplay.traces.checkpoints.quants import quantised
from moereplay.traces.checkpoints.tensors import Stored, known_of, model_of_gguf, sizes_of, tensors_of, with_sizes
from moereplay.traces.geometry import KnownModel, known, known_models
from moereplay.traces.schema import TraceError
from tests.kit.collecting import case
from tests.kit.command import moereplay_here
from tests.kit.count_samples import gguf_header

Q4_K, Q5_0, Q8_0, F32, MXFP4 = 12, 6, 8, 0, 39

#: Small models of many families: what differs between them is kept, sizes are not.
COMMON = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "num_hidden_layers": 4}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "num_key_value_heads": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "num_key_value_heads": 2},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "intermediate_size": 80,
        "mlp_only_layers": [0],
        "num_key_value_heads": 2,
    },
    "qwen3_next": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "head_dim": 16,
        "num_key_value_heads": 2,
    }
    | DELTA,
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 80,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
    }
    | MLA,
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 80,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 80,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "num_key_value_heads": 2,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "tie_word_embeddings": True,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 2,
        "head_dim": 16,
        "num_key_value_heads": 2,
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_key_value_heads": 2,
    },
    "lfm2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 80,
        "num_dense_layers": 1,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "hidden_size": 256,
    },
    "mimo_v2_flash": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 80,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "exaone_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 80,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
    },
}


EXPANDED = ("deepseek_v3",)  #: transformers keeps the heads' keys and values, engines the latent row


def test_the_config_and_the_tensors_of_real_models_give_their_parameters_and_bytes(tmp_path: Path) -> None:
    """Every family is saved with random weights; its config alone and its headers are compared with the weights."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    for family, extra in FAMILIES.items():
        config = AutoConfig.for_model(family, **COMMON | extra)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        folder = tmp_path / family
        model.save_pretrained(folder, max_shard_size="100KB")
        said = json.loads((folder / "config.json").read_text())
        weights = {name: tensor.numel() for name, tensor in model.named_parameters()}
        experts = sum(size for name, size in weights.items() if ".experts." in name or "_linear.weight" in name)
        numbers = numbers_of(said, family, "a test")
        # norms of queries and keys, and biases, are left out of the formulas
        assert numbers.total() == pytest.approx(sum(weights.values()), rel=0.02), family
        if family not in EXPANDED:
            tokens = torch.arange(7)[None]
            layers = model(tokens, use_cache=True).past_key_values.layers
            kept = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
            assert numbers.cached()[0] * 7 == 2 * sum(each.numel() for each in kept if each is not None), family
        exact = model_of(str(folder)).geometry
        assert sum(exact.expert_bytes) * exact.experts == 2 * experts, family
        stored = sum(2 * size for size in weights.values())
        assert stored <= sum(exact.expert_bytes) * exact.experts + exact.dense_bytes <= stored * 1.01, family
        assert (exact.experts, exact.k, exact.layers) == (numbers.experts, numbers.k, numbers.layers), family


#: config.json of the known models, shortened to what sizes could depend on; Mistral Large 3 is published without one.
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("model_configs.json").read_text())


def of_config(config: dict[str, Any], name: str = "a model") -> KnownModel:
    return known_of(numbers_of(config, name, "a test"), name)


def test_a_name_and_its_config_agree_in_every_figure() -> None:
    assert set(known_models()) == set(CONFIGS) | {"mistral-large-3"}
    #: what no config.json says: names, where it was read, the order of matrices in files, a file's mixed sizes
    apart = {"aliases", "source", "note", "matrices", "geometry"}
    for name, config in CONFIGS.items():
        table, read = known(name), of_config(config, name)
        with case(name):
            assert read.model_dump(exclude=apart) == table.model_dump(exclude=apart)
            cached = {"kv_bytes": table.kv_bytes, "kv_windows": table.kv_windows, "hidden": table.hidden}
            geometry = table.geometry.model_copy(update=cached)
            mixed = {"bytes_by_bits"} if name == "gemma-4-26b-a4b" else set[str]()
            assert read.geometry.model_dump(exclude=mixed) == geometry.model_dump(exclude=mixed)


BLOCKS_OF_128 = {"weight_block_size": [128, 128]}


def grouped(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("stored", "form", "bits"),
    [
        ({"quant_method": "mxfp4"}, "MXFP4", 4.25),
        ({"quant_method": "fp8"} | BLOCKS_OF_128, "FP8", 8 + 32 / 128**2),
        (grouped(num_bits=4, type="int", group_size=32), "INT4", 4 + 16 / 32),
        (grouped(num_bits=8, type="int", strategy="channel", group_size=None), "INT8", 8),
        (grouped(num_bits=8, type="float", strategy="block"), "FP8", 8 + 32 / 128**2),
        (grouped(num_bits=4, type="float", group_size=16) | {"format": "nvfp4-pack-quantized"}, "NVFP4", 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4", 4.5),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "AWQ", 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "GPTQ", 3 + 19 / 64),
        ({"bits": 4, "group_size": 64}, "INT4", 4 + 32 / 64),  # MLX: a scale and a bias of 16 bits
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "NF4", 4.5),
        (None, "BF16", 16),
    ],
)
def test_bytes_and_label_of_an_expert_follow_from_one_value(stored: Any, form: str, bits: float) -> None:
    made = of_config(CONFIGS["qwen3-30b-a3b"] | {"quantization_config": stored})
    weights = 3 * 2048 * 768
    assert made.geometry.expert_bytes == (math.ceil(weights * bits / 8),) * 48
    assert (made.published.format, made.geometry.mean_bits) == (form, pytest.approx(bits, rel=1e-6))
    assert dict(explained(made))["an expert"].endswith(f"{bits:.4g} bits per weight ({form})")
    assert made.assumed == ""


def test_four_bit_experts_of_a_config_stay_as_they_are() -> None:
    # 36 layers of 128 experts of 13,219,200 bytes are 60.9 GB; llama.cpp keeps their blocks of 32
    for spec in (of_config(CONFIGS["gpt-oss-120b"]), known("gpt-oss-120b")):
        for made in (spec, quantised(spec, "Q4_K_M")):
            assert sum(made.geometry.expert_bytes) * 128 == 36 * 128 * 13_219_200
            assert dict(explained(made))["an expert"] == "12.61 MiB, 4.25 bits per weight (MXFP4)"
    # groups of INT4 are no blocks of llama.cpp's: such a file is made from the weights in 16 bits
    assert min(quantised(known("kimi-k2.5"), "Q8_0").geometry.expert_bytes) > 2 * 3 * 7168 * 2048 * 4 // 8


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"model_type": "foo_moe"},
            "architecture foo_moe not known: sizes assume plain attention and experts in every",
        ),
        ({"model_type": None}, "architecture without a model_type not known"),
        ({"cache_share_heads": 4}, "key cache_share_heads not known"),
        ({"moe_every": [1, 2]}, "key moe_every not known"),
        ({"layer_types": ["magic_attention"] * 48}, "layer type magic_attention not known"),
        (
            {"quantization_config": {"quant_method": "secret"}},
            "quantisation secret not known: experts count at 16 bits",
        ),
        ({"attention_bias": True, "rope_scaling": {"a": 1}, "router_aux_loss_coef": 0.1, "num_kv_groups": None}, ""),
    ],
)
def test_what_is_not_known_of_a_config_is_said(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3-30b-a3b"] | changed))
    made = model_of(str(path))
    assert made.assumed.startswith(said) and bool(made.assumed) == bool(said)
    assert dict(explained(made)).get("assumed", "") == made.assumed


@pytest.mark.slow
def test_commands_say_what_is_not_known_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "foo").mkdir()
    small = {"model_type": "foo_moe", "num_hidden_layers": 16, "num_experts": 64}
    (tmp_path / "foo" / "config.json").write_text(json.dumps(CONFIGS["qwen3-30b-a3b"] | small))
    np.save(
        tmp_path / "ids.npy", np.random.default_rng(0).permuted(np.tile(np.arange(64), (3, 16, 1)), axis=2)[..., :8]
    )
    for words in (
        ("models", "foo"),
        ("import", "ids.npy", "--model", "foo", "--out", "t.zarr"),
        ("synthesise", "--model", "foo", "--requests", 1, "--out", "s.zarr"),
        ("recommend", "foo", "--gpu", "RTX 3090", "--ram", "64GB"),
    ):
        ran = moereplay_here(*words, cwd=tmp_path)
        said = " ".join((ran.stdout + ran.stderr).split())
        assert "architecture foo_moe not known: sizes assume plain attention and experts in every layer" in said, words


def gemma(tmp_path: Path) -> Path:
    """Gemma-4-26B-A4B in Q4_K_M as published: gate and up in one matrix, down in Q8_0 or Q5_0."""
    large = [0, 1, 2, 3, 4, 5, 6, 9, 12, 15, 18, 21, 24, 27]
    tensors: dict[str, tuple[tuple[int, ...], int]] = {"token_embd.weight": ((2816, 262144), Q8_0)}
    for layer in range(30):
        down = Q8_0 if layer in large else Q5_0
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = (2816, 1408, 128), Q4_K
        tensors[f"blk.{layer}.ffn_down_exps.weight"] = (704, 2816, 128), down
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = (2816, 128), F32
        tensors[f"blk.{layer}.attn_k.weight"] = (2816, 2048), Q4_K
    said = {
        "general.architecture": "gemma4",
        "gemma4.block_count": 30,
        "gemma4.expert_count": 128,
        "gemma4.expert_used_count": 8,
        "gemma4.embedding_length": 2816,
        "gemma4.context_length": 262144,
        "gemma4.attention.head_count": 16,
        "gemma4.attention.head_count_kv": [8] * 30,
        "gemma4.attention.key_length": 256,
        "gemma4.attention.value_length": 256,
        "tokenizer.ggml.tokens": [f"token {at}" for at in range(5000)],
    }
    path = tmp_path / "gemma-4-26B-A4B-it-Q4_K_M.gguf"
    path.write_bytes(gguf_header(said, tensors))
    return path


def test_a_gguf_file_says_the_bytes_of_every_layer(tmp_path: Path) -> None:
    made = model_of(str(gemma(tmp_path)))
    # as the phone's route trace has them: tests/traces/test_importers.py
    assert made.geometry.expert_bytes == known_models()["gemma-4-26b-a4b"].geometry.bytes_by_bits[4]
    assert (made.geometry.experts, made.geometry.k, made.context) == (128, 8, 262144)
    layer = 2816 * 128 * 4 + 2816 * 2048 * 144 // 256
    assert made.geometry.dense_layer_bytes == (layer,) * 30
    assert made.geometry.head_bytes == 2816 * 262144 * 34 // 32  # the table is the head
    assert made.kv_bytes == 2 * 30 * 8 * 512
    assert made.geometry.weight_format == ""  # Q4_K alone is no name of a file
    mean = 8 * sum(made.geometry.expert_bytes) / (30 * 3 * 2816 * 704)
    assert dict(explained(made))["an expert"].endswith(f"{mean:.4g} bits per weight (Q4_K)")


@pytest.mark.parametrize(
    "table",
    [
        "per_layer_token_embd.weight",
        "model.layers.1.ple.ple_embedding.ngram_embedding.0",
        "layers.1.engram.embed.weight",
    ],
)
def test_a_table_of_n_grams_is_no_dense_weight(table: str) -> None:
    tensors = {"layers.1.mlp.experts.0.w1": Stored(8, 4), "lm_head.weight": Stored(6, 3), "layers.1.norm": Stored(2, 1)}
    sizes = sizes_of(tensors | {table: Stored(1000, 500)}, "a model")
    assert sizes == sizes_of(tensors, "a model")._replace(table_weights=500)
    assert (sizes.weights, sizes.dense_total) == (508, 8)


def test_a_split_gguf_is_one_model(tmp_path: Path) -> None:
    said = {
        "general.architecture": "gpt-oss",
        "gpt-oss.block_count": 2,
        "gpt-oss.expert_count": 32,
        "gpt-oss.expert_used_count": 4,
        "gpt-oss.embedding_length": 2880,
    }
    expert = (2880, 2880, 32), MXFP4
    for part in (1, 2):
        tensors = {f"blk.{part - 1}.ffn_{matrix}_exps.weight": expert for matrix in ("gate", "up", "down")}
        tensors |= {f"blk.{part - 1}.attn_norm.weight": ((2880,), F32)}
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(gguf_header(said if part == 1 else {}, tensors))
    made = model_of(str(tmp_path / "m-00001-of-00002.gguf"))
    assert made.geometry.expert_bytes == known_models()["gpt-oss-20b"].geometry.bytes_by_bits[4][:2]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(TraceError, match=r"m-00002-of-00002\.gguf"):
        model_of(str(tmp_path / "m-00001-of-00002.gguf"))


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    for number, (name, block, size) in TYPES.items():
        kind = constants.GGMLQuantizationType(number)
        assert (kind.name, constants.GGML_QUANT_SIZES[kind]) == (name, (block, size))


class Served(http.server.SimpleHTTPRequestHandler):
    """A server of a folder that answers ranges, as the hub does, and counts what it sends."""

    sent = 0
    authorised: ClassVar[list[str]] = []  #: paths that came with a token

    def do_GET(self) -> None:
        if self.headers.get("Authorization"):
            type(self).authorised.append(self.path)
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data, asked = path.read_bytes(), self.headers.get("Range")
        if asked:
            first, last = (int(each) for each in asked.removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        else:
            part = data
            self.send_response(200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        type(self).sent += len(part)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Served(*given, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    yield address, root
    server.shutdown()
    server.server_close()


def test_headers_of_the_hub_are_read_by_range_and_kept(hub: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, root = hub
    folder = root / "some" / "model" / "resolve" / "main"
    folder.mkdir(parents=True)
    config = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32} | COMMON
    (folder / "config.json").write_text(json.dumps(config))
    at, header = 0, {}
    for layer in range(4):
        for expert in range(4):
            for matrix, shape in (("gate", [32, 64]), ("up", [32, 64]), ("down", [64, 32])):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
                header[name] = {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [at, at + 2048]}
                at += 2048
        header[f"model.layers.{layer}.norm.weight"] = {"dtype": "BF16", "shape": [64], "data_offsets": [at, at + 128]}
        at += 128
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8 << 20))
    Served.sent = 0
    made = model_of("some/model")
    assert made.geometry.expert_bytes == (3 * 2048,) * 4
    assert made.geometry.dense_bytes == 4 * 128
    assert Served.sent < 1 << 20  # of more than 8 MiB
    monkeypatch.setattr(network, "_received", lambda *_, **__: pytest.fail("the network was used again"))
    assert model_of("some/model") == made


def test_the_beginning_of_a_gguf_file_is_enough(hub: tuple[str, Path], tmp_path: Path) -> None:
    address, root = hub
    path = gemma(tmp_path)
    (root / path.name).write_bytes(path.read_bytes() + bytes(4 << 20))
    Served.sent = 0
    made = model_of(f"{address}/{path.name}")
    assert made.geometry == model_of(str(path)).geometry
    assert Served.sent < 1 << 20


def test_a_token_goes_to_the_hub_alone(hub: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, root = hub
    monkeypatch.setenv("HF_TOKEN", "secret")
    (root / "config.json").write_text(json.dumps(OK))
    Served.authorised.clear()
    model_of(f"{address}/moved/config.json")
    assert Served.authorised == ["/moved/config.json"]  # not where it redirects to
    monkeypatch.setenv("HF_ENDPOINT", address[:-1])  # a server whose name only begins alike
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    model_of(f"{address}/config.json")
    assert len(Served.authorised) == 1


def moe(changed: dict[str, Any], shape: tuple[int, ...] = (32, 32, 8)) -> bytes:
    """A GGUF file of two layers of 8 experts."""
    said = {
        f"llama.{key}": value for key, value in {"block_count": 2, "expert_count": 8, "expert_used_count": 2}.items()
    }
    said |= {"general.architecture": "llama", "llama.embedding_length": 32, "llama.attention.head_count": 4}
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_k", "attn_output")
    tensors = {
        f"blk.{at}.{name}.weight": (shape if "exps" in name else (32, 32), F32) for at in (0, 1) for name in names
    }
    return gguf_header(said | changed, tensors)


OK = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32} | COMMON


def of_experts(stored: dict[tuple[int, int], str]) -> KnownModel:
    """A checkpoint of four layers with tensors of these (layer, expert), by dtype: three matrices of 32 x 64 each."""
    header = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": {
            "dtype": dtype,
            "shape": [32, 64],
            "data_offsets": [0, 2048 * {"BF16": 2, "F8_E4M3": 1}[dtype]],
        }
        for (layer, expert), dtype in stored.items()
        for part in ("gate", "up", "down")
    }
    return with_sizes(of_config(OK), sizes_of(tensors_of(header, "a test"), "a test", 4), "a test")


def test_experts_have_the_bytes_of_their_own_tensors() -> None:
    every = {(layer, expert): "BF16" for layer in range(4) for expert in range(4)}
    assert of_experts(every).geometry.bytes_by_expert == ()
    assert of_experts(every | {(2, each): "F8_E4M3" for each in range(4)}).geometry.expert_bytes == (
        *(12_288, 12_288),
        *(6_144, 12_288),
    )
    # one expert of half the bytes: until it was looked at, all of its layer counted with their mean, 10,752
    model = of_experts(every | {(1, 3): "F8_E4M3"})
    assert model.geometry.bytes_by_expert[1] == (12_288, 12_288, 12_288, 6_144)
    assert model.geometry.expert_bytes == (12_288,) * 4 and model.geometry.total_bytes == 15.5 * 12_288
    assert dict(explained(model))["an expert"].startswith("0.005859 to 0.01172 MiB, 15.5 bits")


def test_layers_with_other_numbers_of_experts_are_refused() -> None:
    pruned = {(layer, expert): "BF16" for layer in range(4) for expert in range(2 if layer == 3 else 4)}
    with pytest.raises(TraceError, match="MoE layer 3 has tensors of 2 experts: expected 0 to 3"):
        of_experts(pruned)
    data = moe({"llama.expert_count": [8, 4]})
    with pytest.raises(TraceError, match=r"different numbers of experts \(4, 8\)"):
        model_of_gguf([read_header(io.BytesIO(data), Path("m.gguf"), len(data))], "m", "a test")


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("config.json", b"", "config.json"),
        ("config.json", b"[1]", "JSON object"),
        ("config.json", b'{"num_experts": NaN}', "config.json"),
        ("config.json", json.dumps(COMMON | {"model_type": "llama"}).encode(), "without routed experts"),
        ("config.json", json.dumps(OK | {"num_experts": 1}).encode(), "without routed experts"),
        (
            "config.json",
            json.dumps(OK | {"num_experts": "four"}).encode(),
            "num_experts: expected a whole number (got 'four')",
        ),
        ("config.json", json.dumps(OK | {"num_experts": 10**9}).encode(), "num_experts"),
        ("config.json", json.dumps(OK | {"num_hidden_layers": -1}).encode(), "num_hidden_layers"),
        ("config.json", json.dumps({k: v for k, v in OK.items() if "hidden_l" not in k}).encode(), "num_hidden_layers"),
        ("config.json", json.dumps({k: v for k, v in OK.items() if "vocab" not in k}).encode(), "vocab_size"),
        (
            "config.json",
            json.dumps({k: v for k, v in OK.items() if "per_tok" not in k}).encode(),
            "num_experts_per_tok",
        ),
        ("config.json", json.dumps(OK | {"num_attention_heads": 0}).encode(), "num_attention_heads"),
        ("config.json", json.dumps(OK | {"head_dim": {"a": 1}}).encode(), "config.json"),
        ("config.json", json.dumps(OK | {"mlp_only_layers": [0, 1, 2, 3]}).encode(), "no layer"),
        ("config.json", json.dumps(OK | {"interleave_moe_layer_step": "x"}).encode(), "config.json"),
        *(
            ("config.json", json.dumps(OK | {key: value}).encode(), f"{key}: expected at ")
            for key in (
                "head_dim",
                "kv_lora_rank",
                "global_head_dim",
                "attention_chunk_size",
                "sliding_window",
                "v_head_dim",
            )
            for value in (-1, 10**300)
        ),
        (
            "config.json",
            json.dumps(OK | {"num_attention_heads": 3, "layer_types": ["x"]}).encode(),
            "one for each of 4",
        ),
        (
            "config.json",
            json.dumps(OK | {"hidden_size": 1 << 24, "intermediate_size": 1}).encode(),
            "hidden_size: expected at",
        ),
        (
            "config.json",
            json.dumps(OK | {"hidden_size": 1 << 20, "num_experts": 512, "intermediate_size": 1 << 20}).encode(),
            "params",
        ),
        ("m.gguf", b"GGUF", "truncated"),
        ("m.gguf", moe({"llama.attention.head_count_kv": ["x", "x"]}), "llama.attention.head_count_kv 'x': expected"),
        (
            "m.gguf",
            moe({"llama.attention.sliding_window_pattern": [math.nan]}),
            "sliding_window_pattern 'nan': expected",
        ),
        (
            "m.gguf",
            moe({"llama.block_count": 20_000}),
            "llama.block_count '20000': expected a whole number from 0 to 8,192",
        ),
        ("m.gguf", moe({"llama.embedding_length": -1}), "llama.embedding_length '-1': expected"),
        ("m.gguf", moe({"general.architecture": "x" * 12_000}), "missing " + 60 * "x" + "."),
        ("m.gguf", moe({}, (4, 0, 8)), "has the shape (4, 0, 8): expected 1 to 2^60 weights"),
        ("m.gguf", moe({}, ((1 << 64) - 1, 4, 8)), "expected 1 to 2^60 weights"),
        ("m.gguf", moe({}).replace(b"llama.block_count", b"llama.expert_coun"), "missing llama.block_count"),
        ("m.gguf", moe({}).replace(b"blk.1.", b"blk.0."), "the tensor blk.0.ffn_gate_exps.weight is repeated"),
        (
            "m.gguf",
            moe({"llama.expert_counx": 8}).replace(b"expert_counx", b"expert_count"),
            "llama.expert_count is repeated",
        ),
        ("m.gguf", b"not a gguf file", "m.gguf"),
        ("m.gguf", gguf_header({}, {"blk.0.attn_q.weight": ((4, 4), F32)}), "general.architecture"),
        ("m.gguf", gguf_header({}, {"blk.0.ffn_up_exps.weight": ((4, 4, 2), 99)}), "unknown type 99"),
        (
            "m.gguf",
            gguf_header({"general.architecture": "llama", "llama.block_count": 2}, {"output.weight": ((4, 4), F32)}),
            "missing tensors of routed experts",
        ),
        ("m-00001-of-99999.gguf", gguf_header({}, {}), "99,999 parts"),
        ("readme.txt", b"hello", "expected a config.json"),
    ],
)
def test_a_wrong_file_is_refused_in_a_line(tmp_path: Path, name: str, content: bytes, facts: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError) as refused:
        model_of(str(tmp_path / name))
    assert facts in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_damaged_header_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OK))
    for data in (b"", b"\0" * 8, struct.pack("<Q", 1 << 40), struct.pack("<Q", 2) + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(TraceError):
            model_of(str(tmp_path))
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    for wrong, said in [
        ({"dtype": "BF16", "shape": [4], "data_offsets": [0, 9]}, "cannot have 9 bytes"),
        ({"dtype": [], "shape": [4], "data_offsets": [0, 8]}, "dtype: expected a text"),
        ({"dtype": "BF16", "shape": [10**18] * 100_000, "data_offsets": [0, 8]}, "shape"),
        ({"dtype": "BF16", "shape": [-4], "data_offsets": [0, 8]}, "shape.0: expected at least 0"),
        ({"dtype": "NEW", "shape": [4], "data_offsets": [0, 1 << 62]}, "data_offsets.1: expected at most"),
        ({"dtype": "NEW", "shape": [4], "data_offsets": [0, 1 << 40]}, "ends beyond the file"),
        ({"dtype": "NEW", "shape": [4], "data_offsets": [0, 10**300]}, "data_offsets.1: expected at most"),
        ({"dtype": "BF16", "shape": [4]}, "data_offsets: missing"),
        ({"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}, "routed experts in 1 layers"),
        ([], "expected a table"),
    ]:
        text = json.dumps({name: wrong}).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        with case(said), pytest.raises(TraceError, match=re.escape(said)) as refused:
            model_of(str(tmp_path))
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_experts_of_no_bytes_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OK | {"num_hidden_layers": 1}))
    empty = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps({f"model.layers.0.mlp.experts.{at}.up_proj.weight": empty for at in range(4)}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(TraceError, match="no bytes"):
        model_of(str(tmp_path))
    (pipes := tmp_path / "pipes").mkdir()
    os.mkfifo(pipes / "x.gguf")
    with pytest.raises(TraceError, match="a pipe or a device"):  # and not held for ever
        model_of(str(pipes))


#: A busy machine is no failure; `check_read` bounds the CPU time.
AT_ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HOSTILE = st.sampled_from(
    [
        *(-1, 0, 1, 2, 7, 1 << 24, 1 << 31, 1 << 63, 10**300, -(10**300), 0.5, -1.0, 1e308, True, False, None),
        *("", "x", "4", "9" * 5000, "\x1b[2J\n", [], [1], [-1], [0, 1], [10**30], ["x"], [None], [[1]], [1] * 5000),
        *({}, {"a": 1}, {"num_heads": -1}, {"group_0": {"weights": {"num_bits": 10**30}}}),
    ]
)
KEYS_OF_CONFIGS = sorted(KEYS | {"text_config", "attn_config", "ffn_config", "quant_method", "bits", "group_size"})


def check_read(read: Callable[[], KnownModel]) -> None:
    """Anything is read, with sizes in their limits, or refused in a line, and soon; what is read can be printed."""
    started = time.process_time()
    try:
        made = read()
        for quant in ("Q4_K_M", "MXFP4"):
            quantised(made, quant)
    except TraceError as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 1000
        return
    finally:
        assert time.process_time() - started < 10
    KnownModel.model_validate(made.model_dump())
    assert made.kv_bytes >= made.kv_held(4096) // 4096 >= 0
    assert all("\n" not in text for _, text in explained(made))


@AT_ANY_PACE
@given(st.sampled_from(sorted(CONFIGS)), st.dictionaries(st.sampled_from(KEYS_OF_CONFIGS), HOSTILE, max_size=3))
def test_no_config_is_a_bug(name: str, changed: dict[str, Any]) -> None:
    config = CONFIGS[name]
    inner = "text_config" if "text_config" in config and "text_config" not in changed else ""
    check_read(lambda: of_config(config | ({inner: config[inner] | changed} if inner else changed)))


GGUF_KEYS = ["block_count", "expert_count", "expert_used_count", "embedding_length", "attention.head_count"]
GGUF_KEYS += ["attention.head_count_kv", "attention.key_length", "attention.sliding_window", "attention.kv_lora_rank"]
GGUF_KEYS += ["attention.sliding_window_pattern", "attention.compress_ratios", "attention.indexer.key_length"]
GGUF_KEYS += ["attention.shared_kv_layers", "nextn_predict_layers", "context_length", "expert_shared_count", "strange"]
GGUF_VALUES = st.sampled_from(
    [
        *(0, 1, 2, 7, -1, 1 << 31, (1 << 63) - 1, math.nan, math.inf, -0.5, True, "", "x", "9" * 5000),
        *([], [1, 1], [0, 1], [-1, 2], ["x", ""], [math.nan, 1.0], [True, False], [1] * 9000),
    ]
)
AXES = st.lists(st.sampled_from([0, 1, 32, 256, 1 << 20, 1 << 40, (1 << 64) - 1]), min_size=1, max_size=4).map(tuple)


@AT_ANY_PACE
@given(
    st.dictionaries(st.sampled_from(GGUF_KEYS), GGUF_VALUES, max_size=3),
    st.just((32, 32, 8)) | AXES,
    st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(1, 255)), max_size=2),
    st.none() | st.integers(0, 1 << 12),
)
def test_no_gguf_header_is_a_bug(
    changed: dict[str, Any], shape: tuple[int, ...], flips: list[tuple[int, int]], end: int | None
) -> None:
    data = bytearray(moe({f"llama.{key}": value for key, value in changed.items()}, shape))
    for at, bits in flips:
        data[at % len(data)] ^= bits
    data = data[:end]
    path = Path("m.gguf")
    check_read(lambda: model_of_gguf([read_header(io.BytesIO(data), path, len(data))], "m", "a test"))


PLACES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["BF16", "F8_E4M3", "NEW", "", [], None, 4, {}]),
        "shape": st.lists(st.sampled_from([0, 1, 8, 32, -1, 1 << 40, 10**300, 0.5, "x", None, True]), max_size=9)
        | HOSTILE,
        "data_offsets": st.lists(st.sampled_from([0, 64, 2048, -1, 1 << 62, 10**300, 1.0, "x", None]), max_size=3)
        | HOSTILE,
    },
)


@AT_ANY_PACE
@given(st.dictionaries(st.integers(0, 47), PLACES | HOSTILE, max_size=3), st.integers(0, 1 << 20))
def test_no_safetensors_header_is_a_bug(changed: dict[int, Any], end: int) -> None:
    names = [
        f"model.layers.{at // 12}.mlp.experts.{at // 3 % 4}.{('gate', 'up', 'down')[at % 3]}_proj.weight"
        for at in range(48)
    ]
    header = {name: {"dtype": "BF16", "shape": [32, 64], "data_offsets": [0, 4096]} for name in names}
    header |= {names[at]: place for at, place in changed.items()}
    check_read(lambda: with_sizes(of_config(OK), sizes_of(tensors_of(header, "a test", end), "a test", 4), "a test"))
