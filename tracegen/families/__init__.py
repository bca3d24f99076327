"""One file per family of MoE models that routes in its own way. Adding one is a file here and its name below."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from moereplay.tracegen.families.contract import Family

NAMES: tuple[str, ...] = (
    "olmoe",
    "mixtral",
    "qwen2_moe",
    "phimoe",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_moe",
    "gpt_oss",
    "glm4_moe",
    "granitemoe",
    "ernie4_5_moe",
    "qwen3_next",
    "deepseek_v32",
    "dots1",
    "glm4_moe_lite",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "jamba",
    "kimi_linear",
    "minimax",
    "minimax_m2",
    "nemotron_h",
    "qwen3_5_moe",
)


@cache
def catalogue() -> tuple[Family, ...]:
    """Every family, in the order of NAMES."""
    return tuple(import_module(f"moereplay.tracegen.families.{name}").FAMILY for name in NAMES)


def of(model_type: str) -> Family | None:
    """The family of a config's `model_type`, or None if no file here states it."""
    return next((family for family in catalogue() if model_type in family.model_types), None)
