# SPDX-License-Identifier: Apache-2.0
"""Compares full prefill with documents prefilled alone and then *repaired* (part of their KV is recomputed)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError

from eval.fidelity import infllm, samkv
from eval.fidelity.cache import EditableCache, Reader
from eval.fidelity.infllm import Chosen, InfLLM
from eval.fidelity.replay import compare
from eval.fidelity.samkv import SamKV
from eval.jsonl import read_rows, text_of
from sglang_reasoncache.cache.repair import ends_of, highest_of
from sglang_reasoncache.custom_params import Repair, repair_of

SAMKV = ("samkv", "samkv-fusion", "samkv-select")
ARMS = ("none", "first:16", "query:.15", "deviation:.15", *SAMKV)
#: A generated answer may have this many tokens more than the right one.
MORE = 8


class Prompt(NamedTuple):
    """A prompt and its answer. The first document is ``tokens[start : ends[0]]``; each further document begins
    where the previous document ends. The answer is ``tokens[answer:]``."""

    name: str
    group: str
    tokens: tuple[int, ...]
    start: int
    ends: tuple[int, ...]
    answer: int


def read(path: Path, tokenizer: Any, cap: int, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` rows of each group of a JSONL file. A row has ``system``, ``documents``, ``question``
    and ``answer``; ``id``, ``group`` and ``lead`` (text before the answer) are optional. Raises OSError if the
    file cannot be read. Raises ValueError if a line is bad or over ``cap`` tokens, or if there are no rows."""
    counts = Counter[str]()
    prompts = []
    for number, row in read_rows(path, lambda row: _prompt(row, tokenizer, cap)):
        counts[row.group] += 1
        if limit is None or counts[row.group] <= limit:
            prompts.append(row._replace(name=row.name or f"{path.stem}:{number}"))
    if not prompts:
        raise ValueError(f"{path}: no rows")
    return prompts


def _prompt(row: dict[str, Any], tokenizer: Any, cap: int) -> Prompt:
    documents = row.get("documents")
    if not isinstance(documents, list) or not documents:
        raise ValueError("field 'documents' is no list of texts, or empty")
    fields = {f"documents[{number}]": text for number, text in enumerate(documents)}
    texts = [text_of({**row, **fields}, name) for name in ("system", *fields, "question")]
    tokens, (start, *ends) = _tokenized(texts, tokenizer)
    lead = _ids(tokenizer, text_of(row, "lead")) if "lead" in row else []
    answer = _ids(tokenizer, text_of(row, "answer"))
    whole = (*tokens, *lead, *answer)
    if len(whole) > cap:
        raise ValueError(f"{len(whole)} tokens; --cap is {cap}")
    name = str(row.get("id", ""))
    group = str(row.get("group", "all"))
    return Prompt(name, group, whole, start, tuple(ends), len(whole) - len(answer))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokenized(texts: Sequence[str], tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, and the position where each text ends, except for the last text. A chat template
    gets a system message, then user messages, counted as in ``sglang_reasoncache/plugin/documents.py``."""
    if not tokenizer.chat_template:
        parts = [_ids(tokenizer, f"{text}\n\n") for text in texts]
        return [*chain(*parts)], [*accumulate(map(len, parts[:-1]))]
    turns = [{"role": "user" if at else "system", "content": text} for at, text in enumerate(texts)]
    try:
        begun = [
            tokenizer.apply_chat_template(
                turns[:count], add_generation_prompt=count == len(turns), tokenize=False
            )
            for count in range(1, len(turns) + 1)
        ]
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses the messages: {error}") from error
    *begins, tokens = (_ids(tokenizer, text) for text in begun)
    if any(begin != tokens[: len(begin)] for begin in begins):
        raise ValueError(
            "the model's chat template writes messages in another way where others follow"
        )
    return tokens, [*map(len, begins)]


def parse(name: str) -> tuple[str, Repair | SamKV | InfLLM]:
    """The kind and the settings of the repair ``name``. Raises ValueError if there is no such repair."""
    if arm := samkv.parse(name):
        return "samkv", arm
    if reads := infllm.parse(name):
        return "infllm", reads
    try:
        return name.partition(":")[0], repair_of(name.replace("deviation:", "query:", 1))
    except ValueError as error:
        repairs = "none, first:TOKENS, ends:TOKENS, query:SHARE, deviation:SHARE, infllm[:SHARE]"
        more = "samkv[-fusion|-select|-calibrated][:BLOCK]"
        raise ValueError(f"--arms must be of {repairs}, {more}, got {name!r}") from error


def most(scores: torch.Tensor, prompt: Prompt, share: float) -> list[int]:
    """The positions of the highest ``scores`` (fp32 ``[positions]``), ascending. Their number is ``share``
    times the number of all documents' tokens. None is in the first document, whose KV needs no repair."""
    first = prompt.ends[0]
    end = prompt.ends[-1]
    count = round(share * (end - prompt.start))
    return (highest_of(scores[first:end].cpu(), count) + first).tolist()


class Documents:
    """Scores prompts with the KV cache of each repair. Keeps only the caches of the last prompt's documents."""

    def __init__(
        self,
        reader: Reader,
        repairs: Mapping[str, tuple[str, Repair | SamKV | InfLLM]],
        prompts: Sequence[Prompt],
        tokenizer: Any = None,
    ) -> None:
        """``tokenizer``: turns what is generated into text; None if F1 is not measured."""
        self._reader = reader
        self._repairs = repairs
        self._tokenizer = tokenizer
        longest = max(len(prompt.tokens) - prompt.ends[-1] for prompt in prompts)
        self._room = longest + MORE
        self._of: Any = None
        #: The caches of the last prompt, by repair; ``full`` is full prefill.
        self.caches: dict[str, EditableCache] = {}
        self._again: dict[str, int] = {}
        self._prompts = prompts
        self._stable: dict[int, list[int]] = {}  # block size -> calibrated layers
        # By block size and stable layers.
        self._profiles: dict[tuple[int, tuple[int, ...]], list[samkv.Profile]] = {}
        self._read_by: dict[str, Chosen] = {}  # by repair

    def scores(self, prompt: Prompt) -> dict[str, dict[str, float]]:
        """Figures of ``full`` and of each repair: ``accuracy``, 1 if each token of the answer is the likeliest,
        else 0; ``nll`` and ``kl`` (full || repair), means over the answer's tokens in nats; ``recomputed``, the
        share of the documents' tokens that were recomputed; ``read``, the share that attention can read. With a
        tokenizer also ``f1``, LongBench's F1 of words of what is generated greedily."""
        end = prompt.ends[-1]
        documents = prompt.tokens[:end], prompt.start, prompt.ends
        if documents != self._of:
            self._of = documents
            self._again = {"full": end - prompt.start, "none": 0}
            self.caches = self._prefilled(prompt)
            self._profiles = {}
            self._read_by = {}
        for name, (kind, repair) in self._repairs.items():
            if kind in ("query", "samkv") or name not in self.caches:
                self.caches[name] = cache = copy.deepcopy(self.caches["none"])
                if isinstance(repair, InfLLM):
                    reads = self._read_by[name] = Chosen(self._reader, cache, prompt, repair)
                    cache.by_head[0] = reads.visible
                    self._again[name] = 0
                    continue
                positions = self.chosen(name, prompt)
                self._again[name] = len(positions)
                if positions:
                    self._reader.again(cache, [prompt.tokens[at] for at in positions], positions)
                    if isinstance(repair, SamKV) and repair.update == "fusion":
                        samkv.fuse(cache, self.caches["none"], positions)
        names = ("full", *self._repairs)
        question = prompt.tokens[end:-1]
        at = prompt.answer - 1 - end
        logits = torch.cat([self._ask(self.caches[name], question)[:, at:] for name in names])
        targets = prompt.tokens[prompt.answer :]
        means = compare(logits, targets) / len(targets)
        wanted = torch.tensor(targets, device=logits.device)
        right = (logits.argmax(-1) == wanted).all(-1).tolist()
        return {
            name: dict(
                accuracy=float(right[row]),
                kl=float(means[row, 1]),
                nll=float(means[row, 0]),
                recomputed=self._again[name] / (end - prompt.start),
                read=self._share_read(name, prompt),
                **self._f1(name, prompt),
            )
            for row, name in enumerate(names)
        }

    def _stable_layers(self, arm: SamKV) -> list[int]:
        if not arm.is_calibrated:
            return list(samkv.last_layers(self._reader.layers))
        if arm.block not in self._stable:
            layers = samkv.calibrate(self._reader, self._prompts, arm.block)
            self._stable[arm.block] = layers
        return self._stable[arm.block]

    def _share_read(self, name: str, prompt: Prompt) -> float:
        if name in self._read_by:
            return self._read_by[name].share
        visible = self.caches[name].visible[0, prompt.start : prompt.ends[-1]]
        return float(visible.float().mean())

    def _f1(self, name: str, prompt: Prompt) -> dict[str, float]:
        """F1 of the words of a greedy answer, which has at most :data:`MORE` tokens more than the right one."""
        if self._tokenizer is None:
            return {}
        # Imported only here, because it takes seconds and warns.
        from lm_eval.tasks.longbench.metrics import qa_f1_score

        cache = self.caches[name]
        length = cache.length
        answer = prompt.tokens[prompt.answer :]
        said: list[int] = []
        tokens = prompt.tokens[length : prompt.answer]
        while len(said) < len(answer) + MORE:
            logits = self._reader.forward(cache, tokens, logits_to_keep=1)
            said.append(int(logits[0, -1].argmax()))
            tokens = (said[-1],)
            if said[-1] == self._tokenizer.eos_token_id:
                break
        cache.length = length
        texts = (self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (said, answer))
        # The right answers are one line.
        prediction, wanted = (text.strip().partition("\n")[0] for text in texts)
        return {"f1": float(qa_f1_score(prediction, wanted))}

    def chosen(self, name: str, prompt: Prompt) -> list[int]:
        """The positions that the repair ``name`` recomputes. :attr:`caches` must hold the prompt's documents.
        For SamKV, the positions that it does not select are also hidden in ``caches[name]``."""
        kind, repair = self._repairs[name]
        if isinstance(repair, SamKV):
            layers = self._stable_layers(repair)
            key = repair.block, tuple(layers)
            if key not in self._profiles:
                self._profiles[key] = samkv.profiles(self._reader, prompt, repair.block, layers)
            profiles = self._profiles[key]
            positions = samkv.select(self._reader, self.caches[name], prompt, profiles, layers)
            return positions if repair.update else []
        cache = self.caches["none"]
        if kind == "query":
            received = torch.zeros(prompt.ends[-1], device=self._reader.device)
            question = prompt.tokens[prompt.ends[-1] : prompt.answer]

            def watch(_: int, __: torch.Tensor, weights: torch.Tensor) -> None:
                received.add_(weights.sum((0, 1, 2))[: len(received)])

            self._ask(cache, question, watch=watch)
            return most(received, prompt, repair.share)
        if kind == "deviation":
            # CacheBlend (arXiv 2405.16444) compares layer 1: layer 0's KV does not depend on other tokens.
            full = self.caches["full"]
            part = slice(prompt.start, prompt.ends[-1])
            apart = torch.zeros(prompt.ends[-1], device=self._reader.device)
            for computed, cached in ((full.keys, cache.keys), (full.values, cache.values)):
                far = (computed[1, 0, :, part] - cached[1, 0, :, part]).float().norm(dim=(0, 2))
                apart[part] += far / far.mean()
            return most(apart, prompt, repair.share)
        assert isinstance(repair, Repair)
        return ends_of(prompt.ends, repair.first, repair.last).tolist()

    def _prefilled(self, prompt: Prompt) -> dict[str, EditableCache]:
        """Two caches. For ``full``, the documents are prefilled together. For ``none``, each is prefilled alone
        behind the tokens before the first document; then its keys are rotated to its place in the prompt."""
        start = prompt.start
        ends = prompt.ends
        tokens = prompt.tokens
        full, composed = (self._read(tokens[:end], ends[-1]) for end in (ends[-1], ends[0]))
        for begin, end in pairwise(ends):
            alone = self._read((*tokens[:start], *tokens[begin:end]))
            reads = [(at, at - begin + start) for at in range(begin, end)]
            composed.redirect(0, reads, self._reader.rotation, (alone, 0))
            composed.length = end
        return {"full": full, "none": composed}

    def _read(self, tokens: Sequence[int], longest: int = 0) -> EditableCache:
        cache = self._reader.cache(1, max(len(tokens), longest) + self._room)
        self._reader.prefill(cache, tokens)
        return cache

    def _ask(self, cache: EditableCache, tokens: Sequence[int], **options: Any) -> torch.Tensor:
        """Returns logits of ``tokens``, put behind the documents. The next call overwrites these tokens' KV."""
        length = cache.length
        logits = self._reader.forward(cache, tokens, **options)
        cache.length = length
        return logits
