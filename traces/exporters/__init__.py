"""Traces in the formats of other tools. To add one: its name in `MODULES`, and a constant of its module."""

#: In the order of `moereplay export --list`; a dash or a dot of a format's name is an underscore here.
MODULES = {
    **dict.fromkeys(("csv", "jsonl", "parquet", "hf"), "rows"),
    "oracle_general": "oracle_general",
    **dict.fromkeys(("llama_cpp", "llama_cpp_profile", "ktransformers", "ktransformers_rules", "sglang"), "engines"),
}
NAMES = tuple(MODULES)
