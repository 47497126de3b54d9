# SPDX-License-Identifier: Apache-2.0
"""Computes the log-probabilities that a server should give: :class:`Loop` redirects blocks and skips evicted
positions in the attention of a Hugging Face model. :class:`Replayed` does the same with the fidelity harness
(``eval/fidelity``), which feeds the response to a model and copies K and V of shared blocks within its KV
cache."""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from eval.fidelity.arms import default_name
from eval.fidelity.arms import parse as parse_arm
from eval.fidelity.cache import Reader
from eval.fidelity.replay import ArmCache
from eval.serving import ServerProcess
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.policies.pooling import pooled
from sglang_reasoncache.eviction.policies.rkv import redundancy
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.policy_options import parse
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from tests.server.problems import OPT_OUT, prompts, reports, respond
from tests.server.specs import LATENT, QUEST_POLICY, RKV_POLICY

#: Models whose layers without a window do not rotate keys, unless they are forced to.
WITHOUT_POSITIONS = ("afmoe", "cohere2", "cohere2_moe", "exaone_moe")
#: Models whose window SGLang takes for the number of positions before a query's own.
WIDER = ("cohere2", "cohere2_moe", "exaone_moe", "mimo_v2_flash")
#: Models that pair neighbouring dims. The others pair both halves.
INTERLEAVED = ("cohere2", "cohere2_moe", "deepseek_v2")

#: How much fp32 log-probabilities may differ, because sums are computed in different orders.
ROUNDING = 1e-4
#: Key: whether a layer has a sliding window. Value: rotation of the layer's keys. None: keys stay as cached.
Rotations = dict[bool, KeyRotation] | None


class Compared(NamedTuple):
    """A response of a server beside what a :class:`Loop` computes for the same tokens.

    Attributes:
        off: Absolute differences of the log-probabilities, fp32 ``[tokens]``: of the prompt's tokens after the
            first, if the server told them, then of the response's tokens.
        behind: For each token of the response, how much less likely the loop finds it than the most likely
            token: fp32 ``[output tokens]``, 0 for the most likely token.
    """

    off: torch.Tensor
    behind: torch.Tensor


def joined(parts: Sequence[Compared]) -> Compared:
    """The tokens of all responses, one after the other."""
    return Compared(
        torch.cat([part.off for part in parts]), torch.cat([part.behind for part in parts])
    )


class _Row(NamedTuple):
    """What queries from position ``first`` on read.

    Attributes:
        slots: For each position, the position whose K and V are read there: int64 ``[tokens]``.
        held: False for evicted positions: bool ``[tokens]``.
    """

    first: int
    slots: torch.Tensor
    held: torch.Tensor


class Loop:
    """A Hugging Face model in fp32 that computes a prompt and a response in one forward. Its attention
    redirects the blocks that a server redirected while it generated the response, and skips the positions
    that the server evicted."""

    def __init__(self, path: Path, name: str = "") -> None:
        """``path``: the model's folder. ``name``: see ``ServerSpec.model``."""
        # Other loops of this process have functions of their own.
        attention = f"redirecting_{id(self)}"
        AttentionInterface.register(attention, self._attend)
        self.name = name
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention
        ).eval()
        self._rows: list[_Row] = []
        self._rotation: Rotations = None
        self._prompt = 0

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
            angles = torch.arange(2048)[:, None] * frequencies.float()
            table = torch.cat((angles.cos(), angles.sin()), dim=1)
            is_neox = self.name not in INTERLEAVED
            found[windowed] = KeyRotation(table, table.shape[1], is_neox)
        return found

    @torch.no_grad()
    def compare(
        self,
        prompt: Sequence[int],
        found: dict[str, Any],
        *,
        blocks: Sequence[tuple[int, int, int, int]] = (),
        evictions: Sequence[tuple[int, int, int]] = (),
        rotation: Rotations = None,
    ) -> Compared:
        """Compares a server's log-probabilities with this model's.

        Args:
            prompt: The prompt's token ids.
            found: An item that ``problems.respond`` returned.
            blocks: For each run of a block, the first query that reads its source, where run and source begin,
                and how many tokens they have.
            evictions: For each evicted run of positions, the first query that does not read it, where the run
                begins and how many positions it has.
            rotation: Rotates keys that are read at another position. If None, keys are read as cached.
        """
        assert len(prompt) == found["prompt_tokens"]
        tokens = [*prompt, *found["tokens"]]
        told = torch.tensor([*found["inputs"], *found["logprobs"]])
        self._rotation = rotation
        self._prompt = len(prompt)
        self._rows = _rows(len(tokens), blocks, evictions)
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0]
        ours = logits.log_softmax(dim=-1)[-len(told) - 1 : -1]
        of_tokens = ours.gather(1, torch.tensor(tokens[-len(told) :])[:, None])[:, 0]
        behind = (ours.amax(dim=-1) - of_tokens)[-len(found["tokens"]) :]
        return Compared((of_tokens - told).abs(), behind)

    def _rotated(self, keys: torch.Tensor, by: torch.Tensor, windowed: bool) -> torch.Tensor:
        if self._rotation is None:
            return keys
        rotation = self._rotation[windowed]
        # Latent attention rotates only the last dims of a head.
        dims = keys.shape[-1] - rotation.rotary_dim if self.name in LATENT else 0
        rotated = rotation.rotate(keys[..., dims:], by)
        return torch.cat((keys[..., :dims], rotated), dim=-1)

    def _reads(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Which positions each query of a layer may read: bool ``[tokens, tokens]``. ``query``, ``key``:
        ``[heads, tokens, dim]``."""
        return torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).tril()

    def _attend(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float,
        sliding_window: int | None = None,
        s_aux: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        count = query.shape[2]
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        ends = [row.first for row in self._rows[1:]] + [count]
        windowed = sliding_window is not None
        reach = count if sliding_window is None else sliding_window + (self.name in WIDER)
        turns = windowed or self.name not in WITHOUT_POSITIONS
        turns |= getattr(module, "force_rope", False)
        read = self._reads(module, query[0], key[0], scaling)
        for row, end in zip(self._rows, ends, strict=True):
            queries = slice(row.first, end)
            shift = torch.arange(count) - row.slots
            keys = key[0].transpose(0, 1)[row.slots]
            keys = self._rotated(keys, shift, windowed) if turns else keys
            keys = keys.transpose(0, 1)[None]
            values = value[:, :, row.slots]
            visible = read.triu(1 - reach)[queries] & row.held
            mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]
            if s_aux is not None:
                # A sink takes a share of a head's attention and gives nothing: a key and a value of zeros, and
                # the sink as what the mask adds.
                keys = torch.nn.functional.pad(keys, (0, 0, 0, 1))
                values = torch.nn.functional.pad(values, (0, 0, 0, 1))
                sinks = s_aux.reshape(1, -1, 1, 1).expand(-1, -1, mask.shape[2], -1)
                mask = torch.cat((mask.expand(-1, query.shape[1], -1, -1), sinks), dim=-1)
            out[:, :, queries] = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, queries],
                keys,
                values,
                attn_mask=mask,
                scale=scaling,
                enable_gqa=True,
            )
        return out.transpose(1, 2).contiguous(), None


_QUEST: Any = parse(QUEST_POLICY).selector
_PAGE = 16


class Selecting(Loop):
    """A :class:`Loop` in which each token of the response reads pages as Quest selects them: in each layer but
    the first ones, the newest page and those whose keys may have the largest share of attention."""

    def _reads(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        read = super()._reads(module, query, key, scaling)
        if module.layer_idx >= _QUEST.whole_layers:
            for at in range(max(self._prompt, _QUEST.budget), len(read)):
                keys = key[:, : at + 1].transpose(0, 1)
                read[at, : at + 1] = _pages_read(query[:, at], keys, scaling)
        return read


def _pages_read(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Which positions the newest query, ``[heads, dim]``, reads of ``keys``, ``[positions, kv_heads, dim]``."""
    keys = keys.repeat_interleave(len(query) // keys.shape[1], dim=1)
    logits = [
        torch.maximum(query * page.amax(0), query * page.amin(0)).sum(1) * scale
        for page in keys.split(_PAGE)
    ]
    shares = torch.stack(logits).softmax(dim=0).sum(dim=1)
    shares[-1] = torch.inf
    best = shares.topk(min(-(-_QUEST.budget // _PAGE), len(shares))).indices
    keep = torch.zeros(len(shares), dtype=torch.bool).scatter(0, best, True)
    return keep.repeat_interleave(_PAGE)[: len(keys)]


def off_from_selecting(server: ServerProcess, model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """How far log-probabilities of a server with ``QUEST_POLICY`` are from those of a loop that selects pages,
    too, and from those of a loop that reads everything."""
    todo = prompts(4, seed=41)
    responses = respond(server, todo, 200)
    off = []
    for kind in (Selecting, Loop):
        loop = kind(model)
        prompts_of = [loop.tokenizer(text)["input_ids"] for text in todo]
        off.append(joined([*map(loop.compare, prompts_of, responses)]).off)
    assert len(off[0]) > 400
    selecting, dense = off
    return selecting, dense


def assert_reads_less(seen: dict[str, Any]) -> None:
    """Checks by a server's report ``seen`` that decode steps read less than rows held, and freed nothing."""
    totals = seen["totals"]
    assert 0 < totals["positions_read"] < 0.8 * totals["positions_held"]
    assert seen["evictors"] == [] and totals["positions_evicted"] == 0


class Beside:
    """Responses of a server beside loops (:class:`Loop`): one that makes the server's changes to each row, and
    *others*, each of which makes one of the changes otherwise or not at all.

    ``late``: how many queries still read a row as it was before a change: 1 under the overlap schedule,
    because the forward in flight reads the old slots, else 0.
    """

    def __init__(self, loop: Loop, server: ServerProcess) -> None:
        seen = reports(server)[0]
        self._loop = loop
        self.late = 0 if server.get("/server_info").json()["disable_overlap_schedule"] else 1
        as_cached = seen["config"]["positions"] == "as-cached"
        self._rotations = (None, loop.rotation()) if as_cached else (loop.rotation(), None)
        self.ours: list[Compared] = []
        self._others: dict[str, list[Compared]] = {}

    def add(self, text: str, found: dict[str, Any]) -> None:
        """Compares the response to the prompt ``text``, an item that ``problems.respond`` returned."""
        prompt = self._loop.tokenizer(text)["input_ids"]
        blocks = [(written + self.late, *run) for written, *run in found["blocks"]]
        rotation, other = self._rotations
        changes: dict[str, Any] = dict(blocks=blocks, rotation=rotation)
        changes["evictions"] = _evictions(found, self.late)
        others: dict[str, dict[str, Any]] = {}
        if blocks:
            others["nothing shared"] = changes | dict(blocks=())
        if blocks and rotation is not other:
            others["keys rotated otherwise"] = changes | dict(rotation=other)
        if found["evictions"]:
            others["nothing evicted"] = changes | dict(evictions=())
            others["evicted at another query"] = changes | dict(
                evictions=_evictions(found, 1 - self.late)
            )
        self.ours.append(self._loop.compare(prompt, found, **changes))
        for name, otherwise in others.items():
            compared = self._loop.compare(prompt, found, **otherwise)
            self._others.setdefault(name, []).append(compared)

    def continued(
        self, whole: Sequence[int], found: dict[str, Any], follow: dict[str, Any]
    ) -> Compared:
        """Compares the response ``follow`` to a prompt ``whole`` that ends with the response ``found``, whose
        cached positions it read as they were."""
        # Positions behind the cached ones are computed again, and read all that was shared since.
        blocks = [(min(at + self.late, follow["cached"]), *to) for at, *to in found["blocks"]]
        rotation, _ = self._rotations
        return self._loop.compare(whole, follow, blocks=blocks, rotation=rotation)

    def check(self, *others: str, most: float = ROUNDING, times: float = 10) -> dict[str, float]:
        """Checks that no log-probability differs by ``most`` from that of the loop with the server's
        changes, and that every token of the responses is this loop's most likely one. The other loops named
        ``others`` must fit worse: some log-probability differs by more than ``most``, and the mean difference
        is more than ``times`` as large. Returns their mean differences by name."""
        ours = joined(self.ours)
        assert ours.off.max() < most
        # If two tokens are equally likely, rounding decides between them.
        assert ours.behind.max() < 2 * most
        means: dict[str, float] = {}
        for name in others:
            theirs = joined(self._others[name]).off
            assert theirs.max() > most and theirs.mean() > times * ours.off.mean(), name
            means[name] = float(theirs.mean())
        return means


def assert_within_rounding(
    server: ServerProcess, loop: Loop, todo: Sequence[str], *others: str, rounding: float,
    tokens: int = 700, together: bool = True, options: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Checks a server that computes in 16 bits: log-probabilities of responses that share or evict differ
    from the loop's at most twice as much as those of the same responses without sharing and evicting
    (*opted out*).

    Args:
        others: See :meth:`Beside.check`.
        rounding: No log-probability of responses that opted out may differ by as much.
        tokens: The most tokens of a response.
        together: Whether to send all prompts at once.
        options: Fields of the requests.
    """
    options = options or {}
    found: dict[bool, Beside] = {}
    for opts_out in (True, False):
        # A policy evicts no position of a prompt that the prefix tree holds.
        server.post("/flush_cache")
        sampling = {**options.get("sampling_params", {}), **(OPT_OUT if opts_out else {})}
        found[opts_out] = Beside(loop, server)
        each = len(todo) if together else 1
        for at in range(0, len(todo), each):
            some = todo[at : at + each]
            answers = respond(server, some, tokens, **{**options, "sampling_params": sampling})
            for text, answer in zip(some, answers, strict=True):
                assert not (opts_out and (answer["blocks"] or answer["evictions"]))
                found[opts_out].add(text, answer)
    noise = float(joined(found[True].ours).off.max())
    assert noise < rounding
    found[False].check(*others, most=2 * noise, times=2)


def _evictions(found: dict[str, Any], late: int) -> list[tuple[int, int, int]]:
    """The evicted runs of a response, for :meth:`Loop.compare`. No forward is in flight between the chunks of a
    prompt. ``late``: see :class:`Beside`."""
    prompt = found["prompt_tokens"]
    return [
        (written + (late if written >= prompt else 0), start, length)
        for written, start, length in found["evictions"]
    ]


def _rows(
    count: int,
    blocks: Sequence[tuple[int, int, int, int]],
    evictions: Sequence[tuple[int, int, int]],
) -> list[_Row]:
    """The row (block table) after each change, for ``count`` tokens. Arguments: see :meth:`Loop.compare`."""
    slots = torch.arange(count)
    held = torch.ones(count, dtype=torch.bool)
    rows = [_Row(0, slots, held)]
    # A stable sort keeps the order in which blocks of one batch began to share.
    changes = [(first, dst, src, size) for first, dst, src, size in blocks]
    changes += [(first, start, -1, size) for first, start, size in evictions]
    for first, of in itertools.groupby(sorted(changes, key=itemgetter(0)), key=itemgetter(0)):
        slots = slots.clone()
        held = held.clone()
        for _, start, source, size in of:
            if source < 0:
                held[start : start + size] = False
                continue
            for at in range(size):
                # An earlier position of the block may have changed what its source names.
                slots[slots == slots[start + at].item()] = slots[source + at].item()
        if first < count:
            rows.append(_Row(first, slots, held))
    return rows


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
        self._reader = reader
        self._tokens = tokens
        self._prompt = found["prompt_tokens"]
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
            written, dst, src, length, *source = self._blocks.popleft()
            assert length == _BLOCK, "the page size is 1"
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
            targets = torch.tensor(self._tokens[start + 1 : end + 1], dtype=torch.long)
            log_probs = logits[[0, self._arm.row]].log_softmax(-1)
            self._found.append(log_probs[:, torch.arange(len(targets)), targets])


def replays_of(model: Path) -> Callable[[str, dict[str, Any]], torch.Tensor]:
    """Returns a function of a prompt and a server's response that returns :meth:`Replayed.log_probs`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reader = Reader(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))

    def log_probs(text: str, found: dict[str, Any]) -> torch.Tensor:
        tokens = tokenizer(text)["input_ids"] + found["tokens"]
        return Replayed(reader, tokens, found).log_probs()

    return log_probs


def assert_computed(served: dict[str, Any], found: torch.Tensor) -> None:
    """Checks that the server's log-probabilities are those of the edited row, not those of the dense row."""
    assert apart_from_dense(served, found) > 20


def apart_from_dense(served: dict[str, Any], found: torch.Tensor) -> float:
    """Checks that the server's log-probabilities are those of the edited row. Returns how many times as far
    they are from the dense row's: hardly farther if blocks share only just before the end."""
    expected = torch.tensor(served["logprobs"])
    dense, ours = (found - expected).abs()
    assert ours.mean() < 1e-4 and ours.max() < 1e-2
    return float(dense.mean() / ours.mean())
