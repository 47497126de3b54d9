# SPDX-License-Identifier: Apache-2.0
"""Tests models whose attention differs from the embedded reasoner's: hybrids (only attention layers share),
latent attention, layers with a sliding window. For hybrids the prefix cache also keeps the states of the other
layers; a wrong state would change the log-probabilities after a cached prefix."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from eval.serving import ServerProcess
from sglang_reasoncache.kernels.rotation import KeyRotation
from tests.server import specs
from tests.server.harness import ServerPool, assert_whole, generate, wait_until_idle
from tests.server.problems import OPT_OUT, TO_THE_END, report, told

#: Tokens in a block.
_LENGTH = 8
_WORDS = list("abcdefghijklmnopqrst")
#: How much fp32 log-probabilities may differ, because sums are computed in different orders.
ROUNDING = 1e-4
#: Key: whether a layer has a sliding window. Value: rotation of the layer's keys. None: keys stay as cached.
Rotations = dict[bool, KeyRotation] | None


def _prompts(count: int, first: int = 0) -> list[str]:
    return [" ".join(_WORDS[at:] + _WORDS[:at]) for at in range(first, first + count)]


def _tell(server: ServerProcess, bodies: list[Any]) -> list[dict[str, Any]]:
    """What ``told`` returns, with defaults for missing fields and with log-probabilities as tensors."""
    return [
        {"blocks": [], "retractions": 0, **found, "prompt": found["prompt_tokens"]}
        | {"logprobs": torch.tensor(found["logprobs"])}
        for found in told(server, bodies)
    ]


def _together(server: ServerProcess, most: int) -> list[dict[str, Any]]:
    """Ten responses, computed together in one batch from the first token to the last."""
    server.post("/flush_cache")
    bodies = generate(server, _prompts(10), most, return_logprob=True, **TO_THE_END)  # type: ignore[arg-type]
    return _tell(server, bodies)


def _follow_up(server: ServerProcess, ids: list[int]) -> dict[str, Any]:
    """A short response to the prompt ``ids``. It opts out of sharing, but may read a cached prefix."""
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, **OPT_OUT}
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": sampling}
    [found] = _tell(server, [server.post("/generate", json=body).json()])
    return found


class Loop:
    """A Hugging Face model that computes a whole response in one forward. Its attention redirects the blocks
    that a server redirected while it generated the response."""

    def __init__(self, servers: ServerPool, name: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register("redirecting", self._attend)
        path, self.name = servers.model(name), name
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="redirecting"
        ).eval()
        self._slots: list[tuple[int, torch.Tensor]] = []
        self._rotation: Rotations = None

    def rotation(self) -> Rotations:
        """The model's rotations, or None if it has no rotary embedding."""
        embedding = getattr(self.model.model, "rotary_emb", None)
        embedding = embedding or getattr(self.model.model, "pos_emb", None)
        if embedding is None:
            return None
        found = {}
        for windowed in (False, True):
            kind = "sliding_attention" if windowed else "full_attention"
            frequencies = getattr(embedding, f"{kind}_inv_freq", None)
            frequencies = embedding.inv_freq if frequencies is None else frequencies
            angles = torch.arange(1024)[:, None] * frequencies.float()
            table = torch.cat((angles.cos(), angles.sin()), dim=1)
            # Hugging Face rotates pairs of neighbouring dims in DeepSeek V2, else pairs made of both halves.
            found[windowed] = KeyRotation(table, table.shape[1], self.name != "deepseek_v2")
        return found

    def _rotated(self, keys: torch.Tensor, by: torch.Tensor, windowed: bool) -> torch.Tensor:
        if self._rotation is None:
            return keys
        rotation = self._rotation[windowed]
        # Latent attention rotates only the last dims of a head.
        dims = keys.shape[-1] - rotation.rotary_dim if self.name in specs.LATENT else 0
        rotated = rotation.rotate(keys[..., dims:], by)
        return torch.cat((keys[..., :dims], rotated), dim=-1)

    @torch.no_grad()
    def off(
        self, prompt: list[int], found: dict[str, Any], blocks: list[Any], rotation: Rotations
    ) -> torch.Tensor:
        """Absolute differences between a server's log-probabilities and this model's, ``[tokens]``.

        Args:
            blocks: For each block, the first query that reads its source, and where block and source begin.
            rotation: Rotates keys that are read at another position. If None, keys are read as cached.
        """
        tokens = prompt + found["tokens"]
        assert len(prompt) == found["prompt"]
        slots, self._rotation = torch.arange(len(tokens)), rotation
        self._slots = [(0, slots)]
        for written, dst, src in sorted(blocks, key=lambda block: block[0]):
            slots = slots.clone()
            block, source = (slots[at : at + _LENGTH].tolist() for at in (dst, src))
            for old, new in zip(block, source, strict=True):
                slots[slots == old] = new
            self._slots.append((written, slots))
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0]
        ours = logits.log_softmax(dim=-1)[found["prompt"] - 1 : -1]
        ours = ours.gather(1, torch.tensor(found["tokens"])[:, None])[:, 0]
        return (ours - found["logprobs"]).abs()

    def _attend(
        self,
        _module: Any,
        query: Any,
        key: Any,
        value: Any,
        _mask: Any,
        scaling: float,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        n, out = query.shape[2], query.new_empty((*query.shape[:3], value.shape[3]))
        ends = [first for first, _ in self._slots[1:]] + [n]
        for (first, slots), end in zip(self._slots, ends, strict=True):
            windowed = sliding_window is not None
            keys = self._rotated(key[0].transpose(0, 1)[slots], torch.arange(n) - slots, windowed)
            read = keys.transpose(0, 1)[None], value[:, :, slots]
            visible = torch.ones(n, n, dtype=torch.bool).tril()
            visible = visible.triu(1 - (sliding_window or n))[first:end]
            out[:, :, first:end] = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, first:end], *read, attn_mask=visible, scale=scaling, enable_gqa=True
            )
        return out.transpose(1, 2).contiguous(), None


TRIED = ("qwen3_5_text", "deepseek_v3", "gemma3_text", "mellum")
OTHERS = ("qwen3_next", "lfm2", "nemotron_h", "deepseek_v2", "olmo3")
WITH_STATES = ("granitemoehybrid", "falcon_h1", "kimi_linear")
AT_ONCE = [specs.at_once(name) for name in TRIED]
SHORT = [specs.short(name) for name in TRIED[:2]]
SHORT += [specs.short(name).for_long_runs() for name in TRIED[2:]]
AT_ONCE += [specs.at_once(name).for_long_runs() for name in OTHERS + WITH_STATES]
SHORT += [specs.short(name).for_long_runs() for name in WITH_STATES]
#: A server with room for all requests, and a server short of slots.
ON_TWO_RANKS = [
    pytest.param(specs.on_two_ranks(make("deepseek_v3")), marks=specs.FEW_CORES)
    for make in (specs.at_once, specs.short)
]


@pytest.mark.parametrize("spec", [*AT_ONCE, ON_TWO_RANKS[0]])
def test_a_server_computes_what_a_loop_computes(
    servers: ServerPool, spec: specs.ServerSpec
) -> None:
    """Log-probabilities are those of a :class:`Loop` that redirects the same blocks, and not those of a Loop
    that rotates no keys or redirects nothing."""
    server, loop = servers.get(spec), Loop(servers, spec.model)
    responses = _together(server, 400)
    seen, rotation = report(server), loop.rotation()
    assert seen["uncorrected"] is None
    assert seen["config"]["positions"] == ("as-cached" if rotation is None else "corrected")
    assert (
        sum(len(found["blocks"]) for found in responses) == seen["totals"]["blocks_shared"] >= 200
    )
    parts: dict[str, list[torch.Tensor]] = {"shared": [], "dense": [], "as cached": [], "again": []}
    for text, found in zip(_prompts(10), responses, strict=True):
        assert found["retractions"] == 0 < len(found["blocks"])
        prompt = loop.tokenizer(text)["input_ids"]
        parts["shared"].append(loop.off(prompt, found, found["blocks"], rotation))
        parts["dense"].append(loop.off(prompt, found, [], None))
        parts["as cached"].append(loop.off(prompt, found, found["blocks"], None))
        # The prefix cache holds the response up to the first shared position. If the model has states or a
        # pool for window layers, the cache holds only the prompt, with the state or window at its end.
        follow = _follow_up(server, prompt + found["tokens"])
        shared = min(dst for _, dst, _ in found["blocks"])
        stateless = spec.model in {**specs.LATENT, **specs.WINDOWS}
        assert follow["cached"] == (shared if stateless else found["prompt"])
        parts["again"].append(loop.off(prompt + found["tokens"], follow, [], None))
    whole = prompt + found["tokens"] + follow["tokens"]
    follow = _follow_up(server, whole)
    # The last follow-up shared nothing, so the cache holds all its computed positions and its last state.
    assert follow["cached"] == len(whole) - 1
    parts["again"].append(loop.off(whole, follow, [], None))
    ours, dense, as_cached, again = (torch.cat(part) for part in parts.values())
    most = 5e-3 if spec.model == "nemotron_h" else ROUNDING  # the same without shared blocks
    assert max(ours.max(), again.max()) < most and max(ours.mean(), again.mean()) < 5e-4
    assert dense.mean() > 10 * ours.mean()
    assert rotation is None or as_cached.mean() > 10 * ours.mean()
    assert_whole(server)


@pytest.mark.parametrize("spec", [*SHORT, ON_TWO_RANKS[1]])
def test_a_server_short_of_slots_loses_nothing(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """While some requests share, others are retracted or aborted, or have opted out. Requests that opted out
    have the log-probabilities of a :class:`Loop` that redirects nothing."""
    server, loop = servers.get(spec), Loop(servers, spec.model)
    log = server.log_size()

    def ask(job: tuple[int, str]) -> Any:
        number, text = job
        rid, how = f"short-{number}", ("end", "end", "abort", "opt out")[number % 4]
        sampling = {"ignore_eos": True, **(OPT_OUT if how == "opt out" else {})}
        body = {"text": text, "rid": rid, "return_logprob": True}
        sampling |= {"temperature": 0, "max_new_tokens": 800 if how == "abort" else 400}
        aborted = threading.Timer(2.0, server.post, ("/abort_request",), {"json": {"rid": rid}})
        if how == "abort":
            aborted.start()
        return server.post("/generate", json={**body, "sampling_params": sampling}).json()

    todo = list(enumerate(_prompts(20 if spec.model in specs.STATELESS else 12)))
    with ThreadPoolExecutor(len(todo)) as pool:
        bodies = list(pool.map(ask, todo))
    wait_until_idle(server)
    seen = report(server)
    totals = seen["totals"]
    assert totals["blocks_shared"] > 8 and totals["shortages"] > 0 == totals["blocks_missed"]
    assert totals["requests_opted_out"] == len(todo) // 4
    assert "#retracted_reqs" in server.log_text(log)
    for number, text in todo[3::4]:
        [found] = _tell(server, [bodies[number]])
        ids = loop.tokenizer(text)["input_ids"]
        assert loop.off(ids, found, [], None).max() < ROUNDING
    assert_whole(server, log)
