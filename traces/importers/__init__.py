"""Other tools' traces. To add a format: its name in `NAMES`, and a module with a constant of that name in capitals."""

#: In the order of sniffing; `generic` claims every csv and jsonl, so it comes last.
NAMES = (
    *("sglang_recorder", "sglang_response", "vllm_response", "cecar", "router_logits", "dynande"),
    *("gptoss_npz", "layers_npz", "layer_files", "gptoss_json", "routing_atlas", "layer_rows"),
    *("route_trace", "token_lines", "route_lines"),
    *("llama_positions", "llama_ranks", "llama_records", "router_binaries", "layer_log", "colibri_route"),
    *("onnx_routing", "cache_lab", "named_jsonl", "moe_beyond"),
    *("arrays", "exported", "columns", "generic"),
)
#: Modules of formats that share a layout; every other format has a module of its name.
MODULES = {
    **dict.fromkeys(("sglang_response", "vllm_response"), "answers"),
    **dict.fromkeys(("gptoss_npz", "layers_npz", "arrays"), "npz"),
    **dict.fromkeys(("gptoss_json", "routing_atlas", "layer_rows"), "json_documents"),
    "cecar": "router_logits",
    "colibri_route": "layer_log",
    "generic": "columns",
    "llama_records": "router_binaries",
    **dict.fromkeys(("token_lines", "named_jsonl"), "json_lines"),
    **dict.fromkeys(("llama_positions", "llama_ranks"), "llama_tables"),
}
