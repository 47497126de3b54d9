# SPDX-License-Identifier: Apache-2.0
"""Runs lm-evaluation-harness on its tasks and on ours, with a model whose answers come from a server."""

import contextlib
import json
import logging
import os
import random
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# Progress bars are off, because lm-eval's bars count prepared requests, not answered requests.
os.environ.setdefault("TQDM_DISABLE", "1")

from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion
from lm_eval.tasks import TaskManager

from eval.tasks import sandbox
from eval.tasks.documents import MATHEMATICS
from eval.tasks.sandbox import SandboxError
from eval.tokenizers import load_tokenizer

logging.getLogger("lm_eval").setLevel(logging.ERROR)

#: Our task names -> lm-eval's names. Other tasks of lm-eval that generate text keep their names.
HUB = {
    "hotpotqa": "longbench_hotpotqa",
    "musique": "longbench_musique",
    "2wikimqa": "longbench_2wikimqa",
    "trec": "longbench_trec",
}
#: Our own task asks and grades these data sets of GPQA.
_GPQA = ("gpqa_diamond", "gpqa_main", "gpqa_extended")
#: Generates needles in haystacks, or reads them from a file.
_NEEDLE = re.compile(r"needle(_w[1-9]\d{0,5})?")
_HUMANEVAL = "humaneval"
_GENERATED = ("tiny_reasoner", "small_reasoner", "noise")
_REPLAY = "_replay"
# A streamed chunk has 16 tokens, because on a small machine parsing a chunk costs as much as decoding a token.
_REPLAY_FLAGS = ("--enable-custom-logit-processor", "--stream-interval", "16")
_THINK = "<think>"
_THINK_END = "</think>"
_MAX_GRADED_CHARS = 100_000  # graders see only the end of a response, where answers are
_GRADE_S = 30.0
_OURS = Path(__file__).parent


class TaskError(ValueError):
    """A task cannot be loaded or graded; the message names the file and line, or the option."""


@dataclass(frozen=True)
class Source:
    """Where a task's problems (lm-eval calls them documents) come from, and how many are used."""

    file: str = ""  # a local JSONL; "": from the Hugging Face hub, or generated
    seed: int = 0  # for generated problems, and for the order of a question's choices
    limit: int | None = None
    model: str = ""  # the model whose tokenizer replays need


@dataclass(frozen=True)
class Problem:
    """A problem of a task, as it is sent in a request."""

    id: str  # unique within task and seed, the same in each run
    messages: list[dict[str, str]]
    body: Mapping[str, Any]  # further fields of the request
    max_tokens: int | None = None  # None means the run's own limit
    group: str = ""  # a class of problems, such as "error" or "clean"

    @property
    def forced(self) -> bool:
        """Whether the server is forced to repeat a recorded response, which has ``max_tokens`` tokens."""
        return "custom_logit_processor" in self.body


#: Takes the problems of a task; returns a response text for each, in the same order.
Answer = Callable[[Sequence[Problem]], Sequence[str]]


class ServedModel(LocalChatCompletion):
    """lm-eval's chat model. ``answer`` replaces lm-eval's client, which drops times and token counts."""

    def __init__(self, name: str, answer: Answer) -> None:
        super().__init__(model=name, base_url="", num_concurrent=2)
        self._answer = answer

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return list(self._answer([self._problem(instance) for instance in requests]))

    def _problem(self, instance: Instance) -> Problem:
        context, settings = instance.args
        doc = instance.doc
        messages = self.create_message([context])
        payload = self._create_payload(messages, generate=True, gen_kwargs=dict(settings))
        body = json.loads(doc["body"]) if "body" in doc else {}
        return Problem(
            id=str(doc["id"] if "body" in doc else instance.doc_id),
            messages=body.pop("messages", payload["messages"]),
            body=body,
            max_tokens=doc.get("max_tokens") or None,
            group=str(doc.get("group") or ""),
        )


class Grade(NamedTuple):
    """lm-eval's grade of a response: the task's first metric, and the answer that a filter extracted."""

    score: float
    extracted: str | None


class EvalTask:
    """A task with its problems. Raises TaskError if it cannot be loaded, runs code, or generates no text."""

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self._limit = source.limit
        self.server_flags: tuple[str, ...] = _REPLAY_FLAGS if name.endswith(_REPLAY) else ()
        spec = _spec(name, source)
        if name == _HUMANEVAL:
            try:
                sandbox.check()
            except SandboxError as error:
                raise TaskError(f"--tasks {name}: {error}") from error
        # Some tasks shuffle a question's choices with this global generator.
        random.seed(source.seed)
        try:
            manager = _manager(spec["task"].startswith("local_"))
            if spec["task"] not in manager.task_index:
                raise KeyError("lm-eval has no such task")
            group = {"group": "run", "task": [{**spec, "generation_kwargs": {"until": []}}]}
            self._tasks = manager.load([group])
            (self._task,) = self._tasks["tasks"].values()
        # Data sets and the hub's libraries raise errors of many kinds; all mean that loading failed.
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            hint = "" if source.file else f"; --data {name}=FILE.jsonl takes a local file"
            raise TaskError(f"--tasks {name}: cannot be loaded ({reason}){hint}") from error
        if self._task.OUTPUT_TYPE != "generate_until" or getattr(self._task, "UNSAFE_CODE", False):
            raise TaskError(f"--tasks {name}: only tasks that generate text and run no code")
        metrics = list(self._task.aggregation())
        self._task.process_results = _bounded(self._task.process_results, metrics)
        self.problems: list[Problem] = []

        def keep(problems: Sequence[Problem]) -> list[str]:
            self.problems.extend(problems)
            return [""] * len(problems)

        self._evaluate(keep)

    def evaluate(self, texts: Sequence[str], opens_thinking: bool) -> dict[str, Grade]:
        """Return grades by problem id. ``texts`` has a response to each problem, "" if there is none.
        ``opens_thinking`` means that the chat template begins each response with ``<think>``."""
        answers = [
            text if problem.forced else _after_thinking(text, opens_thinking)
            for problem, text in zip(self.problems, texts, strict=True)
        ]
        # Each filter gives one sample per problem. The dict keeps the sample of the last, most lenient filter.
        samples = {sample["doc_id"]: sample for sample in self._evaluate(lambda _: answers)}
        return {problem.id: _grade(samples[number]) for number, problem in enumerate(self.problems)}

    def _evaluate(self, answer: Answer) -> list[dict[str, Any]]:
        model = ServedModel(self.name, answer)
        results = evaluator.evaluate(
            model, self._tasks, limit=self._limit, bootstrap_iters=0, apply_chat_template=True
        )
        return list(results["samples"][self._task.task_name])


def opens_thinking(model: str) -> bool:
    """Whether the model's chat template begins each response with ``<think>``, as for QwQ and R1 distills.
    False also if there is no tokenizer or no template that can be used."""
    # Loading a tokenizer and applying its template can raise almost any exception.
    with contextlib.suppress(Exception):
        prompt = load_tokenizer(model).apply_chat_template(
            [{"role": "user", "content": "1 + 1"}], tokenize=False, add_generation_prompt=True
        )
        return bool(prompt.rstrip().endswith(_THINK))
    return False


@cache
def _manager(ours: bool) -> TaskManager:
    """A manager of our tasks and, unless ``ours``, of all tasks of lm-eval, which take seconds to find."""
    return TaskManager(include_path=_OURS, include_defaults=not ours)


def _spec(name: str, source: Source) -> dict[str, Any]:
    """The task's name in lm-eval, and the fields of its configuration that the source sets."""
    file = source.file
    metadata: dict[str, Any] = {"version": 1.0, "seed": source.seed, "limit": source.limit}
    if name.partition("_x")[0] in _GENERATED:
        if file:
            raise TaskError(f"--data {name}={file}: this task's problems are generated")
        return {"task": "local_reasoner", "metadata": metadata | {"name": name}}
    if name.endswith(_REPLAY):
        if not file:
            raise TaskError(f"--tasks {name}: needs records, --data {name}=FILE.jsonl")
        fields = {"file": file, "model": source.model}
        return {"task": "local_replay", "metadata": metadata | fields}
    if name in _GPQA:
        return {"task": "local_gpqa", "metadata": metadata | {"name": name, "file": file}}
    if _NEEDLE.fullmatch(name):
        return {"task": "local_needle", "metadata": metadata | {"name": name, "file": file}}
    if name == _HUMANEVAL:
        return {"task": "local_humaneval", "metadata": metadata | {"file": file}}
    if name in MATHEMATICS:
        return {"task": "local_math", "metadata": metadata | {"name": name, "file": file}}
    if not file:
        return {"task": HUB.get(name, name)}
    # The file's rows must have the fields of the data set on the hub.
    files = {"data_files": dict.fromkeys(("train", "validation", "test"), file)}
    data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}
    return {"task": HUB.get(name, name), **data}


def _after_thinking(text: str, opened: bool) -> str:
    """What follows the last ``</think>``, or all of the text without one; "" if the thinking was cut off."""
    _, ended, answer = text.rpartition(_THINK_END)
    if not ended and (opened or text.lstrip().startswith(_THINK)):
        return ""
    return answer[-_MAX_GRADED_CHARS:]


def _grade(sample: Mapping[str, Any]) -> Grade:
    value = sample[sample["metrics"][0]]
    filtered = sample["filtered_resps"][0]
    named = isinstance(filtered, str) and sample["filter"] != "none"
    return Grade(float(value), filtered[:200] if named else None)


def _bounded(
    grade: Callable[..., dict[str, float]], metrics: Sequence[str]
) -> Callable[..., dict[str, float]]:
    """Returns a grader with a time limit. A response scores 0 if ``grade`` fails or takes too long. Raises
    TaskError if there is no sandbox any more for code that a model wrote."""

    def out_of_time(*_: Any) -> None:
        raise TimeoutError

    def within_time(doc: Any, results: Any) -> dict[str, float]:
        before = signal.signal(signal.SIGALRM, out_of_time)
        try:
            signal.setitimer(signal.ITIMER_REAL, _GRADE_S)
            try:
                return grade(doc, results)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except SandboxError as error:
            raise TaskError(str(error)) from error
        except Exception:
            return dict.fromkeys(metrics, 0.0)
        finally:
            signal.signal(signal.SIGALRM, before)

    return within_time
