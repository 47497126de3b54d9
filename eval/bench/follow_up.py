# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.follow_up PROBLEMS``: what a second turn finds in the prefix cache, by what
``--reasoncache-publish`` left of the first; with its reasoning in the history, or stripped from it.

A third request continues the first response from before its last verification round: its answer
shows what reading approximations costs. The embedded reasoner; all servers are up, in turns."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eval.bench.turns import as_text, spread
from eval.runs.folder import write_whole
from eval.serving import ServerProcess, several
from eval.tiny_reasoner import CHECKPOINT, EMBEDDED_FLAGS
from eval.tiny_reasoner.task import LONGEST, THINK_END, begin, generate, grade
from eval.tokenizers import load_tokenizer

_OURS = ("--enable-reasoncache", "--reasoncache-when", "always", *EMBEDDED_FLAGS)
ARMS = {"stock": (), "exact": _OURS, "aliased": (*_OURS, "--reasoncache-publish", "aliased")}
# Nothing is evicted between the turns.
_ROOM = ("--max-total-tokens", "131072")
_LONGEST_RESPONSE = 1024
_OUT = Path("build/bench")


def chat(tokenizer: Any, *turns: str) -> list[int]:
    """Token ids of a prompt whose last turn is the user's."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def later(tokenizer: Any, prompt: str, response: Sequence[int]) -> dict[str, list[int]]:
    """Second prompts with the reasoning ``kept`` and ``stripped``, and the first one with the part
    of the response to continue, ``cut``. Raises ValueError: they do not begin with the same ids."""
    text, first = tokenizer.decode(response), chat(tokenizer, prompt)
    kept = chat(tokenizer, prompt, text, prompt)
    if kept[: len(first) + len(response)] != [*first, *response]:
        raise ValueError(f"the chat template does not give back the tokens of: {text}")
    answer = text.partition(THINK_END)[2].strip()
    cut = first + tokenizer.encode(begin(text), add_special_tokens=False)
    return {"kept": kept, "stripped": chat(tokenizer, prompt, answer, prompt), "cut": cut}


def ask(server: ServerProcess, prompts: Sequence[Sequence[int]], tokens: int) -> list[Any]:
    """Greedy responses of up to ``tokens`` tokens, as of ``/generate``."""
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    body = {"input_ids": prompts, "sampling_params": sampling}
    return server.post("/generate", json=body).raise_for_status().json()


def measure(servers: Mapping[str, ServerProcess], count: int) -> list[dict[str, Any]]:
    """Lines of an ``arm``, a ``problem`` that it solved at first, and a ``kind`` of later request:
    tokens of ``prompt`` and ``cached``, its seconds, of ``cut`` the ``grade``. Second turns ask for
    one token, so that their seconds are the TTFT."""
    problems = generate(2_468, count, difficulty=LONGEST)
    tokenizer = load_tokenizer(str(CHECKPOINT))
    solved = []
    for arm, server in servers.items():
        answers = ask(server, [chat(tokenizer, p.prompt) for p in problems], _LONGEST_RESPONSE)
        for number, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
            ids = answer["output_ids"][:-1]  # without its end
            if grade(tokenizer.decode(ids), problem):
                solved.append((number, arm, later(tokenizer, problem.prompt, ids)))
    lines = []
    # The arms of one problem are neighbours: what else the machine does hits all of them.
    for number, arm, prompts in sorted(solved, key=lambda one: one[0]):
        for kind, tokens in (("kept", 1), ("stripped", 1), ("cut", _LONGEST_RESPONSE)):
            began = time.perf_counter()
            (answer,) = ask(servers[arm], [prompts[kind]], tokens)
            line = {"arm": arm, "problem": number, "kind": kind, "prompt": len(prompts[kind])}
            line["cached"] = answer["meta_info"]["cached_tokens"]
            line["seconds"] = time.perf_counter() - began
            if kind == "cut":
                line["grade"] = grade(tokenizer.decode(answer["output_ids"]), problems[number])
            lines.append(line)
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Medians with quartiles of second turns; the ratio is of neighbours."""
    found, rows = pd.DataFrame(lines).set_index("problem"), []
    for kind in ("kept", "stripped"):
        for arm in ARMS:
            mine, stock = (found[(found.kind == kind) & (found.arm == a)] for a in (arm, "stock"))
            share, ratio = mine.cached / mine.prompt, (mine.seconds / stock.seconds).dropna()
            figures = (mine.prompt.median(), spread(share), 1e3 * mine.seconds.median())
            rows.append([kind, arm, *map(as_text, (*figures, spread(ratio)))])
    heads = ["reasoning", "publish", "prompt, tokens", "cached share", "TTFT, ms", "over stock"]
    return pd.DataFrame(rows, columns=heads).to_markdown(index=False, disable_numparse=True)


def main(count: int) -> None:
    flags = {arm: (*_ROOM, *words) for arm, words in ARMS.items()}
    with several(CHECKPOINT, flags, _OUT / "follow_up") as servers:
        lines = measure(servers, count)
    write_whole(_OUT / "follow_up.json", json.dumps(lines, indent=2) + "\n")
    print(table(lines))
    graded = pd.DataFrame(lines).query("kind == 'cut'").astype({"grade": int})
    print(graded.groupby("arm")["grade"].agg(right="sum", continued="count").to_markdown())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
