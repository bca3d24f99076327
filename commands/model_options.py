"""Options of the verbs that run a real model, typed once: what it reads, how, and where it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from moereplay.commands.terminal import say

if TYPE_CHECKING:
    from moereplay.tracegen.checkpoint import Loaded
    from moereplay.tracegen.folder import Folder

NEW_TOKENS, WINDOW = 64, 1024

Model = Annotated[
    str, typer.Argument(help="Hugging Face id, local folder, or `miniature` (bundled).", show_default=False)
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help=".jsonl, .csv, .parquet (with --field) or .txt (one per line); .gz too; may be given again."),
]
Field = Annotated[str | None, typer.Option(help="What holds the prompt; dots reach inside, as in turns.0.")]
Text = Annotated[list[Path] | None, typer.Option(help="Text to read instead, cut into windows; may be given again.")]
Window = Annotated[int | None, typer.Option(min=2, help=f"Tokens of a --text window; default {WINDOW}.")]
PromptTokens = Annotated[
    int | None, typer.Option(min=1, help="Of a window: these in one pass, the rest one by one; default all in one.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Each prompt as a user's message in the model's chat template.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut prompts that are too long; their end is kept.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The first N requests only.")]
NewTokens = Annotated[int | None, typer.Option(min=1, help=f"At most so many per prompt; default {NEW_TOKENS}.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Sample; default 0, greedy.")]
LookAhead = Annotated[int, typer.Option(min=0, help="Layers ahead whose gates are evaluated at every gate.")]
Quantiser = Annotated[
    str, typer.Option(help="Stores experts at few bits: affine, hqq, bitsandbytes, torchao, ...; best: by width.")
]


class Placement(NamedTuple):
    """Where the model is, and how its weights are stored."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    device_map: Annotated[
        str | None, typer.Option(help="Spread over devices: auto, balanced, ...; needs accelerate.")
    ] = None
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")] = "auto"
    quantise: Annotated[str | None, typer.Option(help="bnb-8bit, bnb-4bit (not fused experts), fp8 (GPU).")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None

    def located(self, model: str) -> Folder:
        """The checkpoint of `model`, checked as far as torch is not needed. Raises RecordError."""
        from moereplay.tracegen.folder import check_revision, located
        from moereplay.tracegen.placement import check_device, check_placement

        check_device(self.device)
        check_placement(self.dtype, self.device_map, self.quantise)
        check_revision(model, self.revision)
        return located(model, self.revision)

    def loaded(self, model: str, folder: Folder) -> Loaded:
        """The model of that checkpoint. Raises RecordError."""
        say(f"loading {model}")
        from moereplay.tracegen.checkpoint import load  # torch takes seconds: the line above comes first

        where = {name: value for name, value in self._asdict().items() if name != "revision"}
        return load(folder, progress=sys.stderr.isatty(), **where)
