"""Other tools' traces. To add a format: a module, and a row of `BUILT_IN`; or a package of your own (`plug_ins.py`)."""

#: Formats by name, and the module whose constant of that name, in capitals, is the importer. In the order of sniffing.
BUILT_IN = {
    "sglang_recorder": "sglang_recorder",
    "sglang_response": "answers",
    "vllm_response": "answers",
    "router_logits": "router_logits",
    "gptoss_npz": "gptoss",
    "gptoss_json": "gptoss",
    "route_trace": "route_trace",
    "route_lines": "route_lines",
}
#: Tried after those and after plug-ins, because they take files of many forms; `generic` claims every csv and jsonl.
CATCH_ALLS = {"arrays": "arrays", "exported": "exported", "columns": "columns", "generic": "columns"}
