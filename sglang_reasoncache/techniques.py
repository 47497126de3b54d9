# SPDX-License-Identifier: Apache-2.0
"""Techniques for KV caches by the names that papers gave them: what serves each here, or why nothing does. The
table of docs/papers.md and the error for such a name in ``--reasoncache-policy`` are made from it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Here(Enum):
    """What happens to a technique here."""

    SERVED = "served"  # a policy, preset or flag of a server
    OFFLINE = "offline"  # ``python -m eval.fidelity`` measures it, no server has it
    REFUSED = "refused"


@dataclass(frozen=True)
class Technique:
    """``code``: a policy with its options but the budget, or other words of a command line, which give the
    technique. ``text``: what else to say, or why it is refused. ``kind``: the survey's category, or the paper
    that compares itself with the technique."""

    name: str
    kind: str
    here: Here
    text: str = ""
    code: str = ""

    @property
    def sentence(self) -> str:
        words = {
            Here.SERVED: "is served",
            Here.OFFLINE: "is measured offline only",
            Here.REFUSED: "is refused",
        }
        return f"{self.name} {words[self.here]}: {'; '.join(filter(None, (self.code, self.text)))}"


_WHOLE_SLOT = (
    "a slot holds a token's KV of all layers and heads, so none of them can keep a position alone"
)
_FREES_NOTHING = (
    "it reads less of the cache but frees no slot, and slots are what a server here lacks"
)
_TRAINED = "it needs a model that was trained for it"
_EXACT = "a kernel for exact attention over shared prefixes, no policy"
_WAITS = "a decode step would wait for KV from host memory in each layer"
_STATIC = "static"
_DYNAMIC = "dynamic"
_RETRIEVAL = "retrieval"
_PREFIX = "prefix reuse"
_LAYER = "layer"
_HEAD = "head"
_CLUSTER = "cluster"
_DOCUMENTS = "python -m eval.fidelity build/models/smollm2 --documents FILE.jsonl --arms "

#: First those of the survey, in its order, then baselines of the other papers.
TECHNIQUES: tuple[Technique, ...] = (
    Technique("Window attention", _STATIC, Here.SERVED, code="streamingllm:sinks=0:prompt=true"),
    Technique(
        "Dilated window",
        _STATIC,
        Here.REFUSED,
        "it drops positions by their number alone, far from what attention reads; docs/eviction.md has such a "
        "policy as its example",
    ),
    Technique(
        "Sliding window with recomputation",
        _STATIC,
        Here.REFUSED,
        "it computes the window's KV again at each step; SGLang computes a token's KV once",
    ),
    Technique(
        "StreamingLLM",
        _STATIC,
        Here.SERVED,
        "positions keep their numbers, unlike the paper's",
        "streamingllm",
    ),
    Technique("SoftMax-off-by-one", _STATIC, Here.REFUSED, _TRAINED),
    Technique("H2O", _DYNAMIC, Here.SERVED, code="h2o"),
    Technique(
        "Scissorhands",
        _DYNAMIC,
        Here.SERVED,
        "a window of recent queries counts, by their mean attention",
        "rkv:mix=1:alpha=64:kernel=1",
    ),
    Technique(
        "Keyformer",
        _DYNAMIC,
        Here.REFUSED,
        "its score adds noise to each step's attention logits, which attention kernels do not return; h2o is "
        "the rule without noise",
    ),
    Technique(
        "SubGen",
        _DYNAMIC,
        Here.REFUSED,
        "it keeps samples and centres of clusters for each head, which are no token's KV; "
        + _WHOLE_SLOT,
    ),
    Technique("LESS", "dynamic, low rank", Here.REFUSED, _TRAINED),
    Technique("SparQ", _RETRIEVAL, Here.REFUSED, _FREES_NOTHING),
    Technique("FastGen", "prefill, head", Here.REFUSED, _WHOLE_SLOT),
    Technique("SnapKV", "prefill", Here.SERVED, code="snapkv"),
    Technique("PyramidKV", _LAYER, Here.REFUSED, _WHOLE_SLOT),
    Technique("PyramidInfer", _LAYER, Here.REFUSED, _WHOLE_SLOT),
    Technique("ZigZagKV", "layer, head", Here.REFUSED, _WHOLE_SLOT),
    Technique("LCKV", _LAYER, Here.REFUSED, _TRAINED),
    Technique("AdaKV", _HEAD, Here.REFUSED, _WHOLE_SLOT),
    Technique("RazorAttention", _HEAD, Here.REFUSED, _WHOLE_SLOT),
    Technique("DuoAttention", _HEAD, Here.REFUSED, _TRAINED + ", and " + _WHOLE_SLOT),
    Technique(
        "TriForce",
        "speculative, retrieval",
        Here.REFUSED,
        "its draft reads selected chunks of the target's cache; SGLang's --speculative-algorithm is served",
    ),
    Technique("InfLLM", _CLUSTER, Here.REFUSED, _WAITS),
    Technique(
        "Quest",
        _CLUSTER,
        Here.SERVED,
        "with --page-size 16; all heads of a layer read the same pages; it frees no slot (docs/selection.md)",
        "quest",
    ),
    Technique("SqueezedAttention", _CLUSTER, Here.REFUSED, _FREES_NOTHING),
    Technique("RetrievalAttention", _CLUSTER, Here.REFUSED, _FREES_NOTHING),
    Technique("EM-LLM", _CLUSTER, Here.REFUSED, _FREES_NOTHING),
    Technique("ClusterKV", _CLUSTER, Here.REFUSED, _FREES_NOTHING),
    Technique(
        "MiniCache",
        "merging of layers",
        Here.REFUSED,
        "SGLang's pool stores each layer by itself; merged layers need a pool and kernels of another form",
    ),
    Technique("DMC", "merging of tokens", Here.REFUSED, _TRAINED),
    Technique(
        "Prompt Cache",
        _PREFIX,
        Here.SERVED,
        "no policy: requests mark their documents (docs/documents.md)",
    ),
    Technique("Hydragen", _PREFIX, Here.REFUSED, _EXACT + "; it frees no slot"),
    Technique(
        "ChunkAttention",
        _PREFIX,
        Here.SERVED,
        "no policy: its tree is SGLang's prefix cache, which is on by default; its kernel is not here",
    ),
    Technique(
        "AttentionStore",
        _PREFIX,
        Here.SERVED,
        "a flag of SGLang, no policy; positions are not decoupled",
        "--enable-hierarchical-cache",
    ),
    Technique(
        "RadixAttention",
        _PREFIX,
        Here.SERVED,
        "no policy: SGLang's prefix cache, which is on by default",
    ),
    Technique("InfiniGen", _RETRIEVAL, Here.REFUSED, _WAITS),
    Technique("MemShare", "paper", Here.SERVED, code="--reasoncache-preset memshare"),
    Technique("SamKV", "paper", Here.OFFLINE, code=_DOCUMENTS + "samkv,samkv-fusion"),
    Technique("KeyDiff", "paper", Here.SERVED, code="keydiff"),
    Technique(
        "TOVA",
        "baseline of KeyDiff",
        Here.SERVED,
        "the attention of the newest query",
        "rkv:mix=1:alpha=1:kernel=1:recent=1:slack=0",
    ),
    Technique(
        "KeyL2Norm", "baseline of KeyDiff", Here.SERVED, "the paper exempts some layers", "l2norm"
    ),
    Technique(
        "CacheBlend",
        "baseline of SamKV",
        Here.OFFLINE,
        "documents_repair=query:.15 is served",
        _DOCUMENTS + "deviation:.15",
    ),
    Technique(
        "EPIC",
        "baseline of SamKV",
        Here.SERVED,
        "no policy: a repair of documents",
        "--reasoncache-set documents_repair=first:16",
    ),
    Technique(
        "Multi-InfLLM",
        "baseline of SamKV",
        Here.REFUSED,
        _WAITS,
    ),
)


def named(name: str) -> Technique | None:
    """The technique of this name; case, spaces and signs do not matter. None if there is none."""
    return _BY_NAME.get(_plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_NAME = {_plain(technique.name): technique for technique in TECHNIQUES}


def table() -> Iterator[str]:
    """The lines of the Markdown table in docs/papers.md."""
    yield "| technique | kind | here | how, or why not |"
    yield "| --- | --- | --- | --- |"
    for technique in TECHNIQUES:
        code = f"`{technique.code}`" if technique.code else ""
        how = "; ".join(filter(None, (code, technique.text)))
        yield f"| {technique.name} | {technique.kind} | {technique.here.value} | {how} |"
