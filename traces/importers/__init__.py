"""Other tools' traces. To add a format: one module here with an `IMPORTER`, and its name in `NAMES`."""

#: In the order of sniffing; `generic` claims every csv and jsonl, so it comes last.
NAMES = (
    *("sglang_recorder", "sglang_response", "vllm_response", "cecar", "router_logits", "dynande"),
    *(
        "gptoss_npz",
        "layers_npz",
        "layer_files",
        "gptoss_json",
        "routing_atlas",
        "layer_rows",
        "route_trace",
        "token_lines",
        "route_lines",
    ),
    *(
        "llama_positions",
        "llama_ranks",
        "llama_records",
        "router_binaries",
        "layer_log",
        "colibri_route",
        "onnx_routing",
    ),
    *("cache_lab", "named_jsonl", "moe_beyond"),
    *("arrays", "exported", "columns", "generic"),
)
