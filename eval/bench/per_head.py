# SPDX-License-Identifier: Apache-2.0
"""Eviction chosen by each layer and head against one choice for all: accuracy at equal saving.

Papers choose in each layer and KV head; a slot of a server holds all of them, so its policies
choose tokens, by scores averaged over layers and heads. What that costs is measured here without
a server, in a loop on the embedded model, in two settings:

- ``decode``: the embedded reasoner's problems, a share of the positions so far, the prompt stays.
- ``prefill``: long prompts under a budget that already holds between blocks of the prompt, as
  KeyDiff is evaluated in its paper. Protected are SnapKV's window and half of H2O's budget.

Writes ``build/bench/per_head.json`` and a table. What was measured is kept in a ``.jsonl``
beside it; the same command goes on after a stop.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.bench.per_head_decoder import RULES, WINDOW, Rule, Schedule, WatchedDecoder, evict
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.model import encode
from eval.tiny_reasoner.task import EOS, generate, grade
from eval.tiny_reasoner.transcript import transcripts

DENSE, PER_HEAD, TOKEN = "dense", "per head", "token"
DECODE, PREFILL = "decode", "prefill"
SHARES = (0.9, 0.8, 0.6)
#: Entries of a head, of prompts of 600 tokens.
BUDGETS = (384, 256, 128)
_LIMITS = {DECODE: 1000, PREFILL: 400}
_BATCH = 50


@dataclass(frozen=True)
class Response:
    """One response in the making."""

    prompt: int
    tokens: list[int]
    saved: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    """One rule at one setting.

    Attributes:
        part: ``decode`` or ``prefill``.
        rule: of :data:`eval.bench.per_head_decoder.RULES`, or ``dense``.
        form: ``per head``, ``token``; of dense "".
        setting: share or budget; 0 of dense.
        saved: entries not held over positions so far, averaged over decode steps of a
            response, and over responses.
        correct: of each problem.
        output_tokens: of each response.
    """

    part: str
    rule: str
    form: str
    setting: float
    saved: float
    correct: list[bool]
    output_tokens: list[int]

    @property
    def name(self) -> tuple[str, str, str, float]:
        return self.part, self.rule, self.form, self.setting


@torch.no_grad()
def respond(
    model: Any,
    prompts: Sequence[list[int]],
    stop: int,
    limit: int,
    rule: Rule | None = None,
    schedule: Schedule | None = None,
    per_head: bool = False,
) -> list[Response]:
    """Greedy responses of at most ``limit`` tokens, ``stop`` included, to a batch of prompts."""
    sequences = [Response(len(prompt), list(prompt)) for prompt in prompts]
    decoder = WatchedDecoder(model, len(prompts), max(map(len, prompts)) + limit)
    live = sequences
    position = 0
    while live:
        logits = decoder.step(torch.tensor([s.tokens[position] for s in live]), position)
        position += 1
        if rule is not None and schedule is not None:
            lengths = torch.tensor([s.prompt for s in live])
            excess = schedule.excess(position, lengths, _held(decoder, position))
            if bool(excess.any()):
                stays = schedule.stays(position, lengths)
                evict(decoder, rule(decoder, position), stays, excess, per_head)
        held = _held(decoder, position).tolist()
        for sequence, token, there in zip(live, logits.argmax(-1).tolist(), held, strict=True):
            if position >= sequence.prompt:
                sequence.saved.append(1 - there / position)
                sequence.tokens.append(token)
        rows = [
            row
            for row, s in enumerate(live)
            if position < s.prompt or (s.tokens[-1] != stop and len(s.tokens) - s.prompt < limit)
        ]
        if len(rows) < len(live):
            live = [live[row] for row in rows]
            decoder.keep(rows)
    return sequences


def _held(decoder: WatchedDecoder, written: int) -> torch.Tensor:
    # Every head of a row holds as many.
    return decoder.held[0, :, 0, :written].sum(-1)


class Bench:
    """The model, problems, and what has been measured.

    Args:
        problems: of each part.
        path: JSONL of trials.
    """

    def __init__(self, problems: int, path: Path) -> None:
        self._path = path
        self._tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
        loaded: Any = AutoModelForCausalLM
        self._model = loaded.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
        begun = transcripts(0, problems)
        self._asked = {
            DECODE: [(problem, "") for problem in generate(0, problems)],
            PREFILL: [(one.problem, " " + one.begun) for one in begun],
        }
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
        # A stop may have cut the last line.
        kept = [line for line in lines if line.endswith("\n")]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(kept), encoding="utf-8")
        self.trials = {trial.name: trial for trial in (Trial(**json.loads(s)) for s in kept)}

    def trial(self, part: str, rule: str, form: str, setting: float) -> Trial:
        """Measure, unless that was done."""
        found = self.trials.get((part, rule, form, setting))
        if found is None:
            found = self._measure(part, rule, form, setting)
            self.trials[found.name] = found
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        return found

    def _measure(self, part: str, rule: str, form: str, setting: float) -> Trial:
        problems = [problem for problem, _ in self._asked[part]]
        chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
        opened = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=False
        )
        begun = [begun for _, begun in self._asked[part]]
        texts = [chat + text for chat, text in zip(opened, begun, strict=True)]
        prompts = [list(ids) for ids in self._tokenizer(texts)["input_ids"]]
        # Of like length together, so that few rows wait for others.
        order = sorted(range(len(prompts)), key=lambda i: (len(begun[i].split(" ")), i))
        answers: dict[int, Response] = {}
        stop, schedule = encode([EOS])[0], schedule_of(part, rule, setting)
        for start in range(0, len(order), _BATCH):
            numbers = order[start : start + _BATCH]
            batch = [prompts[i] for i in numbers]
            args = (stop, _LIMITS[part], RULES.get(rule), schedule, form == PER_HEAD)
            answers |= zip(numbers, respond(self._model, batch, *args), strict=True)
        outputs = [answers[i].tokens[answers[i].prompt :] for i in range(len(prompts))]
        texts = self._tokenizer.batch_decode(outputs, skip_special_tokens=True)
        saved = float(np.mean([np.mean(answer.saved) for answer in answers.values()]))
        correct = [grade(text, problem) for text, problem in zip(texts, problems, strict=True)]
        return Trial(part, rule, form, setting, saved, correct, [len(ids) for ids in outputs])


def schedule_of(part: str, rule: str, setting: float) -> Schedule | None:
    """None for dense."""
    if rule == DENSE:
        return None
    # H2O's paper spends half of the budget on the newest entries.
    newest = 0.5 if rule == "h2o" else 0.0
    if part == DECODE:
        return Schedule(share=setting, recent_share=newest)
    recent = WINDOW if rule == "snapkv" else 1
    return Schedule(budget=int(setting), recent=recent, recent_share=newest, keep_prompt=False)


def plan(rules: Sequence[str], parts: Sequence[str]) -> list[tuple[str, str, str, float]]:
    """Names of all trials, dense first."""
    found = []
    for part in parts:
        found.append((part, DENSE, "", 0.0))
        for setting in SHARES if part == DECODE else BUDGETS:
            for rule in rules:
                # Positions alone decide, the same in every head.
                forms = (TOKEN,) if rule == "streamingllm" else (PER_HEAD, TOKEN)
                found += [(part, rule, form, float(setting)) for form in forms]
    return found


def rows_of(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One row a trial, each against dense of its part on the same problems.

    ``accuracy_error`` is half of the 95% interval of the difference from dense.
    """
    dense = {trial.part: np.array(trial.correct) for trial in trials if trial.rule == DENSE}
    rows = []
    for trial in trials:
        error = half_interval(np.array(trial.correct), dense[trial.part])
        rows.append(
            {
                "part": trial.part,
                "policy": trial.rule,
                "form": trial.form,
                "setting": trial.setting,
                "saved": trial.saved,
                "accuracy": float(np.mean(trial.correct)),
                "accuracy_error": error,
                "output_tokens": float(np.mean(trial.output_tokens)),
                "problems": len(trial.correct),
            }
        )
    return rows


def half_interval(x: np.ndarray, y: np.ndarray) -> float:
    """Half of the 95% interval of the difference of two shares, of bool ``[problems]`` each.

    Newcombe, 1998 (Statistics in Medicine 17, 2635-2650), method 10: Wilson's limits of both,
    squared and added, less what their correlation takes.
    """
    n, both = len(x), int((x & y).sum())
    tests = [stats.binomtest(int(side.sum()), n) for side in (x, y)]
    a, b = (test.statistic for test in tests)
    wilson = [test.proportion_ci(0.95, "wilson") for test in tests]
    covariance: float = both * int((~x & ~y).sum()) - int((x & ~y).sum()) * int((~x & y).sum())
    if covariance > 0:
        covariance = max(covariance - n / 2, 0)
    spread = n * n * math.sqrt(a * (1 - a) * b * (1 - b))
    phi = covariance / spread if spread else 0.0
    sides = [(a - wilson[0].low, wilson[1].high - b), (wilson[0].high - a, b - wilson[1].low)]
    return sum(math.sqrt(max(0.0, p * p - 2 * phi * p * q + q * q)) for p, q in sides) / 2


def table(rows: Sequence[dict[str, Any]], part: str) -> str:
    """Rules by row; per head and token side by side."""
    chosen = pd.DataFrame(rows).query("part == @part").replace({"form": {"": TOKEN}})
    keys = ["policy", "setting"]
    # Of rules that have both forms, the saving of the token form.
    saved = chosen.groupby(keys, sort=False)["saved"].last().map("{:.1%}".format)
    figures = {"accuracy": "", "accuracy_error": " ±"}
    found = {
        form + mark: chosen[chosen["form"] == form].set_index(keys)[figure].map("{:.3f}".format)
        for form in (PER_HEAD, TOKEN)
        for figure, mark in figures.items()
    }
    what = "share of positions" if part == DECODE else "budget, entries"
    shown = pd.DataFrame({"saved over steps": saved, **found}).reindex(saved.index).fillna("-")
    shown = shown.reset_index()
    shown["setting"] = shown["setting"].map("{:g}".format)
    shown = shown.rename(columns={"policy": "rule", "setting": what})
    text = shown.to_markdown(index=False, disable_numparse=True)
    return f"### {part}: per head against token-level\n\n{text}\n\n-: positions alone decide.\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.per_head", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--rules", default="streamingllm,h2o,snapkv,keydiff")
    parser.add_argument("--parts", default=f"{DECODE},{PREFILL}")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    if args.problems < 2:
        parser.error(f"--problems must be at least 2, got {args.problems}")
    rules, parts = args.rules.split(","), args.parts.split(",")
    for name, given, known in (("rules", rules, RULES), ("parts", parts, _LIMITS)):
        unknown = [one for one in given if one not in known]
        if unknown:
            parser.error(f"--{name}: unknown {unknown[0]!r}; there are {', '.join(known)}")
    torch.set_num_threads(args.threads)
    try:
        bench = Bench(args.problems, args.out / f"per_head-{args.problems}.jsonl")
        trials = []
        for trial in plan(rules, parts):
            trials.append(bench.trial(*trial))
            right = sum(trials[-1].correct) / args.problems
            print(*trial, f"accuracy {right:.3f}, saved {trials[-1].saved:.1%}", flush=True)
    except (OSError, ValueError) as error:
        sys.exit(f"per-head: {error}")
    rows = rows_of(trials)
    text = "\n".join(table(rows, part) for part in parts)
    (args.out / "per_head.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    (args.out / "per_head.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
