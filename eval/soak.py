# SPDX-License-Identifier: Apache-2.0
"""Load that swings, for an hour, against a server with SGLang's strict memory checks.

Clients ask problems of the embedded reasoner, several samples of one prompt, long prompts that are computed in
chunks, and requests that opt out. They abort requests by id, and leave streams in the middle. A round has a
calm part, a crowd, samples, long prompts, aborts, conversations, and all of these at once. Then the server must
be idle, with every slot free or evictable and no traceback in its log. Ends with status 1 if a round finds
anything wrong, a request is answered by an error, or a client gets no answer."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from eval.command import flags_of, option, parse
from eval.serving import STRICT_CHECKS, ServerProcess, log_errors, wait_until_idle
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import make_problem
from eval.tokenizers import load_tokenizer

_FLAGS = (
    "--enable-reasoncache --max-total-tokens 4000 --schedule-conservativeness 0.1 "
    "--chunked-prefill-size 128 --enable-mixed-chunk --reasoncache-scope prompt "
    "--reasoncache-set min_age=32"
)

_TOTALS = (
    *("blocks_shared", "blocks_shared_across", "shortages", "blocks_missed"),
    *("prompts_continued", "tokens_continued"),
)


@dataclass(frozen=True)
class Options:
    minutes: float = option(60.0, "how many minutes clients send requests", least=0.1)
    clients: int = option(16, "clients that send at once in the fullest parts", least=1)
    seed: int = option(1, "seed of the load")
    part_s: float = option(20.0, "seconds of each part of a round", least=1.0)
    server_flags: tuple[str, ...] = option(
        tuple(_FLAGS.split()), "flags of the server, as one word", read=flags_of
    )


@dataclass
class Load:
    """The clients of one server. ``encode``: the tokens of a text. ``outcomes``: how many requests ended in
    which way."""

    server: ServerProcess
    chance: random.Random
    encode: Callable[..., list[int]]
    outcomes: Counter[str] = field(default_factory=Counter)
    #: What went wrong for clients.
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _number: int = 0

    def part(
        self, kind: Callable[[Load, random.Random], None], clients: int, seconds: float
    ) -> None:
        """Have ``clients`` clients send requests, one after another each, for some seconds."""
        deadline = time.monotonic() + seconds

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                while time.monotonic() < deadline and not self.wrong:
                    kind(self, chance)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

        threads = [
            threading.Thread(target=work, args=(self.chance.getrandbits(32),), daemon=True)
            for _ in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 600)
            if thread.is_alive():
                self.wrong.append("a request had no answer for ten minutes")
                return

    def rid(self) -> str:
        with self._lock:
            self._number += 1
            return f"soak-{self._number}"

    def note(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def ask(self, chance: random.Random, body: dict[str, Any]) -> Any:
        """Send a request and count its outcome. Returns the answer; None if there is none."""
        answer = self.server.post("/generate", body)
        if answer.status_code != 200:
            self.note(f"status {answer.status_code}")
            self.wrong.append(answer.text[:300])
            return None
        content = answer.json()
        for output in content if isinstance(content, list) else [content]:
            self.note(output["meta_info"]["finish_reason"]["type"])
        return content

    def leave(self, body: dict[str, Any], after_s: float) -> None:
        """Send a request, and close the connection in the middle of its stream."""
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.Client(base_url=self.server.url, timeout=600.0, trust_env=False) as client,
            client.stream("POST", "/generate", json={**body, "stream": True}) as stream,
        ):
            begun = time.monotonic()
            for _ in stream.iter_lines():
                if time.monotonic() - begun > after_s:
                    break
        self.note("left")


def _problem(chance: random.Random) -> str:
    return make_problem(chance).prompt


def _body(load: Load, chance: random.Random, text: str, **sampling: Any) -> dict[str, Any]:
    sampling = {"temperature": chance.choice((0, 0.7)), "max_new_tokens": 700, **sampling}
    if chance.random() < 0.1:
        sampling["custom_params"] = {"reasoncache": False}
    return {"text": text, "rid": load.rid(), "sampling_params": sampling}


def _ask(load: Load, chance: random.Random) -> None:
    load.ask(chance, _body(load, chance, _problem(chance), max_new_tokens=chance.choice((40, 700))))


def _samples(load: Load, chance: random.Random) -> None:
    load.ask(chance, _body(load, chance, _problem(chance), temperature=0.8, n=4))


def _long_prompt(load: Load, chance: random.Random) -> None:
    text = " ".join(_problem(chance) for _ in range(chance.randint(4, 30)))
    load.ask(chance, _body(load, chance, text, max_new_tokens=chance.choice((1, 60))))


def _aborted(load: Load, chance: random.Random) -> None:
    text = _problem(chance) if chance.random() < 0.5 else " ".join(map(_problem, [chance] * 12))
    body = _body(load, chance, text)
    if chance.random() < 0.4:
        load.leave(body, chance.random() * 2)
        return
    rid = body["rid"]
    timer = threading.Timer(
        chance.random() * 3, lambda: load.server.post("/abort_request", {"rid": rid})
    )
    timer.start()
    load.ask(chance, body)
    timer.join()


def _turns(load: Load, chance: random.Random) -> None:
    """A conversation: each turn goes on with all that was said before."""
    said: list[int] = []
    for _ in range(chance.randint(2, 3)):
        said += load.encode(_problem(chance), add_special_tokens=False)
        body = _body(load, chance, "", max_new_tokens=560)
        del body["text"]
        output = load.ask(chance, body | {"input_ids": said})
        if output is None:
            return
        said = [*said, *output["output_ids"]]


def _mixed(load: Load, chance: random.Random) -> None:
    chance.choice((_ask, _samples, _long_prompt, _aborted, _turns))(load, chance)


def soak(options: Options) -> int:
    """Runs the load. Returns the status to exit with."""
    end = time.monotonic() + 60 * options.minutes
    with ServerProcess(CHECKPOINT, flags=options.server_flags, env=STRICT_CHECKS) as server:
        encode = load_tokenizer(str(CHECKPOINT)).encode
        load = Load(server, random.Random(options.seed), encode)
        rounds = 0
        totals: Counter[str] = Counter()
        while time.monotonic() < end:
            crowd = options.clients
            parts = [
                (_ask, 2),
                (_ask, crowd),
                (_samples, crowd // 4 or 1),
                (_long_prompt, crowd // 2 or 1),
            ]
            parts += [(_aborted, crowd), (_turns, crowd // 4 or 1), (_mixed, crowd)]
            for kind, clients in parts:
                load.part(kind, clients, options.part_s)
            if not load.wrong:
                wait_until_idle(server)
            (ours,) = server.get("/reasoncache").json()["schedulers"]
            rounds += 1
            for name in _TOTALS:
                totals[name] += ours["totals"][name]
            print(f"round {rounds}: {dict(load.outcomes)}, {dict(totals)}", flush=True)
            wrong = [*load.wrong, log_errors(server.log_text())]
            if ours["disabled"] is not None or ours["slots_saved_now"] or any(wrong):
                print(f"disabled: {ours['disabled']}, saved: {ours['slots_saved_now']}\n{wrong}")
                return 1
            assert server.post("/flush_cache", params={"timeout": 30}).status_code == 200
        retracted = server.log_text().count("Retract")
        print(
            f"{rounds} rounds, no traceback, nothing leaked; {retracted} log lines of retractions"
        )
    return 0


if __name__ == "__main__":
    sys.exit(soak(parse(Options)))
