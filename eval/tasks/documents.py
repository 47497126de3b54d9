# SPDX-License-Identifier: Apache-2.0
"""Makes the data sets of the task files in this folder, which name these functions as ``custom_dataset``."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, load_dataset

from eval.jsonl import read_rows, text_of, valid_text
from eval.small_reasoner import task as small
from eval.tasks import needles
from eval.tasks.multiple_choice import LETTERS
from eval.tiny_reasoner import task as tiny
from eval.tokenizers import load_tokenizer

# The model cards of DeepSeek-R1 and QwQ-32B recommend this instruction for mathematics.
_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
# OpenAI's simple-evals and the tests of SGLang ask multiple-choice questions in these words.
_CHOICE_INSTRUCTION = (
    "Answer the following multiple choice question. The last line of your response should be of the "
    "following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step "
    "before answering."
)
_CHOICE_FIELDS = (
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)
_CODE_INSTRUCTION = (
    "Complete the following Python function. Give the whole function, with the imports it needs, in one "
    "```python code block."
)
_GPQA = "Idavidrein/gpqa"
_HUMANEVAL = "openai/openai_humaneval"


class _Mathematics(NamedTuple):
    """A data set of questions with an answer. ``config`` and ``split`` name its part on the hub. If ``largest``
    is not 0, answers are integers from 0 to ``largest``."""

    hub: str
    split: str
    config: str | None = None
    largest: int = 0


#: Tasks of mathematics. A file and the hub give the same prompts, and the same grader judges the answers.
MATHEMATICS: Mapping[str, _Mathematics] = {
    "aime24": _Mathematics("Maxwell-Jia/AIME_2024", "train", largest=999),
    "aime25": _Mathematics("math-ai/aime25", "test", largest=999),
    "math500": _Mathematics("HuggingFaceH4/MATH-500", "test"),
    "gsm8k": _Mathematics("openai/gsm8k", "test", config="main"),
}
_MAX_ANSWER_CHARS = 1000
_DEFAULT_COUNT = 500
# Longest responses.
_REASONER_TOKENS = 1500
_NOISE_TOKENS = 128

Split = dict[str, Dataset]
_Made = Callable[[Mapping[str, Any]], dict[str, Any]]


def reasoner(name: str, seed: int = 0, limit: int | None = None, **_: Any) -> Split:
    """Held-out problems of the tiny or the small reasoner. Their ``group`` is "error" if the prompt states a
    wrong value, else "clean". A name that ends in ``_xN`` repeats each problem N times; ``limit`` counts the
    repetitions too. ``noise`` is the tiny reasoner's task at temperature 50, which gives random text."""
    name, several, times = name.partition("_x")
    samples = range(int(times) if several else 1)
    count = -(-(_DEFAULT_COUNT if limit is None else limit) // len(samples))
    make = small.make_problem if name == "small_reasoner" else tiny.make_problem
    rows = []
    for i, problem in enumerate(tiny.generate(seed, count, make=make)):
        body = {"temperature": 50.0, "ignore_eos": True} if name == "noise" else {}
        row = _row(f"{name}-{seed}-{i}", problem.prompt, problem.answer, body)
        row["max_tokens"] = _NOISE_TOKENS if name == "noise" else _REASONER_TOKENS
        row["group"] = "error" if problem.error else "clean"
        rows += [{**row, "id": f"{row['id']}.{k}"} for k in samples] if several else [row]
    return {"test": Dataset.from_list(rows[:limit])}


def mathematics(name: str, file: str = "", limit: int | None = None, **_: Any) -> Split:
    """Reads rows with a question and an answer: ``{id, question, answer}``, or with the fields' names on the
    hub. Without ``file``, reads the data set of ``name`` (:data:`MATHEMATICS`) from the hub. A row of a file
    may have ``examples``, a list of ``{question, response}``: turns before the question. If an answer has
    ``####``, only the text behind the last ``####`` counts, as in GSM8K."""
    source = MATHEMATICS[name]

    def made(row: Mapping[str, Any]) -> dict[str, Any]:
        value = row.get("answer", row.get("Answer"))
        number = type(value) is int and abs(value) < 10**30
        answer = str(value) if number else text_of(row, "answer", "Answer")
        answer = answer.rpartition("####")[2].strip()
        if source.largest:
            answer = _integer(answer, source.largest)
        if not 0 < len(answer) <= _MAX_ANSWER_CHARS:
            raise ValueError(f"an answer has 1 to {_MAX_ANSWER_CHARS} characters")
        question = text_of(row, "question", "problem", "Problem")
        prompt = f"{question}\n\n{_INSTRUCTION}"
        turns = _turns(row)
        body = {"messages": [*turns, {"role": "user", "content": prompt}]} if turns else None
        return _row(_name(row), prompt, answer, body)

    return _split(made, limit, file, source.hub, source.config, source.split)


def _integer(answer: str, largest: int) -> str:
    """The integer without leading zeros. Raises ValueError if ``answer`` is none from 0 to ``largest``."""
    if not (answer.isdecimal() and len(answer) < 7 and int(answer) <= largest):
        raise ValueError(f"answers are integers from 0 to {largest}: {answer!r}")
    return str(int(answer))


def gpqa(name: str, file: str = "", seed: int = 0, limit: int | None = None, **_: Any) -> Split:
    """Reads rows with the fields that GPQA has on the hub: ``Question``, ``Correct Answer`` and ``Incorrect
    Answer 1`` to ``3``. Without ``file``, reads the data set ``name`` from the hub. Seed and question alone
    decide the order of the choices."""

    def made(row: Mapping[str, Any]) -> dict[str, Any]:
        question = text_of(row, "Question").strip()
        texts = [text_of(row, field).strip() for field in _CHOICE_FIELDS]
        order = sorted(range(len(texts)), key=lambda i: _digest(f"{seed} {i} {question}"))
        choices = [texts[i] for i in order]
        lines = [f"{letter}) {text}" for letter, text in zip(LETTERS, choices, strict=True)]
        prompt = "\n".join([_CHOICE_INSTRUCTION, "", question, "", *lines])
        return _row(_name(row), prompt, LETTERS[order.index(0)], choices=choices)

    return _split(made, limit, file, _GPQA, name, "train")


def humaneval(file: str = "", limit: int | None = None, **_: Any) -> Split:
    """Reads rows with the fields that HumanEval has on the hub: ``task_id``, ``prompt``, ``test`` and
    ``entry_point``. Without ``file``, reads the data set from the hub."""

    def made(row: Mapping[str, Any]) -> dict[str, Any]:
        code = text_of(row, "prompt")
        fields = {name: text_of(row, name) for name in ("test", "entry_point")}
        if not fields["entry_point"].isidentifier():
            raise ValueError(f"field 'entry_point' is no name: {fields['entry_point']!r}")
        prompt = f"{_CODE_INSTRUCTION}\n\n```python\n{code}```"
        return _row(_name(row), prompt, fields["entry_point"], code=code, **fields)

    return _split(made, limit, file, _HUMANEVAL, None, "test")


def needle(name: str, file: str = "", seed: int = 0, limit: int | None = None, **_: Any) -> Split:
    """Texts that state one fact, and a question for it. Without ``file`` they are generated (``needles.py``);
    ``needle_wN`` has texts of N words only. Rows of a file: ``{id, context, question, answer}``."""

    def made(row: Mapping[str, Any]) -> dict[str, Any]:
        texts = [text_of(row, field) for field in ("context", "question", "answer")]
        return _row(_name(row), f"{texts[0]}\n\n{texts[1]}", texts[2])

    if file:
        return _checked(file, _read(file, made)[:limit])
    words = name.partition("_w")[2]
    lengths = (int(words),) if words else needles.LENGTHS
    count = len(lengths) * len(needles.DEPTHS) if limit is None else limit
    rows = []
    for number in range(count):
        case = needles.make(seed, number, lengths)
        row = _row(f"needle-{seed}-{number}", f"{case.text}\n\n{case.question}", case.answer)
        rows.append({**row, "group": case.group})
    return {"test": Dataset.from_list(rows)}


def replay(file: str, model: str, limit: int | None = None, **_: Any) -> Split:
    """Reads rows ``{id, question, response}``. The requests force a server to generate exactly these
    responses. A ``limit`` selects responses spread evenly from short to long. The longest are sent first, so
    that a run does not end with one long response alone in a batch."""
    # Imported here because it loads SGLang, which the other tasks do not need.
    from eval.replay.forcing import forced_request

    tokenizer = load_tokenizer(model)

    def made(row: Mapping[str, Any]) -> dict[str, Any]:
        response = text_of(row, "response")
        token_ids = tokenizer.encode(response, add_special_tokens=False, verbose=False)
        question = text_of(row, "question")
        record = tokenizer.decode(token_ids)
        body = forced_request(token_ids)
        return _row(_name(row), question, record, body, max_tokens=len(token_ids))

    rows = _read(file, made)
    rows.sort(key=lambda row: (row["max_tokens"], row["id"]), reverse=True)
    count = len(rows) if limit is None else min(limit, len(rows))
    return _checked(file, [rows[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)])


def _row(name: str, prompt: str, target: str, body: Any = None, **more: Any) -> dict[str, Any]:
    row = {"id": name, "prompt": prompt, "target": target, "body": json.dumps(body or {})}
    return {**row, "group": "", "max_tokens": 0, **more}


def _turns(row: Any) -> list[dict[str, str]]:
    """The examples of a row of :func:`mathematics` as chat messages, as lm-eval's --fewshot_as_multiturn makes
    them. Raises ValueError for other than a list of objects."""
    examples = row.get("examples", [])
    if not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples):
        raise ValueError("examples must be a list of {question, response}")
    turns = []
    for example in examples:
        question = f"{text_of(example, 'question')}\n\n{_INSTRUCTION}"
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": text_of(example, "response")})
    return turns


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _split(
    made: _Made, limit: int | None, file: str, hub: str, config: str | None, part: str
) -> Split:
    """The documents of ``file``, or without a file those of ``hub``, the data set's name there."""
    if file:
        return _checked(file, _read(file, made)[:limit])
    rows = [made(row) for row in load_dataset(hub, config, split=part)]
    numbered = [{**row, "id": row["id"] or f"row-{number}"} for number, row in enumerate(rows)]
    return _checked(f"{hub} {config or part}", numbered[:limit])


def _read(file: str, made: _Made) -> list[dict[str, Any]]:
    rows = list(read_rows(Path(file), made))
    return [{**row, "id": row["id"] or f"line-{number}"} for number, row in rows]


def _name(row: Mapping[str, Any]) -> str:
    identifier = next(
        (
            row[key]
            for key in ("id", "ID", "unique_id", "Record ID", "task_id")
            if row.get(key) is not None
        ),
        "",
    )
    return valid_text(str(identifier))[:200]


def _checked(file: str, rows: list[dict[str, Any]]) -> Split:
    names = [row["id"] for row in rows]
    if not names:
        raise ValueError(f"{file}: no rows")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{file}: duplicate id {twice!r}")
    return {"test": Dataset.from_list(rows)}
