# SPDX-License-Identifier: Apache-2.0
"""``make bench-agents`` compares servers on conversations whose history keeps the reasoning, as agents do.

Some agents run at once. Each turn gives a new problem and goes on with everything said before: the prompt of a
turn repeats the prompt and the whole response of the turn before. With ``--workload tools``, which the small
reasoner serves, a turn also brings a tool's result, of which parts return in later turns. The first turn
describes the tools, in the same words for all conversations. The KV pool is too small for all conversations.
Servers take turns on the same conversations. Writes ``agents.json``."""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pandas as pd

from eval import command
from eval.bench.turns import spread, take_turns
from eval.command import option
from eval.methods import TUNED, find_method
from eval.prose import prose, sentences_from
from eval.runs.folder import write_json
from eval.runs.options import specs
from eval.runs.servers import Server, Servers
from eval.small_reasoner import MODEL
from eval.small_reasoner.task import make_problem as make_small_problem
from eval.tiny_reasoner import CHECKPOINT, EMBEDDED_SETTINGS
from eval.tiny_reasoner.task import make_problem
from eval.tokenizers import load_tokenizer

#: Words of the tools' description in the system prompt, and the fewest and most words of a tool's result.
_TOOLS = 250
_RESULT = (150, 500)

METHODS = ("dense:clip=64", "dense", "newest", "newest:aliased_nodes=false")


@dataclass(frozen=True)
class Options:
    methods: tuple[str, ...] = option(
        METHODS, "servers to compare; the first is the reference", read=specs, metavar="x,y"
    )
    workload: str = option(
        "problems",
        "problems (the embedded reasoner), or tools (the small reasoner, with tools' results)",
        choices=("problems", "tools"),
    )
    agents: int = option(16, "conversations at once", least=1)
    turns: int = option(3, "turns of a conversation", least=2)
    slots: int = option(9000, "KV slots of each server", least=2500)
    most: int = option(600, "most tokens of a response", least=16)
    rounds: int = option(3, "rounds to measure, after one that is not measured", least=1)
    server_flags: tuple[str, ...] = option(
        ("--schedule-conservativeness", "0.3"), "flags of all servers", read=command.flags_of
    )
    out: Path = option(Path("build/bench/agents"), "folder of turns.csv, agents.json and logs")


class Problems:
    """Turns that each give a problem to the embedded reasoner."""

    def __init__(self, drawn: random.Random) -> None:
        self._drawn = drawn

    def turn(self) -> tuple[str, str]:
        """The user's next message, and the answer that is right."""
        problem = make_problem(self._drawn)
        return problem.prompt, f"\\boxed{{ {problem.answer} }}"


class ToolLoop:
    """Turns that each bring a tool's result and a problem. A third of a result was in an earlier one, if there
    is one. The first message begins with a description of tools, the same for all conversations."""

    def __init__(self, drawn: random.Random) -> None:
        self._drawn = drawn
        self._prose = prose()
        self._results: list[list[str]] = []

    def turn(self) -> tuple[str, str]:
        """The user's next message, and the answer that is right."""
        problem = make_small_problem(self._drawn)
        parts = [*self._result(), problem.prompt]
        if len(self._results) == 1:
            parts.insert(0, " ".join(sentences_from(self._prose, 0, _TOOLS)))
        return "\n\n".join(parts), f"\\boxed{{{problem.answer}}}"

    def _result(self) -> list[str]:
        words = self._drawn.randint(*_RESULT)
        start = self._drawn.randrange(len(self._prose))
        lines = sentences_from(self._prose, start, words)
        if self._results:
            earlier = self._drawn.choice(self._results)
            lines[: len(lines) // 3] = earlier[: len(lines) // 3]
        self._results.append(lines)
        return ["Result of the tool:", " ".join(lines)]


class Agents:
    """Conversations with one server."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._conversation = ToolLoop if options.workload == "tools" else Problems
        self._tokenizer = load_tokenizer(str(model_of(options)))

    def side(
        self, server: Server, totals: list[dict[str, Any]]
    ) -> Callable[[], list[dict[str, float]]]:
        """A side for :func:`take_turns`. Each call has new conversations, the same as the other sides'. Appends
        the plugin's totals of each call to ``totals``."""
        number = 0

        def converse() -> list[dict[str, float]]:
            nonlocal number
            number += 1
            server.clear()
            begun = time.perf_counter()
            seeds = [number * 10_000 + agent for agent in range(self._options.agents)]
            with ThreadPoolExecutor(len(seeds)) as pool:
                turns = [
                    turn
                    for talk in pool.map(lambda s: self._talk(server, s), seeds)
                    for turn in talk
                ]
            wall = time.perf_counter() - begun
            server.settle()
            totals.extend(report["totals"] for report in server.reports())
            made = sum(turn["tokens"] for turn in turns)
            return [{**turn, "tokens_per_s": made / wall} for turn in turns]

        return converse

    def _talk(self, server: Server, seed: int) -> list[dict[str, float]]:
        conversation = self._conversation(random.Random(seed))
        history: list[int] = []
        turns = []
        for turn in range(self._options.turns):
            message, answer = conversation.turn()
            history += self._tokens_of(message)
            reply = ask(server, history, self._options.most)
            output = reply.pop("output")
            right = answer in self._tokenizer.decode(output)
            turns.append({"turn": turn, "prompt": len(history), "right": right, **reply})
            history = [*history, *output]
        return turns

    def _tokens_of(self, message: str) -> list[int]:
        turn = [{"role": "user", "content": message}]
        text = self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def model_of(options: Options) -> Path:
    return MODEL if options.workload == "tools" else CHECKPOINT


def ask(server: Server, prompt: Sequence[int], most: int) -> dict[str, Any]:
    """Stream a response. Returns its tokens (``output``), how many (``tokens``), seconds to the first one
    (``ttft``), seconds between tokens after it (``tpot``) and how many tokens of the prompt were cached."""
    sampling = {"temperature": 0, "max_new_tokens": most}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    begun = time.perf_counter()
    first = None
    last = {}
    with httpx.stream(
        "POST", f"{server.url}/generate", json=body, timeout=900, trust_env=False
    ) as lines:
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line.removeprefix("data: "))
            if "error" in last:
                raise ValueError(f"{server.url}/generate says {line:.500}")
            first = first or time.perf_counter()
    if first is None:
        raise ValueError(f"{server.url}/generate gave no token")
    count = last["meta_info"]["completion_tokens"]
    return {
        "output": last["output_ids"],
        "tokens": count,
        "ttft": first - begun,
        "tpot": (time.perf_counter() - first) / max(count - 1, 1),
        "cached": last["meta_info"]["cached_tokens"],
    }


def row(
    samples: pd.DataFrame, side: str, reference: str, totals: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Figures of a side, also relative to the reference, round by round."""

    def by_round(name: str, of: Callable[[pd.DataFrame], float]) -> pd.Series:
        rows = samples[samples["side"] == name]
        return rows.groupby("round").apply(of, include_groups=False)

    figures: dict[str, Callable[[pd.DataFrame], float]] = {
        "tokens_per_s": lambda turns: float(turns["tokens_per_s"].iloc[0]),
        "cached": lambda turns: float(
            _later(turns)["cached"].sum() / _later(turns)["prompt"].sum()
        ),
        "ttft_s": lambda turns: float(_later(turns)["ttft"].median()),
        "ttft_p99_s": lambda turns: float(_later(turns)["ttft"].quantile(0.99)),
        "tpot_p99_s": lambda turns: float(turns["tpot"].quantile(0.99)),
        "right": lambda turns: float(turns["right"].mean()),
    }
    entry: dict[str, Any] = {"method": side}
    for name, of in figures.items():
        values = by_round(side, of)
        base = by_round(reference, of)
        entry[name] = spread(values)
        entry[f"{name}_of_reference"] = spread(values / base)
    for name in ("blocks_shared", "prompts_continued", "tokens_continued"):
        entry[name] = sum(counts[name] for counts in totals)
    return entry


def _later(turns: pd.DataFrame) -> pd.DataFrame:
    """The turns that continue a conversation."""
    return turns[turns["turn"] > 0]


def work(options: Options) -> None:
    agents = Agents(options)
    totals: dict[str, list[dict[str, Any]]] = {name: [] for name in options.methods}
    shared = ("--max-total-tokens", str(options.slots), *options.server_flags)
    settings = {} if options.workload == "tools" else EMBEDDED_SETTINGS
    model = model_of(options)
    if not model.exists():
        raise ValueError(f"{model}: no such folder; make small-model makes it")
    with Servers(options.out, model, "cpu", keep=len(options.methods)) as servers:
        sides = {}
        for name in options.methods:
            method = find_method(name, settings)
            if method.is_tuned:
                raise ValueError(f"--methods: {TUNED} needs a run of eval.run; name its settings")
            server = servers.get(name, (*shared, *method.flags), method.env)
            sides[name] = agents.side(server, totals[name])
        samples = take_turns(sides, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    samples.to_csv(options.out / "turns.csv", index=False)
    rows = [row(samples, name, options.methods[0], totals[name]) for name in options.methods]
    write_json(options.out / "agents.json", {"rows": rows})
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    command.run(Options, work)
