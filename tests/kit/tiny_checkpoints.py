"""Whole checkpoints on disk, small and random: a tiny model of a family and a tokenizer of one token per character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.kit.tiny_models import tiny_model

CONTEXT = 64
CHARACTERS = "\n" + "".join(map(chr, range(32, 126)))  #: with <s>, all 96 tokens that tiny models know


def character_tokenizer(opening: bool = False, template: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """Ids: <s> is 0, a newline 1, a space 2. With `opening`, <s> comes before every text, as with Llama."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(WordLevel({"<s>": 0} | {each: at for at, each in enumerate(CHARACTERS, 1)}, "<s>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    if opening:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")
    made.chat_template = template
    return made


def checkpoint(
    folder: Path, family: str = "olmoe", dtype: torch.dtype = torch.float32, opening: bool = False, **keys: Any
) -> Path:
    """Save a tiny model with its tokenizer; contexts of 64 tokens."""
    model = tiny_model(family, dtype, **({"max_position_embeddings": CONTEXT} | keys))
    model.save_pretrained(folder)
    character_tokenizer(opening).save_pretrained(folder)
    return folder
