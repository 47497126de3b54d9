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
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.bench.per_head_decoder import WINDOW, Schedule, WatchedDecoder, evict
from eval.bench.per_head_rules import RULES, Rule
from eval.measures.accuracy import Key, compare
from eval.report.markdown import Table, number, words
from eval.runs.folder import read_records, write_whole
from eval.runs.records import Record, Result
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.model import encode
from eval.tiny_reasoner.task import EOS, Problem, generate, grade
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
class Trial(Record):
    """One rule at one setting.

    Attributes:
        part: ``decode`` or ``prefill``.
        rule: of :data:`eval.bench.per_head_rules.RULES`, or ``dense``.
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
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            CHECKPOINT, dtype=torch.float32
        ).eval()
        self._stop = encode([EOS])[0]
        begun = transcripts(0, problems)
        self._asked: dict[str, list[tuple[Problem, str]]] = {
            DECODE: [(problem, "") for problem in generate(0, problems)],
            PREFILL: [(one.problem, " " + one.begun) for one in begun],
        }
        self.trials = {trial.name: trial for trial in read_records(path, Trial)}

    def trial(self, part: str, rule: str, form: str, setting: float) -> Trial:
        """Measure, unless that was done."""
        found = self.trials.get((part, rule, form, setting))
        if found is None:
            found = self._measure(part, rule, form, setting)
            self.trials[found.name] = found
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found.to_dict()) + "\n")
        return found

    def _measure(self, part: str, rule: str, form: str, setting: float) -> Trial:
        asked = self._asked[part]
        # Of like length together, so that few rows wait for others.
        order = sorted(range(len(asked)), key=lambda i: (len(asked[i][1].split(" ")), i))
        answers: dict[int, Response] = {}
        for start in range(0, len(order), _BATCH):
            numbers = order[start : start + _BATCH]
            prompts = [self._prompt(*asked[i]) for i in numbers]
            answers |= zip(
                numbers,
                respond(
                    self._model,
                    prompts,
                    self._stop,
                    _LIMITS[part],
                    RULES.get(rule),
                    schedule_of(part, rule, setting),
                    form == PER_HEAD,
                ),
                strict=True,
            )
        texts = [
            self._tokenizer.decode(s.tokens[s.prompt :], skip_special_tokens=True)
            for s in (answers[i] for i in range(len(asked)))
        ]
        saved = [sum(s.saved) / len(s.saved) for s in answers.values()]
        return Trial(
            part,
            rule,
            form,
            setting,
            sum(saved) / len(saved),
            [grade(text, problem) for text, (problem, _) in zip(texts, asked, strict=True)],
            [len(answers[i].tokens) - answers[i].prompt for i in range(len(asked))],
        )

    def _prompt(self, problem: Problem, begun: str) -> list[int]:
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            add_generation_prompt=True,
            tokenize=False,
        )
        return list(self._tokenizer(chat + begun)["input_ids"])


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
    """One row a trial, each against dense of its part on the same problems."""
    dense = {trial.part: _results(trial) for trial in trials if trial.rule == DENSE}
    rows = []
    for trial in trials:
        against = compare(_results(trial), dense[trial.part])
        assert against is not None
        low, high = against.difference.low, against.difference.high
        rows.append(
            {
                "part": trial.part,
                "policy": trial.rule,
                "form": trial.form,
                "setting": trial.setting,
                "saved": trial.saved,
                "accuracy": sum(trial.correct) / len(trial.correct),
                "accuracy_error": None if low is None or high is None else (high - low) / 2,
                "output_tokens": sum(trial.output_tokens) / len(trial.output_tokens),
                "problems": len(trial.correct),
            }
        )
    return rows


def _results(trial: Trial) -> dict[Key, Result]:
    return {
        (str(i), 0): Result(str(i), ok, float(ok), None, "", "", tokens)
        for i, (ok, tokens) in enumerate(zip(trial.correct, trial.output_tokens, strict=True))
    }


def table(rows: Sequence[dict[str, Any]], part: str) -> Table:
    """Rules by row; per head and token side by side."""
    chosen = {(r["policy"], r["setting"], r["form"]): r for r in rows if r["part"] == part}
    lines = []
    for policy, setting in dict.fromkeys((key[0], key[1]) for key in chosen):
        one = chosen.get((policy, setting, PER_HEAD))
        other = chosen.get((policy, setting, TOKEN)) or chosen[policy, setting, ""]
        why = "positions alone decide" if policy != DENSE else "nothing is chosen"
        lines.append(
            [
                words(policy),
                number(setting, form="{:g}"),
                number(100 * other["saved"], form="{:.1f}%"),
                number(one["accuracy"] if one else None, why, "{:.3f}"),
                number(one["accuracy_error"] if one else None, why, "{:.3f}"),
                number(other["accuracy"], form="{:.3f}"),
                number(other["accuracy_error"], form="{:.3f}"),
            ]
        )
    what = "share of positions" if part == DECODE else "budget, entries"
    columns = ("rule", what, "saved over steps", "per head", "±", "token", "±")
    return Table(part, f"{part}: per head against token-level", columns, lines)


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
    text = "\n".join(table(rows, part).markdown() for part in parts)
    write_whole(args.out / "per_head.json", json.dumps({"rows": rows}, indent=2) + "\n")
    write_whole(args.out / "per_head.md", text)
    print(text)


if __name__ == "__main__":
    main()
