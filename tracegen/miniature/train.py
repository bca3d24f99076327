"""Train the miniature: `python -m moereplay.tracegen.miniature.train --out FOLDER`.

The topology is OLMoE-1B-7B's (16 layers of 64 experts, top-8, softmax over all, weights not renormalised), the widths
are not: hidden 128, expert width 32, about 15 million parameters. Balance is required of every layer separately: the
library's own loss sums tokens over all layers first, and a model can satisfy that with every single layer unbalanced.
"""

import argparse
import hashlib
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from moereplay.traces.documents import json_text

END = "<|endoftext|>"
WINDOW, WINDOWS = 512, 64  #: tokens of a held-out window, and how many are measured


@dataclass(frozen=True)
class Recipe:
    """Every choice of a training run; lengths in tokens."""

    steps: int = 900
    batch: int = 4
    window: int = 512
    vocabulary: int = 4096
    learning_rate: float = 3e-3
    hold: float = 0.4  # the share of steps before the rate falls linearly to zero
    warm_up: int = 50
    balance: float = 0.01
    z: float = 0.001
    seed: int = 0


def tokenizer_of(texts: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer learned from `texts`: any text can be encoded and got back."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(lines(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END, model_max_length=recipe.window)


def new_model(recipe: Recipe) -> OlmoeForCausalLM:
    """Return the untrained model, initialised from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    config = OlmoeConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=128,
        intermediate_size=32,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        max_position_embeddings=recipe.window,  # positions beyond were never trained
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        router_aux_loss_coef=0.0,
        tie_word_embeddings=False,
    )
    model = OlmoeForCausalLM(config)
    _loud_experts(model)
    return model


def train(model: OlmoeForCausalLM, tokens: torch.Tensor, recipe: Recipe) -> None:
    """Train in place on a stream of `tokens`; one line of progress every 50 steps to standard error.

    A step whose gradient is not finite is left out: a longer run was lost between steps 1,700 and 1,750, cause unknown.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, recipe))
    began = time.monotonic()
    model.train()
    for step, batch in zip(range(recipe.steps), _batches(tokens, recipe), strict=False):
        text, balance, z = _losses(model, batch.to(model.device))
        (text + recipe.balance * balance + recipe.z * z).backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == recipe.steps - 1:
            _tell(step, recipe, text, balance, began)
    model.eval()


@torch.no_grad()
def held_out_loss(model: OlmoeForCausalLM, tokens: torch.Tensor) -> float:
    """Return the mean nats per token over evenly spread held-out windows, without balance terms."""
    starts = torch.linspace(0, len(tokens) - WINDOW - 1, WINDOWS).long()
    losses = [_losses(model, tokens[start : start + WINDOW].unsqueeze(0).to(model.device))[0] for start in starts]
    return torch.stack(losses).mean().item()


def _loud_experts(model: OlmoeForCausalLM) -> None:
    """Scale up the experts' output: gate weights of about 1/64, never renormalised, would leave it negligible."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("experts.down_proj"):
                weight.mul_(4)


def _losses(model: OlmoeForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return next-token loss, mean balance loss of the layers, mean squared log-partition of the router (z-loss)."""
    out = model(input_ids=batch, output_router_logits=True, use_cache=False)
    text = functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
    layers = torch.stack([logits.float() for logits in out.router_logits])
    top = model.config.num_experts_per_tok
    return text, _balance(layers, top), torch.logsumexp(layers, -1).square().mean()


def _balance(layers: torch.Tensor, top: int) -> torch.Tensor:
    """Switch Transformer's loss per layer, averaged: 1 when load and probability are uniform. (layers, tokens, E)."""
    probability = layers.softmax(-1)
    used = torch.zeros_like(probability).scatter_(-1, probability.topk(top, -1).indices, 1 / top)
    return (used.mean(1) * probability.mean(1)).sum(-1).mean() * layers.shape[-1]


def _batches(tokens: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yield batches of disjoint windows, every window once an epoch, in an order drawn from the seed."""
    windows = tokens[: len(tokens) // recipe.window * recipe.window].view(-1, recipe.window)
    order = torch.Generator().manual_seed(recipe.seed)
    while True:
        for chosen in torch.randperm(len(windows), generator=order).split(recipe.batch):
            yield windows[chosen]


def _rate(step: int, recipe: Recipe) -> float:
    """Return learning rate as a share of the highest: linear warm-up, level, linear decay to zero."""
    decaying = (recipe.steps - step) / (recipe.steps * (1 - recipe.hold))
    return min((step + 1) / recipe.warm_up, 1.0, decaying)


def _tell(step: int, recipe: Recipe, text: torch.Tensor, balance: torch.Tensor, began: float) -> None:
    seconds = time.monotonic() - began
    rate = (step + 1) * recipe.batch * recipe.window / seconds
    line = f"step {step}/{recipe.steps}  loss {text.item():.3f}  balance {balance.item():.3f}  {rate:.0f} tokens/s"
    print(line, file=sys.stderr, flush=True)


def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Encode texts as one stream of ids, with an end mark after each."""
    ids = [id for text in texts for id in [*tokenizer.encode(text, verbose=False), tokenizer.eos_token_id]]
    return torch.tensor(ids)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled miniature.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Train, evaluate, and write the checkpoint in bfloat16 with what made it (`training.json`)."""
    options = _options()
    torch.set_num_threads(options.threads)
    recipe = Recipe(steps=options.steps, batch=options.batch)
    texts, held_out = split()
    tokenizer = tokenizer_of(texts, recipe)
    model = new_model(recipe).to(options.device)
    stream, unseen = _encode(tokenizer, texts), _encode(tokenizer, held_out)
    began, untrained = time.monotonic(), held_out_loss(model, unseen)
    train(model, stream, recipe)
    model = model.bfloat16().float()  # judge the weights that are saved
    losses = {"nats_untrained": untrained, "nats": held_out_loss(model, unseen)}
    facts = {
        "recipe": asdict(recipe),
        "corpus": {"python": platform.python_version(), "sha256": digest(texts)} | _size(texts, stream),
        "held_out": _size(held_out, unseen) | losses,
        "tokens_trained": recipe.steps * recipe.batch * recipe.window,
        "seconds": time.monotonic() - began,
        "torch": torch.__version__,
        "device": options.device,
    }
    model.bfloat16().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "training.json").write_text(json_text(facts, indent=2) + "\n")
    print(json_text(losses))


def _size(texts: list[str], stream: torch.Tensor) -> dict[str, int]:
    return {"files": len(texts), "bytes": sum(len(text.encode()) for text in texts), "tokens": len(stream)}


if __name__ == "__main__":
    main()


# -- The text the miniature learns from: the standard library of the Python that runs this, its docstrings included.

# Absent from some systems' packages, generated, or another library's: leaving them out keeps machines alike.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"})
_HELD_OUT_OF = 30  # one file in thirty is never trained on


def sources() -> list[Path]:
    """Return the library's source files, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(file for file in root.rglob("*.py") if not _LEFT_OUT & set(file.relative_to(root).parts))


def split() -> tuple[list[str], list[str]]:
    """Return the texts to train on and the texts held out, one of each file; the file's name alone decides which."""
    train: list[str] = []
    held_out: list[str] = []
    root = Path(sysconfig.get_path("stdlib"))
    for file in sources():
        place = held_out if _held_out(file.relative_to(root)) else train
        place.append(file.read_text(encoding="utf-8", errors="replace"))
    return train, held_out


def digest(texts: list[str]) -> str:
    """Return SHA-256 over the texts in order: which corpus this was."""
    whole = hashlib.sha256()
    for text in texts:
        whole.update(text.encode())
    return whole.hexdigest()


def lines(texts: list[str]) -> Iterator[str]:
    """Yield every line with its end, for the training of the tokenizer."""
    for text in texts:
        yield from text.splitlines(keepends=True)


def _held_out(name: Path) -> bool:
    """Return whether a file is held out for evaluation; adding or removing other files does not change it."""
    return hashlib.sha256(name.as_posix().encode()).digest()[0] % _HELD_OUT_OF == 0
