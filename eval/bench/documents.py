# SPDX-License-Identifier: Apache-2.0
"""``make bench-documents`` compares full prefill with prompts made of cached documents, on SmolLM2.

First ``eval.fidelity --documents`` scores answers to generated questions. Then a stock server and ours are
timed in turns. Both have prefilled 50 documents; each prompt has 8 random ones. A third server finds the
documents in unmarked prompts. Writes ``documents.json``."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval import command
from eval.bench.turns import spread, take_turns
from eval.command import option
from eval.fidelity.__main__ import Options as Gate
from eval.fidelity.__main__ import work as through_the_gate
from eval.prose import prose, sentences_from
from eval.runs.folder import write_json, write_whole
from eval.runs.servers import Servers
from eval.serving import ServerProcess
from eval.tokenizers import load_tokenizer

MODEL = Path("build/models/smollm2")
#: Documents that the servers have prefilled, tokens in each of these documents, and documents in a prompt.
DOCUMENTS = 50
TOKENS = 400
IN_PROMPT = 8
REPAIRS = ("none", "query:.15")
#: The side that marks no documents: the server finds them.
FOUND = "auto"
_FLAGS = ("--attention-backend", "reasoncache_cpu", "--dtype", "float32")
_SLOTS = 50_000
_SYSTEM = "You are a helpful assistant that answers from the documents it is given."
#: Questions asked about a set, documents in a set. Few-shot sets have other sizes.
_QUESTIONS = 4
_SET = 5
#: Most tokens of a row, per word of its documents.
_TOKENS_A_WORD = 2

_PLACES = (
    "north gate,harbour office,east tower,glass house,old library,boat shed,clock room,wine cellar"
)
_PEOPLE = (
    "Anna Berg,Omar Haddad,Lucy Chen,Pavel Novak,Maria Silva,Jonas Weber,Grace Okoye,Ivan Petrov"
)
_FACTS = {
    "The access code of the old library is {}.": "What is the access code of the old library?",
    "The night train to Lisbon has the number {}.": "What number does the night train have?",
    "The blue vase of the museum was sold for {} crowns.": "For how much was the blue vase sold?",
    "The mountain hut lies at a height of {} metres.": "At what height does the hut lie?",
    "The choir meets in room {} on Tuesdays.": "In which room does the choir meet?",
}
_KINDS = {
    "animal": "horse,tiger,rabbit,eagle,salmon,donkey,wolf,camel,goat,otter,falcon,lizard",
    "fruit": "apple,banana,cherry,mango,peach,grape,plum,lemon,melon,papaya,apricot,pear",
    "tool": "hammer,saw,wrench,drill,chisel,pliers,shovel,axe,screwdriver,rake,file,clamp",
    "country": "France,Brazil,Japan,Kenya,Norway,Peru,Egypt,India,Canada,Poland,Chile,Vietnam",
}


@dataclass(frozen=True)
class Options:
    questions: int = option(200, "questions of each task, 0 for none", least=0, metavar="N")
    live: int = option(500, "questions to live servers, 0 for none", least=0, metavar="N")
    sides: tuple[str, ...] = option(
        (*REPAIRS, FOUND),
        "servers to time beside a stock one: repairs, and auto, which finds documents itself",
    )
    tasks: tuple[str, ...] = option(
        ("distinct", "rivals", "few-shot", "repeat"),
        "questions: for facts of several kinds or of one, for labels, for the documents' words; also "
        "two-hop, whose answers need facts of two documents",
    )
    model: Path = option(MODEL, "folder of the model that answers, without a server")
    words: int = option(150, "fewest words of a document", least=20)
    threads: int = option(2, "threads of PyTorch, without a server", least=1)
    dtype: str = option("float32", "data type of weights and KV, without a server")
    arms: tuple[str, ...] = option((), "repairs to measure, by default all")
    out: Path = option(Path("build/bench"), "folder of results")


#: Documents, and questions: ``(question, lead, answer)``. The lead begins the response; the answer follows.
Drawn = tuple[list[str], list[tuple[str, str, str]]]


class Tasks:
    """Draws sets of documents with questions."""

    def __init__(self, words: int, seed: int = 0) -> None:
        self._words = words
        self._random = random.Random(seed)
        self._prose = prose()

    def rows(self, task: str, count: int) -> Iterator[dict[str, Any]]:
        make = {"distinct": self.distinct, "rivals": self.rivals}
        make |= {"two-hop": self.two_hop, "few-shot": self.few_shot}
        for number in range(-(-count // _QUESTIONS)):
            documents, questions = make.get(task, self.repeat)()
            system = _SYSTEM if task != "few-shot" else "Label the last word as in the examples."
            chosen = self._random.sample(questions, min(_QUESTIONS, count - number * _QUESTIONS))
            for question, lead, answer in chosen:
                row = {"group": task, "system": system, "documents": documents}
                yield {**row, "question": question, "lead": lead, "answer": answer}

    def distinct(self) -> Drawn:
        """Each document states a fact of a different kind."""
        return self._with_facts(_FACTS)

    def rivals(self) -> Drawn:
        """Each document states the code of a different place, in the same words."""
        places = self._random.sample(_PLACES.split(","), _SET)
        codes = [f"he access code of the {place}" for place in places]
        return self._with_facts({f"T{code} is {{}}.": f"What is t{code}?" for code in codes})

    def two_hop(self) -> Drawn:
        """Each document states who keeps a place, and the code of a person who keeps another document's place.
        Questions ask for the code of who keeps a place; answers name the person, then the code."""
        places = self._random.sample(_PLACES.split(","), _SET)
        people = self._random.sample(_PEOPLE.split(","), _SET)
        codes = [str(self._random.randint(1000, 9999)) for _ in people]
        shift = self._random.randrange(1, _SET)
        documents = list[str]()
        questions = list[tuple[str, str, str]]()
        for i, place in enumerate(places):
            other = (i + shift) % _SET
            section = self._section()
            for fact in (
                f"The keeper of the {place} is {people[i]}.",
                f"The access code of {people[other]} is {codes[other]}.",
            ):
                section.insert(self._random.randint(0, len(section)), fact)
            documents.append(" ".join(section))
            question = (
                f"Who is the keeper of the {place}, and what is the access code of that person?"
            )
            answer = f" {people[i]}. The access code of {people[i]} is {codes[i]}"
            questions.append((question, f"The keeper of the {place} is", answer))
        return documents, questions

    def few_shot(self) -> Drawn:
        """Each document labels three words of each of two kinds; questions ask for another word's label."""
        draw = self._random.sample
        kinds = list(_KINDS)
        label = dict(zip(kinds, draw(["red", "blue", "green", "black", "white"], 4), strict=True))
        words = {kind: draw(_KINDS[kind].split(","), 12) for kind in kinds}
        documents = []
        for pair in draw([*itertools.combinations(kinds, 2)], 6):
            shown = [(words[kind].pop(), kind) for kind in pair for _ in range(3)]
            lines = (f"Word: {word}\nLabel: {label[kind]}" for word, kind in draw(shown, 6))
            documents.append("\n".join(lines))
        questions = []
        for kind in kinds:
            word = words[kind].pop()
            questions.append(
                (f"Which label has {word}?", f"Word: {word}\nLabel:", f" {label[kind]}")
            )
        return documents, questions

    def repeat(self) -> Drawn:
        """A question asks to repeat a document. Eight words are given; the next eight are the answer."""
        sections = [self._section() for _ in range(_SET)]
        questions = []
        for number, section in enumerate(sections, 1):
            words = " ".join(section).split()
            parts = " ".join(words[:8]), " " + " ".join(words[8:16])
            questions.append((f"Repeat section {number} word by word.", *parts))
        texts = (
            f"Section {number}\n\n{' '.join(sentences)}"
            for number, sentences in enumerate(sections, 1)
        )
        return [*texts], questions

    def _with_facts(self, facts: Mapping[str, str]) -> Drawn:
        """Documents that each state a fact, with a number in place of ``{}``. The questions ask for these
        numbers."""
        documents = list[str]()
        questions = list[tuple[str, str, str]]()
        for fact in self._random.sample([*facts], _SET):
            number = str(self._random.randint(1000, 9999))
            section = self._section()
            section.insert(self._random.randint(0, len(section)), fact.format(number))
            documents.append(" ".join(section))
            questions.append((facts[fact], fact.split(" {}")[0], f" {number}"))
        return documents, questions

    def _section(self) -> list[str]:
        """Sentences of consecutive paragraphs."""
        return sentences_from(self._prose, self._random.randrange(len(self._prose)), self._words)


class Live:
    """Prompts made of a fixed set of documents. Stock SGLang and each of our repairs get the same prompts."""

    def __init__(self, tokenizer: Any) -> None:
        encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        tokens = encode(" ".join(prose()))[: DOCUMENTS * TOKENS]
        self._base = encode(_SYSTEM)
        self._encode = encode
        assert len(tokens) == DOCUMENTS * TOKENS
        self._documents = [tokens[at : at + TOKENS] for at in range(0, len(tokens), TOKENS)]

    def warm(self, server: ServerProcess) -> None:
        for document in self._documents:
            _ask(server, [*self._base, *document, 0])

    def side(self, server: ServerProcess, repair: str = "") -> Callable[[], list[dict[str, float]]]:
        """Returns a side for :func:`take_turns`. Each call sends the next prompt, and returns the time to
        the first token and how many of the prompt's tokens were computed."""
        drawn = random.Random(1)
        start = len(self._base)
        bounds = range(start, start + IN_PROMPT * TOKENS + 1, TOKENS)
        custom = {"documents": [*itertools.pairwise(bounds)], "documents_repair": repair}

        def ask() -> list[dict[str, float]]:
            documents = itertools.chain(*drawn.sample(self._documents, IN_PROMPT))
            question = self._encode(f"\nWhat does rule {drawn.randrange(10**6)} say?\n")
            prompt = [*self._base, *documents, *question]
            begun = time.perf_counter()
            meta = _ask(server, prompt, **({"custom_params": custom} if repair else {}))
            seconds = time.perf_counter() - begun
            return [{"seconds": seconds, "computed": len(prompt) - meta["cached_tokens"]}]

        return ask


def _ask(server: ServerProcess, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """Ask for the token after a prompt; return the server's ``meta_info``."""
    sampling = {"temperature": 0, "max_new_tokens": 1, **more}
    body = {"input_ids": prompt, "sampling_params": sampling}
    response = server.post("/generate", json=body)
    if response.status_code != 200:
        raise ValueError(f"{server.url}/generate says {response.text:.500}")
    return dict(response.json()["meta_info"])


def live(options: Options) -> list[dict[str, Any]]:
    """Measure the live servers; return the rows of the task ``server``."""
    prompts = Live(load_tokenizer(str(MODEL)))
    flags = (*_FLAGS, "--max-total-tokens", str(_SLOTS))
    ours = (*flags, "--enable-reasoncache")
    flags_by_side = {"stock": flags, FOUND: (*ours, "--reasoncache-set", "documents=auto")}
    sides = dict[str, Any]()
    with Servers(options.out / "documents", MODEL, "cpu", keep=3) as servers:
        for name in ("stock", *options.sides):
            server = servers.get(
                name if name in flags_by_side else "ours", flags_by_side.get(name, ours)
            ).process
            prompts.warm(server)
            sides[name] = prompts.side(server, name if name in REPAIRS else "")
        samples = take_turns(sides, options.live)
    return [live_row(samples, name) for name in sides]


def live_row(samples: pd.DataFrame, side: str) -> dict[str, Any]:
    """A side's times to the first token, also relative to stock, and its computed tokens per document token."""
    prompts, stock = (samples[samples["side"] == name].reset_index() for name in (side, "stock"))
    return {
        "task": "server",
        "method": side,
        "recomputed": float(prompts["computed"].mean() / (IN_PROMPT * TOKENS)),
        "ttft_ratio": float(prompts["seconds"].median() / stock["seconds"].median()),
        "ttft_s": spread(prompts["seconds"]),
        "of_stock": spread(prompts["seconds"] / stock["seconds"]),
        "questions": len(prompts),
    }


def work(options: Options) -> None:
    """Measure and write the results. Prompts that ``eval.fidelity`` measured before are not measured again."""
    path = options.out / "documents" / "questions.jsonl"
    draw = Tasks(options.words).rows
    rows = [*itertools.chain(*(draw(task, options.questions) for task in options.tasks))]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    cap = max(Gate.cap, _TOKENS_A_WORD * options.words * _SET)
    gate = Gate(
        options.model,
        documents=path,
        arms=options.arms,
        cap=cap,
        threads=options.threads,
        dtype=options.dtype,
        out=path.with_name("gate.json"),
    )
    records = through_the_gate(gate) if rows else []
    results = [{"task": row.pop("group"), "method": row.pop("arm"), **row} for row in records]
    write_json(options.out / "documents.json", {"rows": results})
    results += live(options) if options.live else []
    write_json(options.out / "documents.json", {"rows": results})
    print(json.dumps(results[len(records) :], indent=2))


if __name__ == "__main__":
    command.run(Options, work)
