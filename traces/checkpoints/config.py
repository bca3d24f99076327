"""Sizes of a Mixture-of-Experts model from its Hugging Face `config.json`.

Families spell the same sizes differently; the aliases of `Config` list the spellings, and every figure is read there,
with its limits. A layer is described by two facts: how it mixes tokens (attention, latent attention, a linear kind),
and whether its MLP is dense or a mixture. Sums over layers follow from `ModelNumbers`. Linear kinds are described as
Mamba-2 with about the same number of weights; a checkpoint's own headers (`traces/checkpoints/tensors.py`) are exact,
and are used if they are available. What is not known here, an architecture or a key of attention, is named in
`ModelNumbers.assumed`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from moereplay.traces.documents import first_fault
from moereplay.traces.geometry import (
    HEAVY,
    SPARSE,
    Attention,
    LatentAttention,
    Mamba2,
    Mixer,
    ModelNumbers,
    Published,
    compressed,
)
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, Router, TraceError, shown

#: Tables of a multimodal config that hold its language model.
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
NESTED = ("ffn_config", "attn_config")  #: tables of DBRX's
#: Architectures whose layers are read as their code builds them; of others attention is taken to be plain.
ARCHITECTURES = frozenset(
    """afmoe aria aria_text axk1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v2 cohere2_moe dbrx deepseek
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_v41 deepseek_v41_text dots1 ernie4_5_moe exaone_moe
    flex_olmo gemma4 gemma4_text gemma4_unified glm5_next glm5_next_text glm4_moe glm4_moe_lite glm4v_moe
    glm4v_moe_text glm_moe_dsa gpt_oss granitemoe granitemoehybrid granitemoeshared grok-1 hunyuan hunyuan_v1_moe
    hy_v3 jamba kimi_k2 kimi_k25 kimi_linear laguna lfm2_moe llama4 llama4_text mellum mimo_v2 mimo_v2_flash minimax
    minimax_m1 minimax_m2 minimax_text_01 mistral4 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe
    qwen3_5_moe_text qwen3_moe qwen3_next qwen3_vl_moe qwen3_vl_moe_text qwen4_exp qwen4_exp_text skywork
    smallthinker solar_open step3p5 step3p7 xverse""".split()  # noqa: SIM905
)
#: Families whose every MLP is a mixture, so that `intermediate_size` is the width of an expert.
EXPERT_WIDTH_IS_INTERMEDIATE = frozenset(
    """mixtral olmoe phimoe gpt_oss granitemoe granitemoeshared granitemoehybrid minimax minimax_m1 minimax_m2
    minimax_m3_vl_text minimax_text_01 llama4 llama4_text jamba flex_olmo cohere2_moe grok-1 grok1 hunyuan
    hunyuan_v1_moe dbrx aria_text minicpm skywork xverse""".split()  # noqa: SIM905
)
SIGMOID = (
    "deepseek_v3",
    "deepseek_v4",
    "glm4_moe",
    "glm_moe",
    "glm5_next",
    "kimi",
    "minimax_m2",
    "bailing",
    "dots1",
    "nemotron_h",
)
SIGMOID += ("glm5_next", "lfm2_moe", "mimo_v2", "solar_open", "step3p")
#: An MLP of two matrices, without a gate.
UNGATED = ("relu2", "relu_squared")


def _size(keys: str, least: int = 0, most: int = 1 << 20) -> Any:
    """Return the field of a size under any of these keys; the first one found counts."""
    return Field(default=None, validation_alias=AliasChoices(*keys.split()), ge=least, le=most)


def _either(default: object, *keys: str) -> Any:
    """Return the field of another value under any of these keys."""
    return Field(default=default, validation_alias=AliasChoices(*keys))


Layered = Annotated[list[str], Field(max_length=2 * MOST_LAYERS)]
Places = Annotated[list[Annotated[int, Field(ge=0, le=1 << 20)]], Field(max_length=2 * MOST_LAYERS)]
Rows = Annotated[list[Annotated[int, Field(ge=0, le=1 << 40)]], Field(max_length=2 * MOST_LAYERS)]
Small = Annotated[int, Field(ge=0, le=1 << 20)]
Step = Annotated[int, Field(ge=1, le=MOST_LAYERS)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _present(cls, found: Any) -> Any:
        return {key: value for key, value in found.items() if value is not None} if isinstance(found, dict) else found

    @field_validator("*", mode="before")
    @classmethod
    def _largest(cls, value: object, info: ValidationInfo) -> object:
        """Return the largest of a list where one size is expected: it has one value for each layer."""
        is_size = info.field_name is not None and cls.model_fields[info.field_name].annotation == (int | None)
        if is_size and isinstance(value, list) and value and all(type(each) is int for each in value):
            return max(value)
        return value


class Linear(_Table):
    """`linear_attn_config` of Kimi-Linear and K3; layers count from 1."""

    full_attn_layers: Places = []
    num_heads: Small | None = None
    head_dim: Small | None = None
    short_conv_kernel_size: Small | None = None
    use_full_rank_gate: bool = False


class Windowed(_Table):
    """`attention_other_setting` of Step-3.5: heads of the layers with a window."""

    num_attention_heads: Small | None = None
    num_attention_groups: Small | None = None
    head_dim: Small | None = None


class Weights(_Table):
    """Weights of a group of `compressed-tensors`."""

    num_bits: Annotated[int, Field(ge=1, le=16)]
    type: str = "int"
    group_size: Small = 0


class Group(_Table):
    """A group of layers of `compressed-tensors`."""

    weights: Weights | None = None


class Quantisation(_Table):
    """`quantization_config`, in the spellings of its methods."""

    quant_method: str = ""
    format: str = ""
    quant_algo: str = ""
    bits: int | None = _size("bits w_bit", least=1, most=16)
    group_size: int | None = _size("group_size q_group_size", least=-1)
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    expert_dtype: str = _either("", "expert_dtype", "store_dtype")
    config_groups: dict[str, Group] = {}


class Config(_Table):
    """The keys of a `config.json` that sizes depend on. Keys with the value null count as absent."""

    model_type: str = ""
    layers: int | None = _size("num_hidden_layers n_layers num_layers n_layer", least=1, most=MOST_LAYERS)
    hidden: int | None = _size("hidden_size d_model n_embd", least=1)
    experts: int | None = _size(
        "num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts moe_num_primary_experts",
        most=MOST_EXPERTS,
    )
    k: int | None = _size(
        "num_experts_per_tok num_experts_per_token top_k_experts moe_topk "
        "moe_k moe_top_k experts_per_token num_selected_experts moe_num_active_primary_experts",
        most=MOST_EXPERTS,
    )
    width: int | None = _size(
        "moe_intermediate_size expert_ffn_hidden_size expert_intermediate_size moe_ffn_hidden_size"
    )
    latent: int | None = _size("moe_latent_size routed_expert_hidden_size")
    dense_width: int | None = _size("intermediate_size_mlp dense_intermediate_size intermediate_size ffn_hidden_size")
    intermediate_size: int | None = _size("intermediate_size")
    shared: int | None = _size(
        "n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert", most=MOST_EXPERTS
    )
    shared_width: int | None = _size(
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "shared_intermediate_size share_expert_dim share_expert_dims"
    )
    vocab: int | None = _size("vocab_size", least=1, most=1 << 28)
    context: int | None = _size("max_position_embeddings max_seq_len model_max_length seq_length", most=1 << 40)
    mtp: int | None = _size("num_nextn_predict_layers mtp_num_hidden_layers num_mtp_modules", most=MOST_LAYERS)
    tie_word_embeddings: bool = False
    mlp_hidden_act: str = ""
    # attention
    heads: int | None = _size("num_attention_heads n_heads n_head", least=1, most=1 << 16)
    kv_heads: int | None = _size("num_key_value_heads num_query_groups num_attention_groups kv_n_heads")
    head_dim: int | None = _size("head_dim kv_channels attention_head_dim", least=1, most=1 << 16)
    v_head_dim: int | None = _size("v_head_dim")
    global_head_dim: int | None = _size("global_head_dim")
    num_global_key_value_heads: int | None = _size("num_global_key_value_heads")
    swa_heads: int | None = _size("swa_num_attention_heads num_sliding_attention_heads")
    swa_kv_heads: int | None = _size("swa_num_key_value_heads")
    swa_head_dim: int | None = _size("swa_head_dim")
    swa_v_head_dim: int | None = _size("swa_v_head_dim")
    attention_other_setting: Windowed = Windowed()
    q_lora_rank: int | None = _size("q_lora_rank")
    kv_lora_rank: int | None = _size("kv_lora_rank")
    qk_nope_head_dim: int | None = _size("qk_nope_head_dim")
    qk_rope_head_dim: int | None = _size("qk_rope_head_dim")
    o_lora_rank: int | None = _size("o_lora_rank")
    o_groups: int | None = _size("o_groups", least=1)
    index_head_dim: int | None = _size("index_head_dim indexer_head_dim")
    pooled: int | None = _size("index_kpool indexer_compress_ratio", least=1)
    mla_use_output_gate: bool = False
    indexer_types: Layered = []
    compress_ratios: Places = []
    compress_rates: dict[str, Step] = {}
    kv_source_layer_ids: Places = []
    attention_k_eq_v: bool = False
    attn_output_gate: bool = False
    num_kv_shared_layers: int | None = _size("num_kv_shared_layers", most=MOST_LAYERS)
    use_cla: bool = False
    cla_share_factor: int | None = _size("cla_share_factor", least=1)
    window: int | None = _size("sliding_window sliding_window_size", most=1 << 40)
    attention_chunk_size: int | None = _size("attention_chunk_size", most=1 << 40)
    # which layers attend, and how
    layer_types: Layered = []
    attn_type_list: Places = []
    full_attn_idxs: Places = []
    attn_layer_period: Step | None = None
    attn_layer_offset: Small = 0
    attention_every: int | None = _size("full_attention_interval layer_group_size", least=1)
    no_rope_layer_interval: Step | None = None
    window_layout: Places = _either([], "sliding_window_layout", "hybrid_layer_pattern")
    window_pattern: Small | str = _either(0, "sliding_window_pattern", "global_attn_every_n_layers")
    block_types: str | Layered = _either("", "hybrid_override_pattern", "layers_block_type")
    # residual streams, and tables that n-grams of tokens look up
    hc_count: int | None = _size("hc_count", most=1 << 10)
    hc_lowrank: int | None = _size("hc_lowrank")
    engram_num_embeddings: Rows = []
    engram_head_dim: int | None = _size("engram_head_dim")
    ple_layer_ids: Places = []
    ple_embed_dim: int | None = _size("ple_embed_dim")
    ngram_vocab_size_base: int | None = _size("ngram_vocab_size_base", most=1 << 40)
    # which MLPs are mixtures
    mlp_layer_types: Layered = []
    moe_layers: Places = []
    moe_layers_enum: str | Places = ""
    moe_layer_freq: Small | Places = 1
    expert_layer_period: Step | None = None
    expert_layer_offset: Small = 0
    interleave_moe_layer_step: Small = 0
    first: int | None = _size(
        "first_k_dense_replace num_dense_layers moe_layer_start_index n_dense_first_layers moe_layer_num_skipped"
    )
    moe_layer_end_index: Annotated[int, Field(ge=-1, le=1 << 20)] = -1
    moe_step: int | None = _size("decoder_sparse_step moe_layer_interval", least=1)
    mlp_only_layers: Places = []
    # linear kinds
    linear_attn_config: Linear = Linear()
    linear_num_heads: int | None = _size("linear_num_heads")
    linear_head_dim: int | None = _size("linear_head_dim")
    linear_num_value_heads: int | None = _size("linear_num_value_heads")
    linear_value_head_dim: Small = 0
    linear_num_key_heads: Small = 0
    linear_key_head_dim: Small = 0
    kernel: int | None = _size("linear_conv_kernel_dim mamba_d_conv short_conv_kernel_size conv_kernel")
    conv_L_cache: Small = 3  # noqa: N815
    mamba_n_heads: int | None = _size("mamba_n_heads")
    mamba_d_head: Small = 0
    mamba_d_state: Small = 0
    mamba_n_groups: Small = 1
    mamba_expand: int | None = _size("mamba_expand")
    mamba_num_heads: Small = 0
    mamba_head_dim: Small = 0
    n_groups: Small = 1
    ssm_state_size: Small = 128
    # router
    groups: int | None = _size("n_group num_expert_group", most=MOST_EXPERTS)
    topk_group: int | None = _size("topk_group", most=MOST_EXPERTS)
    scale: float = _either(1.0, "routed_scaling_factor", "route_scale", "moe_router_scaling_factor")
    scoring: str = _either("", "scoring_func", "score_function", "moe_router_activation", "moe_router_activation_func")
    norm_topk_prob: bool | None = None
    moe_renormalize: bool = False
    router_jitter_noise: float = 0.01
    # weights
    quantization_config: Quantisation | None = None
    expert_dtype: str = ""


#: Every key that `Config` reads.
KEYS = frozenset(
    str(key)
    for name, field in Config.model_fields.items()
    for key in (field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name])
)
#: Names of layers that attend to all positions.
FULL = ("attention", "full_attention", "global_attention", "indexed_attention")
FULL += ("deepseek_sparse_attention", "qwen_sparse_attention")
#: Keys that may change what a layer keeps or how many experts it has, but for those that do not (`HARMLESS`).
OF_LAYERS = re.compile(
    r"attn|attention|per_layer_config|heads?(_|$)|kv_|window|rank|compress|index|chunk|experts?(_|$)|moe|sparse|mamba|ssm"
)
HARMLESS = re.compile(
    r"dropout|bias|rope|theta|scal|norm|loss|aux|jitter|eps|init|implementation|impl|logit|sink|router|gat(e|ing)|softcap"
    r"|drop|capacity|output_|use_cache|backend|dtype|act_fn|_act$|correction|topk$|n_heads$|qk_head_dim|max_window_layers"
    r"|use_sliding_window|alpha|beta|swiglu|hash|combine|overlap|kernels|chunk_size|mtp|proj|token|attention_type"
    r"|dt_rank|bidirectional|heads_per_layer|add_|_fn$|dspark|index_source|attn_res|budget|ngram|strategy|vision|audio|image|multiplier|precision|kv_cache"
)


def numbers_of(config: Mapping[str, Any], name: str, source: str) -> ModelNumbers:
    """Return the sizes that a `config.json` gives. Raises TraceError for missing or absurd sizes, or no experts."""
    text = _text_part(config)
    try:
        return _numbers(Config.model_validate(text), text, name, source)
    except ValidationError as wrong:
        raise TraceError(f"{name}: {first_fault(wrong)}") from None


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of the config, which multimodal configs nest one or two levels down."""
    for key in TEXT:
        if isinstance(inner := config.get(key), Mapping):
            outer = {name: value for name, value in config.items() if name not in TEXT}
            return outer | {name: value for name, value in _text_part(inner).items() if value is not None}
    nested = {key: value for key in NESTED if isinstance(value := config.get(key), Mapping)}
    inside = {name: value for each in nested.values() for name, value in each.items() if name != "model_type"}
    return inside | {name: value for name, value in config.items() if name not in nested}


def _numbers(config: Config, text: Mapping[str, Any], name: str, source: str) -> ModelNumbers:
    if not config.experts or config.experts == 1:
        what = shown(config.model_type or "this model")
        raise TraceError(f"{name}: {what} is without routed experts: expected a Mixture of Experts")
    k = _needed(config, "k", name)
    if config.model_type.startswith("nemotron") and config.block_types:
        mixers, mixtures, dense = _nemotron(config, name)
    else:
        layers = _needed(config, "layers", name)
        mixers = tuple(
            _mixer(config, kind, count, name) for kind, count in sorted(Counter(_kinds(config, name)).items())
        )
        mixtures = sum(_mixtures(config, layers, name))
        dense = layers - mixtures
    if not mixtures:
        raise TraceError(f"{name}: no layer has routed experts: expected a Mixture of Experts")
    width, dense_width = _widths(config, name)
    shared, shared_width = _shared(config, width)
    published, unknown = _published(config)
    return ModelNumbers(
        source=source,
        assumed="; ".join(filter(None, (*_unknown(config, text), unknown))),
        layers=mixtures,
        experts=config.experts,
        k=k,
        hidden=_needed(config, "hidden", name),
        width=width,
        latent=config.latent or 0,
        matrices=2 if config.mlp_hidden_act in UNGATED else 3,
        shared=shared,
        shared_width=shared_width,
        dense_layers=dense,
        dense_width=dense_width if dense else 0,
        residual=_residual(config),
        tables=_tables(config),
        mixers=mixers,
        vocab=_needed(config, "vocab", name),
        tied=config.tie_word_embeddings,
        context=config.context or 0,
        mtp=config.mtp or 0,
        router=_router(config),
        published=published,
    )


def _residual(config: Config) -> int:
    """Return the weights of a layer that mix its residual streams, before attention and before the MLP (Qwen4-Exp)."""
    count, wide = config.hc_count or 0, (config.hc_count or 0) * (config.hidden or 0)
    return 2 * wide * (2 * config.hc_lowrank + count) if config.hc_lowrank else 0


def _tables(config: Config) -> int:
    """Return the weights of the tables that n-grams look up: rows of `ple_embed_dim` in all, or of `engram_head_dim`.

    The sizes of Qwen4-Exp's tables are primes just above the base that it states.
    """
    width = config.ple_embed_dim or config.hidden or 0
    by_layer = len(config.ple_layer_ids) * (config.ngram_vocab_size_base or 0) * width
    return sum(config.engram_num_embeddings) * (config.engram_head_dim or 0) + by_layer


def _unknown(config: Config, text: Mapping[str, Any]) -> list[str]:
    """Return what the sizes assume where the architecture or a key of its layers is not known."""
    found = []
    if config.model_type not in ARCHITECTURES:
        what = shown(config.model_type) if config.model_type else "without a model_type"
        found.append(f"architecture {what} not known: sizes assume plain attention and experts in every layer")
    found += [
        f"layer type {shown(kind)} not known: it is counted as full attention"
        for kind in sorted(set(config.layer_types))
        if _kind(kind, config).name == "full" and kind not in FULL
    ][:5]
    strange = [
        shown(key)
        for key, value in text.items()
        if value not in (None, False, 0, 1, "", [], {})
        and key not in KEYS
        and OF_LAYERS.search(key)
        and not HARMLESS.search(key)
    ][:5]
    return [*found, *(f"key {key} not known: sizes do not depend on it" for key in strange)]


def _needed(config: Config, what: str, name: str) -> int:
    found = getattr(config, what)
    if not found:
        alias = Config.model_fields[what].validation_alias
        keys = alias.choices if isinstance(alias, AliasChoices) else [what]
        raise TraceError(f"{name}: config.json has none of {', '.join(map(str, keys))}")
    return found


def _widths(config: Config, name: str) -> tuple[int, int]:
    """Return the widths of an expert's MLP and of a dense layer's."""
    plain = config.dense_width or 0
    if not config.width and config.model_type in EXPERT_WIDTH_IS_INTERMEDIATE:
        return config.intermediate_size or plain or _needed(config, "width", name), plain
    return _needed(config, "width", name), plain


def _shared(config: Config, width: int) -> tuple[int, int]:
    """Return the number of shared experts and their total width.

    Llama 4 has one that its config does not list; the dense MLP beside Gemma 4's experts counts as one.
    """
    if config.model_type.startswith(("llama4", "gemma4")):
        return 1, (config.dense_width or 0) if config.model_type.startswith("gemma4") else width
    shared = config.shared or 0
    if config.shared_width:
        return max(shared, 1), config.shared_width * max(shared, 1)
    return shared, shared * width


# -- layers


class Kind(NamedTuple):
    """How a layer mixes tokens."""

    name: str = "full"  #: full, sliding, linear, conv, or reused: attention that keeps nothing of its own
    every: int = 0  #: positions of a compressed row
    indexed: bool = False  #: it keeps keys of an indexer


def _kinds(config: Config, name: str) -> list[Kind]:
    """Return how each layer mixes tokens."""
    layers = _needed(config, "layers", name)
    kinds = [Kind(kind) if isinstance(kind, str) else kind for kind in _named_kinds(config, layers, name)]
    if config.index_head_dim and not any(kind.every for kind in kinds):
        types = _of_layers(config.indexer_types, layers, name, "indexer_types")
        kinds = [kind._replace(indexed=not types or types[at] != "shared") for at, kind in enumerate(kinds)]
    if config.use_cla and (factor := config.cla_share_factor or 1) > 1:
        kinds = [kind if at % factor == 0 else Kind("reused") for at, kind in enumerate(kinds)]
    if shared := config.num_kv_shared_layers:
        kinds = [kind if at < layers - shared else Kind("reused") for at, kind in enumerate(kinds)]
    return kinds


def _named_kinds(config: Config, layers: int, name: str) -> list[Kind] | list[str]:
    if ratios := _of_layers(config.compress_ratios, layers, name, "compress_ratios"):
        kept = config.kv_source_layer_ids or range(layers)  # other layers read what these compressed
        return [Kind("sliding", ratio if at in kept else 0) for at, ratio in enumerate(ratios)]
    if found := _of_layers(config.layer_types, layers, name, "layer_types"):
        return [_kind(each, config) for each in found]
    if full := config.linear_attn_config.full_attn_layers:
        return ["full" if at + 1 in full else "linear" for at in range(layers)]
    if listed := config.attn_type_list or config.full_attn_idxs:
        by_place = len(listed) == layers and set(listed) <= {0, 1}
        return ["full" if (listed[at] if by_place else at in listed) else "linear" for at in range(layers)]
    if period := config.attn_layer_period:
        return ["full" if at % period == config.attn_layer_offset else "linear" for at in range(layers)]
    if every := config.attention_every:
        return ["full" if (at + 1) % every == 0 else "linear" for at in range(layers)]
    if marked := _of_layers(config.window_layout, layers, name, "sliding_window_layout"):
        return ["sliding" if each else "full" for each in marked]
    if config.attention_chunk_size:  # Llama 4: chunks, but in the layers without positions
        every = config.no_rope_layer_interval or 4
        return ["full" if (at + 1) % every == 0 else "sliding" for at in range(layers)]
    if config.window and (pattern := config.window_pattern):
        if isinstance(pattern, str):  # EXAONE: L for a window, G for all positions
            return ["sliding" if pattern[at % len(pattern)] == "L" else "full" for at in range(layers)]
        return ["full" if (at + 1) % pattern == 0 else "sliding" for at in range(layers)]
    if config.window and config.model_type == "gpt_oss":
        return ["full" if at % 2 else "sliding" for at in range(layers)]
    return ["full"] * layers


def _of_layers(values: list[Any], layers: int, name: str, key: str) -> list[Any]:
    """Return a list's values for the layers; further ones are of layers that predict further tokens."""
    if values and len(values) < layers:
        raise TraceError(f"{name}: {key} has {len(values)} values: expected one for each of {layers} layers")
    return values[:layers]


def _kind(text: str, config: Config) -> Kind:
    if "compressed" in text:  # DeepSeek-V4
        return Kind("sliding", config.compress_rates.get(text, SPARSE if "sparse" in text else HEAVY))
    if re.search(r"linear|mamba|recurrent", text):
        return Kind("linear")
    if "conv" in text:
        return Kind("conv")
    return Kind("sliding" if re.search(r"sliding|chunked|local", text) else "full")


def _mixtures(config: Config, layers: int, name: str) -> list[bool]:
    """Return for each layer whether its MLP is a mixture of experts."""
    if kinds := _of_layers(config.mlp_layer_types, layers, name, "mlp_layer_types"):
        return [kind not in ("dense", "mlp") for kind in kinds]
    if listed := config.moe_layers or _enumerated(config.moe_layers_enum, name):
        return [at in listed for at in range(layers)]
    freq = config.moe_layer_freq
    if isinstance(freq, list) and freq:
        return [bool(flag) for flag in _of_layers(freq, layers, name, "moe_layer_freq")]
    if period := config.expert_layer_period:
        return [at % period == config.expert_layer_offset for at in range(layers)]
    if step := config.interleave_moe_layer_step:
        return [(at + 1) % step == 0 for at in range(layers)]
    last = config.moe_layer_end_index if config.moe_layer_end_index >= 0 else layers - 1
    shift, step = (1 if config.moe_step else 0), config.moe_step or 1
    step = freq if step == 1 and isinstance(freq, int) and freq else step
    return [
        (config.first or 0) <= at <= last and at not in config.mlp_only_layers and (at + shift) % step == 0
        for at in range(layers)
    ]


def _enumerated(listed: str | list[int], name: str) -> list[int]:
    """Return the layers of `moe_layers_enum`: a list, or a text such as `3,4,5`."""
    if isinstance(listed, list):
        return listed
    parts = [part.strip() for part in listed.split(",")] if listed else []
    if len(parts) > MOST_LAYERS or not all(re.fullmatch(r"[0-9]{1,5}", part) for part in parts):
        raise TraceError(f"{name}: invalid moe_layers_enum {shown(listed)!r}: expected numbers of layers such as 3,4,5")
    return [int(part) for part in parts]


def _mixer(config: Config, kind: Kind, count: int, name: str) -> Mixer:
    if kind.name == "linear":
        return _linear(config, count, name)
    if kind.name == "conv":  # in 3 x hidden, out hidden: Mamba-2 whose heads make up hidden
        hidden, kernel = _needed(config, "hidden", name), config.conv_L_cache
        return Mamba2(layers=count, heads=hidden // 128, head_dim=128, groups=8, state=hidden // 16, kernel=kernel)
    if config.kv_lora_rank:
        return LatentAttention(
            layers=count,
            heads=_needed(config, "heads", name),
            query_rank=config.q_lora_rank or 0,
            key_rank=config.kv_lora_rank,
            plain=config.qk_nope_head_dim or 0,
            rotary=config.qk_rope_head_dim or 0,
            value=config.v_head_dim or 0,
            index=(config.index_head_dim or 0) if kind.indexed else 0,
            pooled=config.pooled or 1,
            gated=config.mla_use_output_gate,
        )
    return _attention(config, kind, count, name)


def _attention(config: Config, kind: Kind, count: int, name: str) -> Attention:
    heads = _needed(config, "heads", name)
    kv_heads = config.kv_heads or heads
    width = config.head_dim or max(1, _needed(config, "hidden", name) // heads)
    value = config.v_head_dim or 0
    if kind.name == "full" and config.global_head_dim:  # Gemma 4
        width, kv_heads = config.global_head_dim, config.num_global_key_value_heads or kv_heads
    if kind.name == "sliding":
        other = config.attention_other_setting
        heads = config.swa_heads or other.num_attention_heads or heads
        double = 2 if config.model_type == "mimo_v2_flash" else 1
        kv_heads = config.swa_kv_heads or other.num_attention_groups or double * kv_heads
        width, value = config.swa_head_dim or other.head_dim or width, config.swa_v_head_dim or value
    gated = config.attn_output_gate or config.model_type.startswith(("qwen3_next", "qwen3_5", "qwen4_exp"))
    window = (config.window or config.attention_chunk_size or 0) if kind.name == "sliding" else 0
    if config.o_lora_rank is not None:  # DeepSeek-V4
        ranks = {"query_rank": config.q_lora_rank or 0, "output_rank": config.o_lora_rank}
        weights = {"layers": count, "heads": heads, "output_groups": config.o_groups or 1, **ranks}
        weights |= {"kept_bits": 16} if config.kv_source_layer_ids else {}
        return compressed(kv_heads, width, window, kind.every, config.index_head_dim or 0, **weights)
    return Attention(
        layers=count,
        heads=heads + heads // 2 if gated else heads,  # the gate is as wide as the queries
        kv_heads=0 if kind.name == "reused" else kv_heads,
        head_dim=width,
        value_dim=0 if value == width else value,
        window=window,
        index=(config.index_head_dim or 0) if kind.indexed else 0,
        pooled=config.pooled or 1,
        **({"kv_projections": 1, "kept": 2} if kind.name == "full" and config.attention_k_eq_v else {}),
    )


def _linear(config: Config, count: int, name: str) -> Mamba2:
    """Describe a linear layer (Gated DeltaNet, KDA, lightning attention, Mamba or Mamba-2) as a Mamba-2 layer."""
    inside = config.linear_attn_config
    if config.linear_num_value_heads:  # Gated DeltaNet
        heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        groups, state = config.linear_num_key_heads, config.linear_key_head_dim
    elif config.mamba_n_heads:
        heads, width, state = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
        groups = config.mamba_n_groups
    elif config.mamba_expand:  # Mamba of the first kind: in 2 x inner, out inner
        heads, width = config.mamba_expand * _needed(config, "hidden", name) // 64, 64
        groups, state = 1, config.mamba_d_state
    else:  # queries, keys, values and output of heads x width; of gates only one of full rank counts
        heads = inside.num_heads or config.linear_num_heads or _needed(config, "heads", name)
        width = inside.head_dim or config.linear_head_dim or config.head_dim or 128
        groups, state = heads, width if inside.use_full_rank_gate else width // 2
    kernel = config.kernel or inside.short_conv_kernel_size or 4
    return Mamba2(layers=count, heads=heads, head_dim=width, groups=groups, state=state, kernel=kernel)


def _nemotron(config: Config, name: str) -> tuple[tuple[Mixer, ...], int, int]:
    """Read a pattern in which every layer is one of Mamba-2 (M), attention (*), a dense MLP (-), or a mixture (E).

    Return the mixers and the numbers of mixtures and of dense MLPs.
    """
    pattern = config.block_types
    kinds = Counter(pattern) if isinstance(pattern, str) else Counter(_letter(each) for each in pattern)
    mamba = Mamba2(
        layers=kinds["M"],
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        groups=config.n_groups,
        state=config.ssm_state_size,
        kernel=config.kernel or 4,
    )
    return (mamba, _attention(config, Kind(), kinds["*"], name)), kinds["E"], kinds["-"]


def _letter(kind: str) -> str:
    kind = kind.lower()
    return "M" if "linear" in kind or "mamba" in kind else "*" if "attention" in kind else "E" if "moe" in kind else "-"


# -- router and weight format


def _router(config: Config) -> Router:
    family, groups = config.model_type, config.groups or 1
    if config.scoring == "sigmoid" or family.startswith(SIGMOID):
        kind = "sigmoid_groups"
    elif groups > 1:
        kind = "softmax_groups"
    elif family in ("gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid"):
        return Router(family="topk_softmax")
    elif family == "phimoe":
        return Router(family="sparsemixer", jitter=config.router_jitter_noise)
    else:
        kind = "softmax_topk"
    always = family.startswith(("mixtral", "gemma4", "ernie4_5", "qwen4_exp"))
    renormalise = always or (config.moe_renormalize if config.norm_topk_prob is None else config.norm_topk_prob)
    return Router(
        family=kind, groups=groups, groups_kept=config.topk_group or 1, scale=config.scale, renormalise=renormalise
    )


def _published(config: Config) -> tuple[Published, str]:
    """Return the weight format of the experts in the checkpoint, and what is not known of it."""
    said = config.quantization_config
    if said is None:
        return Published(), ""
    method, algorithm = said.quant_method.lower(), (said.quant_algo or said.format).lower()
    groups = [group.weights for group in said.config_groups.values() if group.weights]
    floats = {weights.num_bits: weights.group_size for weights in groups if weights.type == "float"}
    if "fp4" in (config.expert_dtype or said.expert_dtype) or "mxfp4" in (method, algorithm[:5]):
        return Published(format="MXFP4"), ""
    if "nvfp4" in algorithm or 4 in floats:
        return Published(format="MXFP4" if floats.get(4) == 32 else "NVFP4"), ""
    if method in ("fp8", "fbgemm_fp8") or algorithm in ("fp8", "float-quantized") or 8 in floats:
        return Published(format="FP8"), ""
    if groups:
        return _grouped(groups[0].num_bits, groups[0].group_size, 16, f"INT{groups[0].num_bits}"), ""
    if said.bits:  # GPTQ and AWQ keep a zero of as many bits beside each 16-bit scale, MLX a 16-bit bias
        beside = 16 + (said.bits if method else 16)
        return _grouped(said.bits, said.group_size or 0, beside, shown(method.upper()) or f"INT{said.bits}"), ""
    if said.load_in_4bit or said.load_in_8bit:  # bitsandbytes: a 32-bit scale per 64 weights, or per row
        return _grouped(4, 64, 32, "NF4") if said.load_in_4bit else Published(format="INT8", bits=8), ""
    what = shown(method or algorithm) or "without a method"
    return Published(), f"quantisation {what} not known: experts count at 16 bits"


def _grouped(bits: int, group: int, beside: int, name: str) -> Published:
    """Return a format with so many further bits for each group of weights; a group of 0 or -1 is a row."""
    return Published(format=name, bits=bits + (beside / group if group > 0 else 0))
