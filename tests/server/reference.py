# SPDX-License-Identifier: Apache-2.0
"""Computes the log-probabilities that a server should give. If the server evicts, the Hugging Face model of
the fixture ``reference`` masks the evicted positions. If the server shares, the fidelity harness
(``eval/fidelity``) feeds the response to a model and copies K and V of shared blocks within its KV cache."""

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import torch

from eval.fidelity.arms import default_name
from eval.fidelity.arms import parse as parse_arm
from eval.fidelity.cache import Reader
from eval.fidelity.replay import ArmCache
from eval.serving import ServerProcess
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.policies.pooling import pooled
from sglang_reasoncache.eviction.policies.rkv import redundancy
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.policy_options import parse
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from tests.server.problems import prompts, respond
from tests.server.specs import RKV_POLICY


@torch.no_grad()
def differences(
    reference: Any, prompt: str, found: dict[str, Any], after: int | None = 1
) -> torch.Tensor:
    """Absolute differences between the server's log-probabilities and the model's: fp32 ``[tokens]``.

    Args:
        found: An item that :func:`respond` returned.
        after: How many queries still see a position after its eviction during decode: 1 under the overlap
            schedule, because the forward in flight reads the position; else 0. None: nothing is masked.
    """
    tokenizer, model = reference
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) == found["prompt_tokens"]
    text, logprobs = ids + found["tokens"], found["inputs"] + found["logprobs"]
    visible = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    for written, start, length in found["evictions"] if after is not None else ():
        query = written + (after or 0) * (written >= len(ids))
        visible[query:, start : start + length] = False
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    out = model(input_ids=torch.tensor([text]), attention_mask=mask[None, None])
    expected = out.logits[0].log_softmax(dim=-1)[-len(logprobs) - 1 : -1]
    expected = expected.gather(1, torch.tensor(text[-len(logprobs) :])[:, None])[:, 0]
    return (expected - torch.tensor(logprobs)).abs()


def assert_masked(
    reference: Any, todo: Sequence[str], found: Sequence[dict[str, Any]], least: int, ratio: float,
    rounding: tuple[float, float] = (0.02, 0.6), after: int = 1,
) -> float:  # fmt: skip
    """Checks that log-probabilities are those of a model that does not see evicted positions. Returns the sum
    of the differences from this model.

    Args:
        least: More tokens than this must be compared.
        ratio: For a model that sees all positions, the sum must be more than ``ratio`` times as large.
        rounding: A response's mean and largest difference must be below these bounds. The server uses bf16.
        after: See :func:`differences`.
    """
    compared, sums = 0, dict.fromkeys((after, None), 0.0)
    for text, response in zip(todo, found, strict=True):
        for masked in sums:
            off = differences(reference, text, response, masked)
            sums[masked] += float(off.sum())
            if masked is not None:
                assert off.mean() < rounding[0] and off.max() < rounding[1]
                compared += len(off)
    assert compared > least
    assert sums[after] < sums[None] / ratio
    return sums[after]


RECENT: int = parse(RKV_POLICY).evictors[0].policy.recent


@torch.no_grad()
def rkv_scores(model: Any, tokens: list[int], written: int) -> torch.Tensor:
    """Computes ``RKV`` scores in a Hugging Face model. Positions with the lowest scores are evicted first."""
    # The newest of RKV's 8 queries is at position ``written``: the forward in flight at eviction computes it.
    ids = torch.tensor([tokens[: written + 1]])
    out = model(input_ids=ids, output_attentions=True, use_cache=True)
    weights = torch.cat([layer[0] for layer in out.attentions])[:, -8:, :written]
    weights = weights / weights.sum(dim=-1, keepdim=True)
    importance = pooled(weights.mean(dim=(0, 1)), 7, "max")
    keys = [layer.keys[0, :, :written].transpose(0, 1) for layer in out.past_key_values.layers]
    redundant = torch.cat([redundancy(of_layer, 0.5, 512) for of_layer in keys]).mean(dim=0)
    return 0.1 * importance - 0.9 * redundant


def assert_rkv_decides(server: ServerProcess, reference: Any) -> None:
    """Checks that each response's first eviction takes the positions with the lowest scores, up to rounding."""
    tokenizer, model = reference
    todo = prompts(6, seed=31)
    same = total = 0
    for text, found in zip(todo, respond(server, todo), strict=True):
        tokens = tokenizer(text)["input_ids"] + found["tokens"]
        written = found["evictions"][0][0]
        runs = [run[1:] for run in found["evictions"] if run[0] == written]
        gone = {at for start, length in runs for at in range(start, start + length)}
        candidates = range(found["prompt_tokens"], written - RECENT)
        scores = rkv_scores(model, tokens, written)
        expected = sorted(candidates, key=lambda at: float(scores[at]))[: len(gone)]
        assert gone <= set(candidates)
        same += len(gone & set(expected))
        total += len(gone)
    assert total > 6 * 20
    assert same / total > 0.95


_ARM = parse_arm(default_name())
_BLOCK = ReasonCacheConfig().block


class Replayed:
    """Feeds a server's response to a model with two rows of KV cache: a dense row, and an edited row in which
    blocks share as on the server. ``number``: the response's index among the responses to its prompt."""

    def __init__(
        self, reader: Reader, tokens: list[int], found: dict[str, Any], number: int = 0
    ) -> None:
        self._reader, self._tokens, self._prompt = reader, tokens, found["prompt_tokens"]
        self._cache = reader.cache(2, len(tokens))
        self._arm = ArmCache(_ARM, reader, self._cache, self._prompt, number)
        blocks = [*found["blocks"], *found["blocks_across"]]
        self._sources = found["sources"]
        self._blocks = deque(sorted(blocks, key=lambda block: block[0]))
        self._found: list[torch.Tensor] = []

    def log_probs(self, siblings: Mapping[str, Self] = MappingProxyType({})) -> torch.Tensor:
        """Returns fp32 ``[2, tokens]``: dense row, edited row. ``siblings``: the prompt's responses by id."""
        self._read(len(self._tokens), siblings)
        return torch.cat(self._found, dim=1)[:, self._prompt - 1 :]

    def _read(self, end: int, siblings: Mapping[str, Self]) -> None:
        while self._blocks and self._blocks[0][0] < end:
            written, dst, src, *source = self._blocks.popleft()
            # When the server shared the block, the forward in flight still read the old slots.
            self._forward(written + 1)
            if source:
                lender = siblings[self._sources[source[0]]]
                lender._read(src + _BLOCK, siblings)
                self._arm.read(dst, src, lender._arm)
            else:
                self._arm.share([BlockPair(dst, src)], AdaptiveThreshold(100, 0))
        self._forward(end)

    def _forward(self, end: int) -> None:
        start = self._cache.length
        if start < end:
            logits = self._reader.forward(self._cache, self._tokens[start:end])
            targets = torch.tensor(self._tokens[start + 1 : end + 1])
            log_probs = logits[[0, self._arm.row]].log_softmax(-1)
            self._found.append(log_probs[:, torch.arange(len(targets)), targets])


def assert_computed(served: dict[str, Any], found: torch.Tensor) -> None:
    """Checks that the server's log-probabilities are those of the edited row, not those of the dense row."""
    expected = torch.tensor(served["logprobs"])
    dense, ours = (found - expected).abs()
    assert ours.mean() < 1e-4 and ours.max() < 1e-2
    assert dense.mean() > 20 * ours.mean()
