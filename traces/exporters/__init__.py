"""Traces in the formats of other tools. To add one: a module here with an `EXPORTER`, and its name in `NAMES`."""

#: In the order of `moereplay export --list`; a dash or a dot of a format's name is an underscore here.
NAMES = (
    "csv",
    "jsonl",
    "parquet",
    "hf",
    "oracle_general",
    "llama_cpp",
    "llama_cpp_profile",
    "ktransformers",
    "ktransformers_rules",
    "sglang",
)
