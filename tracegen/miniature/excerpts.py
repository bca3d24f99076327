"""Text the miniature has never seen, for prompts and perplexity: `python -m moereplay.tracegen.miniature.excerpts`.

Excerpts of the held-out files, committed so that every machine and every Python version measures the same tokens.
"""

import ast
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from moereplay.tracegen.miniature import train
from moereplay.traces.documents import json_text

PROMPTS, PROMPT_BYTES = 32, 240
EXCERPT_BYTES = 3000


def main() -> None:
    """Write `heldout.txt` and `prompts.jsonl` into this file's folder."""
    folder = Path(__file__).parent
    _, held_out = train.split()
    text = "".join(map(_middle, held_out))
    (folder / "heldout.txt").write_text(text, encoding="utf-8")
    lines = [json_text({"prompt": prompt}) + "\n" for prompt in islice(_evenly(held_out), PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def _middle(text: str) -> str:
    """Return whole lines around the middle of a file."""
    lines = text.splitlines(keepends=True)
    first = last = len(lines) // 2
    while sum(map(len, lines[first:last])) < min(EXCERPT_BYTES, len(text)):
        first, last = max(first - 1, 0), last + 1
    return "".join(lines[first:last])


def _evenly(texts: list[str]) -> Iterator[str]:
    """Yield the beginning of one function of each file in turn, then of the next."""
    heads = [_heads(text) for text in texts]
    while heads:
        for head in list(heads):
            prompt = next(head, None)
            if prompt is None:
                heads.remove(head)
            else:
                yield prompt


def _heads(text: str) -> Iterator[str]:
    """Yield the beginnings of a file's documented functions, cut at a line's end."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            head = "".join(lines[node.lineno - 1 : node.end_lineno])[:PROMPT_BYTES]
            yield head[: head.rfind("\n") + 1]


if __name__ == "__main__":
    main()
