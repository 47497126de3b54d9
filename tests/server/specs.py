# SPDX-License-Identifier: Apache-2.0
"""The servers that tests use. Tests share servers, because a server takes ten seconds to start."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import sglang

from eval.serving import LEAN_START
from eval.tiny_reasoner import CHECKPOINT
from sglang_reasoncache.arguments import arguments_of
from tests.server import tiny_models
from tests.server.faulty.waiting_reasoncache import WAITS

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class ServerSpec:
    #: Short name, for test ids and log files.
    name: str
    flags: tuple[str, ...] = ()
    #: Environment variables on top of ``harness.STRICT_CHECKS``.
    env: tuple[tuple[str, str], ...] = ()
    #: Whether tests of this server are marked ``long``. ``make test`` does not run tests marked ``long``.
    long: bool = False
    #: Tests of all specs in one group run in one pytest process. If empty, the spec is a group of its own.
    group: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    #: Name of a model of ``tiny_models.py``; if empty, the embedded reasoner (``eval/tiny_reasoner``).
    model: str = ""
    #: Name of a model of ``tiny_models.py`` that drafts tokens; if empty, the flags say what does.
    draft: str = ""

    def having(self, name: str, *flags: str, **env: str) -> ServerSpec:
        """A copy of this spec named ``<this>-<name>``, with further flags and environment variables. The copy
        is not ``long`` and is a group of its own. A string in ``flags`` may hold several flags."""
        words = " ".join((*self.flags, *flags)).split()
        env_of_both = (*self.env, *sorted(env.items()))
        of_both = replace(self, name=f"{self.name}-{name}", flags=tuple(words), env=env_of_both)
        return replace(of_both, long=False, group="")

    def for_long_runs(self) -> ServerSpec:
        return replace(self, long=True)

    def beside(self, other: ServerSpec) -> ServerSpec:
        """A copy of this spec in the group of ``other``. Tests that use both specs start ``other`` once."""
        return replace(self, group=other.name)


#: SGLang without the plugin's flag, and with it.
STOCK = ServerSpec("stock")
SHARED = ServerSpec("shared", ("--enable-reasoncache",))

#: Limits the KV pool to four or five responses of the embedded reasoner, so that requests wait and SGLang
#: retracts requests and evicts cached prefixes.
TIGHT = "--max-total-tokens 2400"
#: The default settings, but a block may share once 32 tokens follow it, because test responses are short.
#: With EAGER, blocks share even while SGLang has enough slots.
SOON = tuple(arguments_of({"min_age": 32}))
EAGER = tuple(arguments_of({"min_age": 32, "when": "always"}))
#: SGLang reserves few slots for the output of running requests and admits more requests, so slots run short.
CROWDED = "--schedule-conservativeness 0.1"
#: Long prompts are prefilled in chunks. A forward may mix a chunk with decoding requests.
CHUNKED = "--chunked-prefill-size 64 --enable-mixed-chunk"
#: Attention that skips evicted positions.
PAGED_READS = "--attention-backend reasoncache_cpu"
PAGE16 = "--page-size 16"
POLICY = "--reasoncache-policy"
#: An evicting policy. To check its decisions, ``reference.py`` computes them again.
RKV_POLICY = "rkv:budget=110:slack=24:recent=16"
#: Compiling SGLang's functions for several ranks or for state layers would delay a start by 14 seconds.
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", **UNCOMPILED}
FEW_CORES = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank needs a core")


def retracting(interval: int) -> dict[str, str]:
    """Makes SGLang retract requests at every ``interval``-th forward, as if slots were short. SGLang later
    prefills these requests again, between decode steps of other requests."""
    return {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": str(interval)}


#: Shares by the default rule. An empty REASONCACHE_FORK lets SGLang spawn its processes, as in production.
EXACT = SHARED.having(
    *("exact", TIGHT, CROWDED, *SOON, CHUNKED, "--enable-metrics"),
    "--reasoncache-set keep_responses=8",
    REASONCACHE_FORK="",
).beside(STOCK)
#: Shares as soon as a repeat is found, also between the responses to one prompt.
ACROSS = SHARED.having(
    "across",
    *(TIGHT, *EAGER, CHUNKED, "--reasoncache-scope prompt --enable-metrics"),
    **retracting(25),
).beside(STOCK)
#: The MemShare paper's settings: blocks of similar steps are paired by their KV distance.
MEMSHARE = SHARED.having(
    "memshare", TIGHT, PAGE16, *arguments_of({"preset": "memshare"}), CROWDED
).for_long_runs()

#: Has slots for a few responses. Responses to one prompt also share with each other. Blocks share at the
#: default age: at 32 tokens, sharing a quarter of all positions costs this model 3 answers of a hundred.
SWINGING = SHARED.having(
    "swinging", *("--max-total-tokens 4000", CROWDED, CHUNKED, "--reasoncache-scope prompt")
).for_long_runs()


def beside_ours(*folders: str) -> str:
    """``PYTHONPATH`` of a server that also loads the plugins in ``folders``, which are beside this file."""
    paths = (*(str(_HERE / folder) for folder in folders), os.environ.get("PYTHONPATH"))
    return os.pathsep.join(filter(None, paths))


def _plugins(*folders: str) -> dict[str, str]:
    """The variable by which a server starts lean and loads the plugin ``faulty`` and those in ``folders``."""
    return {"PYTHONPATH": os.pathsep.join((str(LEAN_START), beside_ours("faulty", *folders)))}


#: Loads two plugins. One makes a rank fail after a request with a special id. If WAITS is set, the other makes
#: the scheduler wait until its filter process has found all repeats, so that sharing does not depend on timing.
PLUGINS = beside_ours("faulty")
LEAN_PLUGINS = os.pathsep.join((str(LEAN_START), PLUGINS))
WAITING = {WAITS: "1", "PYTHONPATH": LEAN_PLUGINS}
#: Shares pages of 16 when slots run short, under forced retractions.
PAGED = SHARED.having(
    "page16", TIGHT, PAGE16, *SOON, CROWDED, **WAITING, **retracting(25)
).for_long_runs()
#: Without a prefix cache, like most public recipes. Retracted requests still come back from the host.
UNCACHED = SHARED.having(
    "uncached",
    *("--disable-radix-cache", TIGHT, *SOON, CROWDED, CHUNKED),
    **{**WAITING, **retracting(25)},
)
ADMIN_KEY = "for-admins-only"
#: Two processes serve HTTP. In these SGLang does not check the key.
WORKERS = SHARED.having(
    "workers", *EAGER, f"--tokenizer-worker-num 2 --admin-api-key {ADMIN_KEY}", REASONCACHE_FORK=""
).for_long_runs()
#: Two tensor-parallel ranks with a core each. They must decide alike and, if one fails, stop sharing together.
TWO_RANKS = SHARED.having(
    *("tp2", "--max-total-tokens 850 --tp 2 --dtype float32 --enable-metrics", CROWDED, *SOON),
    "--reasoncache-percentile 90",
    PYTHONPATH=LEAN_PLUGINS,
    **TWO_CORES,
)
#: Servers that evict compute in fp32, for exact comparisons.
FP32 = "--dtype float32"
#: Evicts whole pages, chosen by their keys, under forced retractions, without the overlap schedule.
EVICTING_PAGES = SHARED.having(
    "keydiff-page16",
    *(TIGHT, PAGED_READS, PAGE16, FP32, "--disable-overlap-schedule"),
    *(POLICY, "keydiff:share=0.6"),
    **retracting(25),
).for_long_runs()
#: Shares and evicts in the same requests, under forced retractions, without the overlap schedule.
SHARING_AND_EVICTING = SHARED.having(
    "both",
    *(TIGHT, *EAGER, CHUNKED, PAGED_READS, FP32, "--disable-overlap-schedule"),
    *(POLICY, "reasoncache+streamingllm:budget=240"),
    **retracting(25),
).for_long_runs()
#: Evicts by attention weights. The pool is large, because ``reference.py`` cannot follow retractions.
RKV = SHARED.having("rkv", CHUNKED, PAGED_READS, FP32, POLICY, RKV_POLICY)
#: Each decode step reads the pages that may matter most, in every layer but the first. The pool is as large as
#: that of RKV.
QUEST_POLICY = "quest:budget=48:whole_layers=1"
QUEST = SHARED.having(
    *("quest", CHUNKED, PAGED_READS, PAGE16, FP32, "--enable-metrics"),
    *(POLICY, QUEST_POLICY),
)
#: Beside sharing, and requests that are retracted and come back from the host: bounds of pages that are loaded.
QUEST_AND_SHARING = SHARED.having(
    "quest-sharing",
    *(TIGHT, *EAGER, CHUNKED, PAGED_READS, PAGE16, FP32),
    *(POLICY, f"reasoncache+{QUEST_POLICY}"),
    **retracting(25),
).for_long_runs()
#: Evicts after each chunk of a prompt, so that prompts stay within a budget. There is no prefix cache.
EVICTING_PROMPTS = SHARED.having(
    "prompts",
    *(TIGHT, CHUNKED, PAGED_READS, FP32, "--disable-radix-cache"),
    *(POLICY, "keydiff:budget=96:slack=0:recent=16:prompt=true"),
).for_long_runs()
EVICTING_PROMPTS_IN_TURN = EVICTING_PROMPTS.having(
    "in-turn", "--disable-overlap-schedule"
).for_long_runs()
#: For a server on a GPU: loads a plugin that copies KV into each request's own slots instead of sharing slots.
COPY = {"PYTHONPATH": beside_ours("faulty", "copying")}
#: Computes in fp32 and waits for the filter process, for exact comparisons. Shares only in reasoning.
CORRECTED = SHARED.having(
    "corrected", *EAGER, CHUNKED, "--reasoning-parser qwen3 --dtype float32", **WAITING
)
#: Responses to one prompt share with each other, too.
SIBLINGS = CORRECTED.having("siblings", "--reasoncache-scope prompt").for_long_runs()
#: For models whose responses run in circles (``tiny_models.py``), and so may have no end of a step.
EAGER_CIRCLES = tuple(arguments_of({"min_age": 32, "max_step_tokens": 64, "when": "always"}))
#: Shares pages of equal tokens. Computes in fp32 and waits for the filter process, for exact comparisons.
PAGES = replace(SHARED, name="qwen3", model="qwen3").having(
    "page16",
    "--dtype float32 --enable-tokenizer-batch-encode --random-seed 7",
    *(PAGE16, CHUNKED, *EAGER_CIRCLES),
    **WAITING,
)
TOKENS = PAGES.having("page1", "--page-size 1")
#: The models' circles go through the prompts, too.
QUOTES = TOKENS.having("quotes", "--reasoncache-set reads_prompt=true").for_long_runs()
PAGES_OF_64 = PAGES.having("64", "--page-size 64").for_long_runs()
#: Reads shared keys as they were cached.
PAGES_AS_CACHED = PAGES.having("as-cached", "--reasoncache-positions as-cached").for_long_runs()
#: Shares nothing, because it cannot correct keys (rotate them to new positions): correcting needs one attention
#: backend for prefill and decode, but here two backends are set.
UNCORRECTED = (
    SHARED.having(
        "uncorrected",
        "--prefill-attention-backend reasoncache_cpu --decode-attention-backend torch_native",
        "--enable-metrics",
    )
    .beside(STOCK)
    .for_long_runs()
)

#: Name in ``tiny_models.py`` -> module in SGLang, for models with latent attention and with sliding windows.
LATENT = dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek_v2")
WINDOWS = {"gemma3_text": "gemma3_causal", "olmo3": "olmo2", "cohere2": "commandr"}
WINDOWS |= {name: name for name in ("afmoe", "cohere2_moe", "exaone_moe")}
#: The window layers of these models have a pool of their own.
WINDOW_POOL = {"mellum": "mellum", "gpt_oss": "gpt_oss", "laguna": "laguna"}
WINDOW_POOL |= {"mimo_v2_flash": "mimo_v2"}
#: Attention as in the embedded reasoner, but other rotary embeddings.
PLAIN = {"phi3": "llama"}
STATELESS = {**LATENT, **WINDOWS, **WINDOW_POOL, **PLAIN}


def _beside(model: str) -> dict[str, str]:
    if model == "gpt_oss":
        return _plugins("sinks")
    return _plugins(*(() if model in STATELESS else ("state_layers",)))


def _importing(*modules: str) -> dict[str, str]:
    """Lets a server import only these modules of SGLang's models: importing all takes many seconds."""
    folder = Path(sglang.__file__).parent / "srt/models"
    others = {file.stem for file in folder.glob("*.py")} - {"__init__", *modules}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(others))}


def _of(model: str, name: str, *flags: str, **env: str) -> ServerSpec:
    """A server of a tiny model. The overlap schedule is off: for state layers it needs extra copies of
    states, which SGLang lacks on a CPU."""
    states = "--mamba-radix-cache-strategy no_buffer --max-mamba-cache-size 500"
    states *= model not in STATELESS  # empty for other models
    flags = ("--dtype float32 --disable-overlap-schedule", states, *flags)
    if model in WINDOW_POOL:
        env["SGLANG_SWA_EVICTION_INTERVAL"] = "1"
    if model == "phi3":
        # Up to here LongRoPE has one table.
        flags = ("--context-length 2048", *flags)
    if model == "gpt_oss":
        # SGLang's choice for this model needs a GPU.
        flags = ("--moe-runner-backend triton", *flags)
    flags += tuple(arguments_of({"min_age": 32, "max_step_tokens": 64}))
    env = _beside(model) | _importing(STATELESS.get(model, model)) | env
    env |= {WAITS: "1", "SGLANG_MAMBA_CONV_DTYPE": "float32", **UNCOMPILED}
    return replace(SHARED, name=model, model=model).having(name, *flags, **env)


def at_once(model: str) -> ServerSpec:
    """A server with room for ten requests that arrive together."""
    flags = (
        "--enable-tokenizer-batch-encode --random-seed 7",
        "--max-running-requests 10 --reasoncache-when always",
    )
    return _of(model, "shared", *flags)


#: Shares pages of latent rows.
LATENT_PAGES = at_once("deepseek_v3").having("page16", PAGE16).for_long_runs()


def short(model: str) -> ServerSpec:
    """A server with KV slots for three responses, under forced retractions."""
    pool = (
        # If window layers have their own pool, other layers' pool fills less, so only a smaller one runs short.
        f"--max-total-tokens {1000 if model in WINDOW_POOL else 1200} --max-running-requests 12",
        CROWDED,
        "--chunked-prefill-size 64",
    )
    return _of(model, "short", *pool, **retracting(150))


#: Both pools have pages, as with the backend that SGLang chooses for gpt-oss on Blackwell.
WINDOW_PAGES = at_once("gpt_oss").having("page16", PAGE16).for_long_runs()
WINDOW_PAGES_SHORT = (
    short("mellum").having("page16", PAGE16, "--max-total-tokens 1024").for_long_runs()
)


def _overlapped(spec: ServerSpec) -> ServerSpec:
    """The spec with the overlap schedule, SGLang's default."""
    return replace(spec, flags=tuple(word for word in spec.flags if "overlap" not in word))


#: As by default: with the overlap schedule, and windows lose their slots many tokens at a time.
WINDOWS_OVERLAPPED = (
    _overlapped(short("gpt_oss"))
    .having("overlap", SGLANG_SWA_EVICTION_INTERVAL="128")
    .for_long_runs()
)


def on_two_ranks(spec: ServerSpec) -> ServerSpec:
    """The spec on two tensor-parallel ranks, a core each."""
    return spec.having("tp2", "--tp 2", **TWO_CORES).for_long_runs()


#: DP attention with two groups. Each group is a rank with a core.
GROUPS = replace(SHARED, name="qwen3_moe", model="qwen3_moe").having(
    "groups",
    "--dtype float32 --enable-dp-attention --tp 2 --dp-size 2 --enable-metrics --random-seed 7",
    *EAGER_CIRCLES,
    **_plugins("attention_groups"),
    **{WAITS: "1", **TWO_CORES},
)
GROUPS_SHORT = GROUPS.having(
    "short", "--max-total-tokens 800", CROWDED, **retracting(150)
).for_long_runs()
#: Four tensor-parallel ranks of one group, on two cores. They exchange numbers in another way than two do.
FOUR_RANKS = (
    replace(SHARED, name="qwen3_moe", model="qwen3_moe")
    .having(
        "tp4",
        "--dtype float32 --tp 4 --random-seed 7 --max-total-tokens 800",
        *EAGER_CIRCLES,
        CROWDED,
        **{WAITS: "1", **TWO_CORES, "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1", **retracting(150)},
    )
    .for_long_runs()
)
#: DP attention with two groups of two ranks: four processes on two cores.
GROUPS_OF_TWO = GROUPS.having(
    "tp4", "--tp 4", SGLANG_CPU_OMP_THREADS_BIND="0|1|0|1"
).for_long_runs()


#: The KV pool has room for two responses of ``test_host_tier.py``. The host keeps evicted prefixes.
HOST_TIER = SHARED.having(
    "host-tier",
    *("--dtype float32 --max-total-tokens 1600 --reasoncache-when always", *SOON),
    "--enable-hierarchical-cache --hicache-ratio 8 --hicache-write-policy write_through",
    "--hicache-io-backend direct --hicache-mem-layout layer_first",
    **{
        WAITS: "1",
        **_plugins("host_tier"),
    },
)
#: Cannot share: the platform has a KV pool of its own.
UNSHARED = SHARED.having(
    "unshared",
    "--attention-backend torch_native --dtype float32 --enable-metrics",
    *("--max-total-tokens 1200 --max-running-requests 12 --chunked-prefill-size 64", CROWDED),
    **{**_plugins("own_pool"), **retracting(150)},
)
#: WRITE_BACK copies prefixes to the host only when the pool evicts them. ON_DISK also writes prefixes to files.
_WRITES_BACK = "write-back", CROWDED, "--hicache-write-policy write_back"
WRITE_BACK = HOST_TIER.having(*_WRITES_BACK).for_long_runs()
ON_DISK = HOST_TIER.having(
    "disk",
    CROWDED,
    "--hicache-storage-backend file --hicache-storage-prefetch-policy wait_complete",
    '--hicache-storage-backend-extra-config {"prefetch_threshold":16}',
).for_long_runs()
#: Selects by bounds of keys that the host had.
QUEST_HOST_TIER = HOST_TIER.having(
    *("quest", PAGED_READS, PAGE16, POLICY, QUEST_POLICY), "--disable-overlap-schedule"
).for_long_runs()
_LATENT = _of("deepseek_v3", "write-back", *WRITE_BACK.flags, **dict(WRITE_BACK.env))
#: Windows come back from the host, too.
_TIERED_WINDOWS = _of("gpt_oss", "tier", *HOST_TIER.flags).having(
    "", **{WAITS: "1", **_plugins("host_tier", "sinks")}
)
HOST_TIERS = (
    *(HOST_TIER, WRITE_BACK, ON_DISK, _LATENT.for_long_runs()),
    *(_TIERED_WINDOWS.for_long_runs(), _TIERED_WINDOWS.having(*_WRITES_BACK).for_long_runs()),
)

#: A PD pair: a prefill server of stock SGLang, and a decode server that shares as CORRECTED does. They hand the
#: KV of prompts over in files. SGLang's prefill server uses a CUDA event with the overlap schedule.
_PAIR = "--dtype float32 --disaggregation-transfer-backend mori --disaggregation-mode"
_PAIRED = {
    WAITS: "1",
    **_plugins("host_tier", "handing_over"),
}
PREFILLS = STOCK.having("prefills", _PAIR, "prefill --disable-overlap-schedule", **_PAIRED)
_DECODES = SHARED.having("decodes", _PAIR, "decode --enable-metrics", **_PAIRED)
#: SGLang copies retracted requests as tensors. DECODES_SHORT has slots for three responses, and SGLang copies
#: retracted requests to a host pool, which hardly has room for one: the plugin copies the others.
_TENSORS = "--disaggregation-decode-retraction-backup cpu_tensor"
_POOL = "--hicache-io-backend direct --hicache-mem-layout layer_first"
DECODES = _DECODES.having("retracting", *EAGER, _TENSORS, **retracting(90)).for_long_runs()
DECODES_SHORT = _DECODES.having(
    *("short", *SOON, _POOL, "--hicache-ratio 0.25"),
    "--max-total-tokens 1500 --num-reserved-decode-tokens 32",
)
#: In pages, SGLang's host pool would copy whole ones.
DECODES_PAGES = PAGES.having(
    *("decodes", _PAIR, "decode", _POOL), **{**_PAIRED, **retracting(90)}
).for_long_runs()
DECODES_CACHED = _DECODES.having(
    *("cached", *SOON, _TENSORS, "--disaggregation-decode-enable-radix-cache"),
    "--max-total-tokens 1800 --num-reserved-decode-tokens 32",
).for_long_runs()

PREFILLS_PAGES = replace(STOCK, name="qwen3", model="qwen3").having(
    *("prefills", PAGE16, _PAIR, "prefill --disable-overlap-schedule"), **_PAIRED
)
#: Windows have a pool of their own, of which only the last window is handed over.
_WINDOWS_PAIRED = {**_PAIRED, **UNCOMPILED, **_plugins("host_tier", "handing_over", "sinks")}
WINDOWS_PREFILLS = replace(STOCK, name="gpt_oss", model="gpt_oss").having(
    *("prefills", "--moe-runner-backend triton", PAGED_READS, _PAIR),
    "prefill --disable-overlap-schedule",
    **{**_importing("gpt_oss"), **_WINDOWS_PAIRED},
)
WINDOWS_DECODES = (
    at_once("gpt_oss")
    .having("decodes", _PAIR, "decode", _TENSORS, **{**_WINDOWS_PAIRED, **retracting(90)})
    .for_long_runs()
)
#: In pages SGLang allocates slots in the window pool for that window only.
WINDOWS_PAGES_PREFILLS = WINDOWS_PREFILLS.having("page16", PAGE16)
WINDOWS_PAGES_DECODES = (
    at_once("gpt_oss")
    .having(
        *("page16-decodes", PAGE16, _PAIR, "decode", _POOL),
        **{**_WINDOWS_PAIRED, **retracting(90)},
    )
    .for_long_runs()
)
#: SGLang's own transfer engine, over loopback: threads of the prefill server write into the pool of the other.
BOOTSTRAP_PORT = 8998
_MOONCAKE = "--dtype float32 --disaggregation-transfer-backend mooncake --disaggregation-mode"
_OVER_TCP = {
    **{"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "SGLANG_HOST_IP": "127.0.0.1"},
    **{WAITS: "1", "REASONCACHE_FORK": "", **_plugins("host_tier")},
}
MOONCAKE_PREFILLS = STOCK.having(
    *("mooncake-prefills", _MOONCAKE, "prefill --disable-overlap-schedule"),
    f"--disaggregation-bootstrap-port {BOOTSTRAP_PORT}",
    **_OVER_TCP,
)
MOONCAKE_DECODES = SHARED.having(
    *("mooncake-decodes", *EAGER, _MOONCAKE, "decode", _TENSORS),
    **{**_OVER_TCP, **retracting(90)},
).for_long_runs()
#: Prefixes stay cached on the decode server, so the prefill server sends the rest of a prompt only.
MOONCAKE_DECODES_CACHED = SHARED.having(
    *("mooncake-cached", *SOON, _MOONCAKE, "decode", _TENSORS),
    "--disaggregation-decode-enable-radix-cache",
    "--max-total-tokens 1800 --num-reserved-decode-tokens 32",
    **_OVER_TCP,
).for_long_runs()
PREFILLS_ON_TWO_RANKS = PREFILLS.having("tp2", "--tp 2", **TWO_CORES)
DECODES_ON_TWO_RANKS = DECODES_SHORT.having("tp2", "--tp 2", **TWO_CORES).for_long_runs()

#: Servers that speculate: NGRAM drafts trees of tokens that followed equal tokens before, STANDALONE drafts
#: chains by a model, here the served model itself.
_SPECULATES = {
    WAITS: "1",
    **_plugins("speculating"),
}
_BY_NGRAMS = (
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6",
    "--speculative-ngram-max-bfs-breadth 4",
)
_CHAINS = (
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
    "--speculative-algorithm"
)
_CHAINS_BY_MODEL = f"{_CHAINS} STANDALONE"
_BY_MODEL = f"{_CHAINS_BY_MODEL} --speculative-draft-model-path {CHECKPOINT}"
#: SGLang copies a draft model's KV to the host with the served model's.
DRAFTS_HOST_TIER = HOST_TIER.having(
    "drafts",
    *EAGER,
    _BY_MODEL,
    **{
        **UNCOMPILED,
        **_plugins("host_tier", "speculating"),
    },
).for_long_runs()
NGRAMS = SHARED.having("ngrams", FP32, *EAGER, *_BY_NGRAMS, **_SPECULATES)
DRAFTS = SHARED.having("drafts", FP32, *EAGER, _BY_MODEL, **_SPECULATES).for_long_runs()
#: A head drafts, which reads the outputs of three layers. Nearly all its drafts are rejected.
EAGLE3 = replace(
    SHARED.having(
        "eagle3",
        *(FP32, *EAGER, f"{_CHAINS} EAGLE3"),
        **_SPECULATES,
        **_importing("qwen3", "qwen2", "llama", "llama_eagle3"),
    ),
    draft=tiny_models.EAGLE3,
).for_long_runs()
#: Have slots for a few responses, so that SGLang retracts requests between two verifications.
NGRAMS_SHORT = SHARED.having(
    "ngrams-short", FP32, *SOON, *_BY_NGRAMS, TIGHT, CROWDED, **_SPECULATES, **retracting(25)
).for_long_runs()
DRAFTS_SHORT = SHARED.having(
    "drafts-short", FP32, *SOON, _BY_MODEL, TIGHT, CROWDED, **_SPECULATES, **retracting(25)
).for_long_runs()
#: DeepSeek's layer of multi-token prediction drafts. Latent rows are verified.
_BY_MTP = f"{_CHAINS} NEXTN"
_MTP_MODULES = _importing("deepseek_v2", "deepseek_nextn")
MTP = at_once("deepseek_v3").having("mtp", _BY_MTP, **_SPECULATES, **_MTP_MODULES).for_long_runs()
#: Hybrid models: SGLang keeps a state for each drafted token until it knows which are accepted.
_WITH_STATES = _plugins("state_layers", "speculating")
_QWEN_MTP = _importing("qwen3_5_text", "qwen3_5_mtp")
STATES_NGRAMS = at_once("qwen3_5_text").having("ngrams", *_BY_NGRAMS, **_WITH_STATES)
STATES_MTP = (
    at_once("qwen3_5_text").having("mtp", _BY_MTP, **_WITH_STATES, **_QWEN_MTP).for_long_runs()
)
STATES_MTP_SHORT = (
    short("qwen3_5_text").having("mtp", _BY_MTP, **_WITH_STATES, **_QWEN_MTP).for_long_runs()
)
#: SGLang copies states at every 64 tokens, so that what was computed before is cached.
STATES_COPIED = STATES_MTP.having(
    "copied", "--mamba-radix-cache-strategy extra_buffer --mamba-track-interval 64"
).for_long_runs()
#: With the overlap schedule, with which SGLang copies states while a later step runs.
STATES_OVERLAPPED = [
    _overlapped(at_once("qwen3_5_text"))
    .having(name, f"--mamba-radix-cache-strategy {name} --mamba-track-interval 64")
    .for_long_runs()
    for name in ("extra_buffer", "extra_buffer_lazy")
]
#: As most public recipes for Qwen3.5 do: pages, and no prefix cache.
STATES_PAGES = STATES_MTP.having("page64", "--page-size 64 --disable-radix-cache").for_long_runs()
STATES_PAGES_SHORT = STATES_MTP_SHORT.having(
    "page16", PAGE16, "--disable-radix-cache --max-total-tokens 800"
).for_long_runs()
#: Models with sliding windows. Those of gpt-oss have a pool of their own, and so have those of its draft model.
WINDOWS_NGRAMS = at_once("gemma3_text").having("ngrams", *_BY_NGRAMS, **_plugins("speculating"))
_WITH_SINKS = _plugins("sinks", "speculating")
POOL_NGRAMS = at_once("gpt_oss").having("ngrams", *_BY_NGRAMS, **_WITH_SINKS)
POOL_DRAFTS = replace(
    at_once("gpt_oss").having("drafts", _CHAINS_BY_MODEL, **_WITH_SINKS), draft="gpt_oss"
)
#: As gpt-oss is often served. The head has no windows, and all its KV.
POOL_EAGLE3 = replace(
    at_once("gpt_oss").having(
        "eagle3",
        f"{_CHAINS} EAGLE3",
        **_WITH_SINKS,
        **_importing("gpt_oss", "llama", "llama_eagle3"),
    ),
    draft=tiny_models.EAGLE3_OF_WINDOWS,
).for_long_runs()
#: MiMo's own way: three layers draft a token each, all with windows. SGLang makes a draft model of each layer.
_BY_LAYERS = f"{_CHAINS} EAGLE"
_LAYERS = {
    "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH": "1",
    **_plugins("speculating"),
    **_importing("mimo_v2", "mimo_v2_nextn"),
}
LAYERS_DRAFT, LAYERS_DRAFT_SHORT = (
    make("mimo_v2_flash").having("layers", _BY_LAYERS, **_LAYERS).for_long_runs()
    for make in (at_once, short)
)
WINDOWS_SPECULATING = [spec.for_long_runs() for spec in (WINDOWS_NGRAMS, POOL_NGRAMS, POOL_DRAFTS)]
WINDOWS_SPECULATING += [POOL_EAGLE3, LAYERS_DRAFT]
WINDOWS_SPECULATING_SHORT = [
    LAYERS_DRAFT_SHORT,
    short("gemma3_text").having("ngrams", *_BY_NGRAMS, **_plugins("speculating")).for_long_runs(),
    short("gpt_oss").having("ngrams", *_BY_NGRAMS, **_WITH_SINKS).for_long_runs(),
    replace(
        short("gpt_oss").having("drafts", _CHAINS_BY_MODEL, **_WITH_SINKS), draft="gpt_oss"
    ).for_long_runs(),
]
OTHER_STATES = [
    at_once(model).having("ngrams", *_BY_NGRAMS, **_WITH_STATES).for_long_runs()
    for model in ("kimi_linear", "granitemoehybrid")
]
OTHER_STATES.append(
    at_once("qwen3_next")
    .having("mtp", _BY_MTP, **_WITH_STATES, **_importing("qwen3_next", "qwen3_next_mtp"))
    .for_long_runs()
)
#: The same in two groups of DP attention, a rank with a core each. SGLang pads their verifications.
MTP_GROUPS = MTP.having(
    "groups",
    "--enable-dp-attention --tp 2 --dp-size 2",
    **_plugins("attention_groups", "speculating"),
    **TWO_CORES,
).for_long_runs()
#: The same with a hybrid model, in pages and without a prefix cache.
STATES_GROUPS = STATES_MTP.having(
    "groups",
    f"--enable-dp-attention --tp 2 --dp-size 2 --disable-radix-cache {PAGE16}",
    **_plugins("attention_groups", "state_layers", "speculating"),
    **TWO_CORES,
).for_long_runs()
#: A PD pair of servers that speculate. Prefills write the KV of the draft layer, too.
_MTP_PAIRED = {
    **UNCOMPILED,
    **_MTP_MODULES,
    **_PAIRED,
    **_plugins("host_tier", "handing_over", "speculating"),
}
MTP_PREFILLS = replace(STOCK, name="mtp", model="deepseek_v3").having(
    "prefills", _BY_MTP, _PAIR, "prefill --disable-overlap-schedule", **_MTP_PAIRED
)
MTP_DECODES = MTP.having("decodes", _PAIR, "decode", _TENSORS, **_MTP_PAIRED).for_long_runs()
#: The same with a hybrid model. Its states are handed over, too, and go to the host at retractions.
_STATES_PAIRED = {
    **UNCOMPILED,
    **_QWEN_MTP,
    **_PAIRED,
    **_plugins("host_tier", "handing_over", "state_layers", "speculating"),
}
STATES_PREFILLS = replace(STOCK, name="qwen3_5_text", model="qwen3_5_text").having(
    *("prefills", _BY_MTP, _PAIR, "prefill --disable-overlap-schedule"),
    "--mamba-radix-cache-strategy no_buffer --max-mamba-cache-size 500",
    **{**dict(STATES_MTP.env), **_STATES_PAIRED},
)
#: As public recipes for DeepSeek and Qwen do: MTP and pages on both servers.
MTP_PAGES_PREFILLS = MTP_PREFILLS.having("page16", PAGE16)
MTP_PAGES_DECODES = MTP_DECODES.having("page16", PAGE16, **retracting(90)).for_long_runs()
#: A model that drafts by several layers, whose windows have pools of their own.
_LAYERS_PAIRED = {
    **_LAYERS,
    **UNCOMPILED,
    **_PAIRED,
    **_plugins("host_tier", "handing_over", "speculating"),
}
LAYERS_PREFILLS = replace(STOCK, name="mimo_v2_flash", model="mimo_v2_flash").having(
    "prefills",
    *(_BY_LAYERS, PAGED_READS, _PAIR, "prefill --disable-overlap-schedule"),
    **_LAYERS_PAIRED,
)
LAYERS_DECODES = LAYERS_DRAFT.having(
    "decodes", _PAIR, "decode", _TENSORS, **{**_LAYERS_PAIRED, **retracting(90)}
).for_long_runs()
STATES_DECODES = STATES_MTP.having(
    "decodes", _PAIR, "decode", _TENSORS, **_STATES_PAIRED, **retracting(40)
).for_long_runs()
#: In two groups of DP attention, and, as most public recipes for DeepSeek do, also with MTP. One rank prefills.
GROUPS_PREFILLS = replace(STOCK, name="qwen3_moe", model="qwen3_moe").having(
    "prefills", _PAIR, "prefill --disable-overlap-schedule", **_PAIRED
)
GROUPS_DECODES = GROUPS.having(
    *("decodes", _PAIR, "decode", _TENSORS, "--disable-overlap-schedule"),
    **{
        **_plugins("host_tier", "handing_over", "attention_groups"),
        **retracting(90),
    },
).for_long_runs()
MTP_GROUPS_DECODES = MTP_GROUPS.having(
    *("decodes", _PAIR, "decode", _TENSORS),
    **{
        **_MTP_PAIRED,
        **TWO_CORES,
        **_plugins("host_tier", "handing_over", "attention_groups", "speculating"),
    },
).for_long_runs()
MTP_PAGES = MTP.having("page16", PAGE16).for_long_runs()
DRAFT_PAGES = DRAFTS.having("page16", PAGE16, *EAGER).for_long_runs()
SPECULATING = (NGRAMS, DRAFTS, EAGLE3, DRAFT_PAGES, *map(on_two_ranks, (NGRAMS, DRAFTS)))
SPECULATING_SHORT = (NGRAMS_SHORT, DRAFTS_SHORT, *map(on_two_ranks, (NGRAMS_SHORT, DRAFTS_SHORT)))

#: How much log-probabilities of the tests' models may differ if fp16 rounds them (measured on a CPU: 0.0053).
OF_FP16 = 0.02
FP16 = SHARED.having("fp16", *EAGER, "--dtype float16", **WAITING).for_long_runs()
FP8 = SHARED.having("fp8", TIGHT, CROWDED, *EAGER, "--kv-cache-dtype fp8_e4m3").for_long_runs()

SHARING = (EXACT, ACROSS, PAGED)
EVICTORS = (EVICTING_PAGES, SHARING_AND_EVICTING)
EVERY_KIND = (*SHARING, *EVICTORS, EVICTING_PROMPTS, RKV)
