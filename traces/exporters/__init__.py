"""Traces in the formats of other tools. To add one: its name in `NAMES`, and a module with it as a constant."""

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
#: Modules of formats that share a layout or a reader; every other format has a module of its name.
MODULES = {
    **dict.fromkeys(("csv", "jsonl"), "lines"),
    **dict.fromkeys(("llama_cpp", "llama_cpp_profile"), "llama_cpp"),
    **dict.fromkeys(("ktransformers", "ktransformers_rules"), "ktransformers"),
}
