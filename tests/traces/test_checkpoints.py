"""Sizes of a model from its own files: exact against the models themselves, and no file is trusted."""

from __future__ import annotations

import http.server
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moereplay.traces import network
from moereplay.traces.checkpoints.config import numbers_of
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.checkpoints.gguf import TYPES
from moereplay.traces.geometry import known_models
from moereplay.traces.schema import TraceError
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
    "exaone_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 80,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
    },
}


def test_the_config_and_the_tensors_of_real_models_give_their_parameters_and_bytes(tmp_path: Path) -> None:
    """Every family is saved with random weights; its config alone and its headers are compared with the weights."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    for family, extra in FAMILIES.items():
        config = AutoConfig.for_model(family, **COMMON, **extra)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        folder = tmp_path / family
        model.save_pretrained(folder, max_shard_size="100KB")
        said = json.loads((folder / "config.json").read_text())
        weights = {name: tensor.numel() for name, tensor in model.named_parameters()}
        experts = sum(size for name, size in weights.items() if ".experts." in name or "_linear.weight" in name)
        numbers = numbers_of(said, family, "a test")
        # norms of queries and keys, and biases, are left out of the formulas
        assert numbers.total() == pytest.approx(sum(weights.values()), rel=0.02), family
        exact = model_of(str(folder)).geometry
        assert sum(exact.expert_bytes) * exact.experts == 2 * experts, family
        stored = sum(2 * size for size in weights.values())
        assert stored <= sum(exact.expert_bytes) * exact.experts + exact.dense_bytes <= stored * 1.01, family
        assert (exact.experts, exact.k, exact.layers) == (numbers.experts, numbers.k, numbers.layers), family


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


OK = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32} | COMMON


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("config.json", b"", "config.json"),
        ("config.json", b"[1]", "JSON object"),
        ("config.json", b'{"num_experts": NaN}', "config.json"),
        ("config.json", json.dumps(COMMON | {"model_type": "llama"}).encode(), "without routed experts"),
        ("config.json", json.dumps(OK | {"num_experts": 1}).encode(), "without routed experts"),
        ("config.json", json.dumps(OK | {"num_experts": "four"}).encode(), "num_experts four"),
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
        ("m.gguf", b"GGUF", "truncated"),
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
    wrong = {"model.layers.0.mlp.experts.0.up_proj.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 9]}}
    text = json.dumps(wrong).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(TraceError, match="cannot have 9 bytes"):
        model_of(str(tmp_path))
