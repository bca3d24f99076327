"""lm-evaluation-harness's own interface to a model of transformers, with what runs the model replaced by a session.

Tasks, prompts, truncation and scoring are the harness's. Importing this file imports it, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from moereplay.tracegen.decoding import Sampler, endings, input_device, seed_of
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.plan import Decoding
from moereplay.tracegen.quality.session import Session
from moereplay.tracegen.quality.texts import Continued, TeacherForced

#: Generation settings that `Sampler` has; others would silently mean something else.
KNOWN = {"do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks"}


_Theirs: Any = HFLM  # registered by a decorator whose type hides the class from type checkers


class UnderPolicies(_Theirs):
    """A model whose texts a session reads: under policies, or unmodified."""

    def __init__(self, session: Session, batch: int, seed: int) -> None:
        loaded = session.subject.loaded
        super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, backend="causal", batch_size=batch)
        self._session, self._seed, self._generated = session, seed, 0

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Return the natural log-likelihood of each continuation, and whether greedy decoding produces it."""
        texts = [self._given(context, continuation) for _, context, continuation in requests]
        self._session.read(texts)
        return [(text.logprob, text.greedy) for text in texts]

    def _given(self, context: list[int], continuation: list[int]) -> TeacherForced:
        """Truncate from the left, as the harness does."""
        ids = (context + continuation)[-(self.max_length + 1) :]
        prompt = len(ids) - len(continuation)
        return TeacherForced(ids, max(prompt, 1), max(prompt, 1))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt, up to the first of its stops."""
        asked = [self._continued(*request.args) for request in requests]
        self._session.read([text for text, _ in asked])
        return [
            postprocess_generated_text(self.tok_decode(text.added), stops, think_end_token=None)
            for text, stops in asked
        ]

    def _continued(self, prompt: str, settings: dict[str, Any]) -> tuple[Continued, list[str]]:
        wanted: dict[str, Any] = {**normalize_gen_kwargs(settings, self.max_gen_toks)}
        if unknown := sorted(set(wanted) - KNOWN):
            raise RecordError(f"generation setting {unknown[0]!r} of this task is not supported; have: {sorted(KNOWN)}")
        most = int(wanted["max_gen_toks"])
        if most >= self.max_length:
            raise RecordError(
                f"a task requests {most} new tokens: expected at most {self.max_length}, the model's context"
            )
        stops = handle_stop_sequences(
            wanted["until"], eos=self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        ids, _ = self.tok_batch_encode([prompt], left_truncate_len=self.max_length - most, truncation=self.truncation)
        sampler = Sampler(_decoding(wanted, most), seed_of(self._seed, self._generated), input_device(self.model))
        self._generated += 1
        return Continued(ids[0].tolist(), most, self._over(stops), sampler), stops

    def _over(self, stops: Sequence[str]) -> Any:
        """Return whether the model ended the text or the text contains a stop string."""
        ends = endings(self.model) | {self.eot_token_id}
        return lambda added: added[-1] in ends or any(stop in self.tok_decode(added) for stop in stops if stop)


def _decoding(wanted: Any, most: int) -> Decoding:
    sampled = wanted.get("do_sample", False)
    drawn = {name: wanted[name] for name in ("top_p", "top_k") if name in wanted} if sampled else {}
    return Decoding(max_new_tokens=most, temperature=wanted["temperature"] if sampled else 0.0, **drawn)
