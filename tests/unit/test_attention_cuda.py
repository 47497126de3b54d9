# SPDX-License-Identifier: Apache-2.0
"""Our mixin for CUDA, tested over a CPU backend. ``test_attention_cuda_graph.py`` tests the mixin over SGLang's
Triton backend and in graphs. A *shifted* slot is read at a position that its key was not rotated for."""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups import model_override_base, resolution_hooks
from sglang.srt.environ import envs
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.platforms.cuda import CudaSRTPlatform
from sglang.srt.runtime_context import get_exec, override_platform

from sglang_reasoncache import compat
from sglang_reasoncache.attention import warm_up
from sglang_reasoncache.attention.backend import PagedBackend
from sglang_reasoncache.attention.paged import PagedAttention
from sglang_reasoncache.attention.paged_cuda import SharedSlotReads
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.plugin import attention, graph_votes, hooks, refusals
from tests.flash_attention import import_backend
from tests.unit.attention_rig import BATCHES, Rig, mark
from tests.unit.test_attention import backend_of

import_backend()

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform", "few_objects")


@pytest.mark.parametrize("known", ["as cached", "as cached, evicted", "never shared", "marked"])
@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_a_forward_without_shifted_slots_is_sglangs_own(new: list[int], known: str) -> None:
    """The result equals SGLang's, bit for bit. Rows have shifted slots, but a batch's mark and the allocator's
    flags decide which kernels run. If keys are read as cached, only evicted positions need our kernels."""
    rig = Rig(shifted=0.5, dtype=torch.bfloat16)
    corrected = not known.startswith("as cached")
    backend = backend_of("cuda", rig, corrected)
    assert corrected or backend.paged.rotations is None
    cached_at = rig.cached_at.positions.clone()
    rig.allocator.has_evicted = known == "as cached, evicted"
    rig.allocator.has_shifted_slots = known != "never shared"
    batch = rig.batch(new)
    if known in ("as cached, evicted", "marked"):
        mark(batch, False)
    ours = rig.forward(backend, batch)
    assert corrected or torch.equal(rig.cached_at.positions, cached_at)
    assert torch.equal(ours, rig.forward(TorchNativeAttnBackend(rig.runner), batch))


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300]], ids=["decode", "extend"])
def test_a_mark_survives_the_copies_sglang_makes_of_a_batch(new: list[int]) -> None:
    """A copied batch keeps its mark. A prefill graph may run only batches marked as having no shifted slots."""
    rig = Rig(shifted=0.5)
    backend = backend_of("cuda", rig)
    batch = rig.batch(new)
    assert not backend.can_run_prefill_cuda_graph(batch)
    mark(batch, False)
    assert backend.can_run_prefill_cuda_graph(batch)
    copied = dataclasses.replace(batch, positions=batch.positions.clone())
    stock = rig.forward(TorchNativeAttnBackend(rig.runner), batch)
    assert torch.equal(rig.forward(backend, copied), stock)
    # A new batch of the same requests has no mark.
    rig.check(backend, dataclasses.replace(batch, rids=list(batch.rids)))


@pytest.mark.parametrize(("name", "latent"), attention.STOCK)
def test_sglangs_backend_is_behind_ours(
    name: str, latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our class inherits SGLang's attributes that we do not override, such as flags that SGLang reads."""
    made: Any = attention.backend_class(name, latent)
    made_by = compat.ATTENTION_BACKENDS[name]
    stock = getattr(compat, attention.STOCK[name, latent])
    if not latent or name != "flashinfer":
        assert stock.__name__ in inspect.getsource(made_by)
    assert made.__mro__[1:4] == (SharedSlotReads, PagedBackend, stock)
    assert made.one_window == (name in ("flashinfer", "triton"))
    assert made.verifies_windows == (name != "flashinfer")
    theirs = {attribute for attribute in vars(stock) if not attribute.startswith(("__", "_abc_"))}
    for attribute in theirs - vars(SharedSlotReads).keys() - vars(PagedBackend).keys():
        assert getattr(made, attribute) is getattr(stock, attribute)

    # Devices other than NVIDIA GPUs are refused.
    over = f"--x y over --attention-backend {name} needs an NVIDIA GPU"
    runner = Rig(shifted=0.0).runner
    with pytest.raises(ValueError, match=f"{over}, this server runs on cpu"):
        attention.make_cuda(runner, name, None, ReasonCacheConfig(), requested_by="--x y")
    runner.device = "cuda:0"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match=rf"{over}, this server runs on cuda:0 \(ROCm\)"):
        attention.make_cuda(runner, name, None, ReasonCacheConfig(), requested_by="--x y")


@pytest.mark.parametrize("field", refusals.CORRECTED_CONFLICTS)
def test_flags_in_the_way_are_named(field: str) -> None:
    args = compat.ServerArgs(model_path="none", device="cpu")
    if not hasattr(args, field):
        pytest.skip("a later SGLang has this flag")
    flag = field.replace("_", "-")
    refusals.refuse("--x y", refusals.in_the_way_of_corrected(args))
    assert getattr(args, field) is False
    setattr(args, field, True)
    with pytest.raises(ValueError, match=f"--x y cannot be combined with: --{flag} "):
        refusals.refuse("--x y", refusals.in_the_way_of_corrected(args))
    # A field that SGLang itself switched on is refused as well.
    switched = compat.ServerArgs(model_path="none", device="cpu")
    compat.declare_resolution(switched, "a test", **{field: True})
    assert len(refusals.in_the_way_of_corrected(switched)) == 1


@pytest.mark.parametrize("name", refusals.CORRECTED_VARIABLES)
def test_variables_in_the_way_are_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A variable is listed if SGLang reads its value as true, even if SGLang itself set the variable."""
    for word in ("1", "true", "YES", "y", "0", "no"):
        monkeypatch.setenv(name, word)
        found = refusals.in_the_way_of_corrected(SimpleNamespace())
        assert bool(found) == getattr(envs, name).get()
        assert not found or found[0].startswith(f"{name} (")
    monkeypatch.delenv(name)
    getattr(envs, name).set(True)
    assert len(refusals.in_the_way_of_corrected(SimpleNamespace())) == 1


#: GPU -> compute capability, and the predicates of SGLang that are true for this GPU.
GPUS: dict[str, tuple[int, list[str]]] = {
    "ampere": (80, []),
    "hopper": (90, ["is_sm90", "is_hopper_with_cuda_12_3"]),
    "b200": (100, ["is_sm100", "is_sm100_or_sm110", "is_blackwell"]),
    "rtx": (120, ["is_sm120", "is_blackwell"]),
    "rocm": (94, ["is_hip"]),
}


def resolved(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    gpu: str,
    config: ReasonCacheConfig | None,
    **fields: Any,
) -> Any:
    """The flags of a server on ``gpu`` as SGLang resolves them. ``fields``: of ``ServerArgs``."""
    monkeypatch.setitem(
        resolution_hooks._HOOKS, compat.ATTENTION_STEP, [hooks._around_attention_default]
    )
    # The tests run on our CPU platform, which has another default backend than CUDA.
    monkeypatch.setattr(model_override_base, "current_platform", CudaSRTPlatform())
    capability, true = GPUS[gpu]
    facts = dict.fromkeys(runtime_context._PLATFORM_PROBES, False)
    facts |= dict.fromkeys(true, True) | {"is_cuda": gpu != "rocm", "has_flashinfer": True}
    args: Any = compat.ServerArgs(model_path=str(model), device="cuda", **fields)
    if config is not None:
        args._reasoncache = config
    at = divmod(capability, 10)
    with override_platform(**facts, device_sm=capability, device_capability=at):
        args.resolve_once()
    return compat.resolving_view(args)


#: Fields of a model's config.json.
MLA = dict(kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"learnable_sink": True},
    "windows": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "latent": {"architectures": ["DeepseekV2ForCausalLM"], **MLA},
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_sglangs_own_backend_stays_and_is_one_that_we_extend(
    model: str,
    gpu: str,
    monkeypatch: pytest.MonkeyPatch,
    model_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The flag changes no backend and no page size. On NVIDIA GPUs each server's default can rotate keys."""
    shape = json.loads((model_path / "config.json").read_text()) | MODELS[model]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    found = []
    for config in (None, ReasonCacheConfig()):
        view = resolved(monkeypatch, tmp_path, gpu, config)
        found.append((*model_override_base.attention_backends_of(view), view.page_size))
    assert found[0] == found[1]
    assert not [line for line in caplog.messages if line.startswith("reasoncache")]
    prefill, decode, _ = found[0]
    assert gpu == "rocm" or (prefill == decode and decode in compat.CUDA_BACKENDS)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({}, {}, "triton"),
        ({"speculative_draft_attention_backend": "flashinfer"}, {}, "flashinfer"),
        ({"attention_backend": "flashinfer", "page_size": 64}, {}, None),
        ({"attention_backend": "fa3"}, {}, None),
        ({"attention_backend": "fa3", "page_size": 64}, {}, "triton"),
        # Nothing is shared between two backends.
        (
            {
                "attention_backend": "fa3",
                "prefill_attention_backend": "flashinfer",
                "page_size": 64,
            },
            {},
            None,
        ),
        ({}, {"percentile": 0}, None),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, {}, None),
    ],
)
def test_a_draft_model_looks_up_slots_where_the_model_looks_up_pages(
    fields: dict[str, Any],
    settings: dict[str, Any],
    expected: str | None,
    windows: bool,
    monkeypatch: pytest.MonkeyPatch,
    model_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A page of a row that shares may name slots of several pages. Without a setting that shares, and where the
    operator names a draft backend, nothing changes."""
    drafts = dict(speculative_draft_model_path=str(model_path), speculative_num_steps=2)
    drafts |= dict(speculative_eagle_topk=1, speculative_num_draft_tokens=3)
    fields = {"speculative_algorithm": "STANDALONE", **drafts, **fields}
    caplog.set_level("INFO")
    given = fields.get("attention_backend"), fields.get("prefill_attention_backend")
    if windows and "flashinfer" in given:
        pytest.skip("SGLang refuses FlashInfer for gpt-oss")
    if windows:
        shape = json.loads((model_path / "config.json").read_text())
        shape |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
        shape |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}
        (tmp_path / "config.json").write_text(json.dumps(shape))
        model_path = tmp_path
    view = resolved(monkeypatch, model_path, "b200", ReasonCacheConfig(**settings), **fields)
    assert view.speculative_draft_attention_backend == expected
    told = [line for line in caplog.messages if "--speculative-draft-attention-backend" in line]
    assert bool(told) == (expected == "triton")


@pytest.mark.parametrize("given", [None, 512])
def test_a_draft_model_with_latent_attention_takes_little_memory(
    given: int | None, monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    """SGLang's Triton backend has buffers for 256 parts of a row there, unless a part has a least size."""
    shape = json.loads((model_path / "config.json").read_text()) | MODELS["latent"]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    drafts = dict(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(tmp_path))
    steps = dict(speculative_num_steps=2, speculative_eagle_topk=1, speculative_num_draft_tokens=3)
    fields: dict[str, Any] = {**drafts, **steps, "attention_backend": "trtllm_mla"}
    fields["triton_attention_split_tile_size"] = given
    view = resolved(monkeypatch, tmp_path, "b200", ReasonCacheConfig(), **fields)
    assert view.attention_backend == "trtllm_mla"
    assert view.speculative_draft_attention_backend == "triton"
    assert view.triton_attention_split_tile_size == (given or 4096)


@pytest.mark.parametrize(("decode", "works"), [("flashinfer", True), ("flashmla", False)])
def test_two_backends_are_told_of_one_that_serves(decode: str, works: bool) -> None:
    """SGLang chooses two for Qwen3-VL on an H100."""
    runner: Any = SimpleNamespace(prefill_attention_backend_str="fa3")
    runner.decode_attention_backend_str = decode
    with pytest.raises(ValueError, match=f"one attention backend.*got fa3 and {decode}") as told:
        attention._corrected(runner, "fa3", None, ReasonCacheConfig())  # type: ignore[arg-type]
    assert str(told.value).endswith("; with --attention-backend fa3 it works") == works


@pytest.mark.parametrize("ours", [False, True])
def test_a_model_writes_keys_itself_only_by_sglangs_plan(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = attention.backend_class("fa3")
    monkeypatch.setattr(
        compat.FlashAttentionBackend,
        "get_fused_kv_write_buffers",
        lambda *_: "buffers",
        raising=False,
    )
    backend: Any = object.__new__(kind)
    backend.paged = SimpleNamespace(rows=object() if ours else None)
    assert backend.get_fused_kv_write_buffers(None, None) == (None if ours else "buffers")


#: Public methods of SGLang's backends that read the plan of the current forward. Our forwards replace them, but
#: for ``stage_draft_extend_metadata``, which is a draft model's.
READ_PLANS = {"forward_decode", "forward_extend", "get_fused_kv_write_buffers"}
READ_PLANS |= {"stage_draft_extend_metadata"}


def test_no_other_method_of_sglangs_backends_reads_the_plan() -> None:
    """In a forward of our kernels SGLang's backend has no plan, or that of an earlier forward."""
    found = set()
    for name in set(attention.STOCK.values()):
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(compat, name))))
        for method in ast.walk(tree):
            if not isinstance(method, ast.FunctionDef) or method.name.startswith(("_", "init_")):
                continue
            reads = (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and node.attr.startswith("forward_")
                and node.attr.endswith("metadata")
                for node in ast.walk(method)
            )
            if any(reads):
                found.add(method.name)
    assert {"forward_decode", "forward_extend"} <= found <= READ_PLANS


EVICTS = "streamingllm:budget=64"
STOCK: Any = object()


def chosen(
    runner: Any, name: str = "triton", cached: CachedPositions | None = None, **settings: Any
) -> tuple[Any, attention.AttentionParts, ReasonCacheConfig]:
    """The chosen backend (:data:`STOCK` stands for SGLang's), its ``AttentionParts``, and the settings."""
    config = ReasonCacheConfig(**settings)
    cached = cached or CachedPositions(1, "cpu")
    found = attention.attention_backend(runner, config, name, lambda _runner: STOCK, cached)
    return *found, config


@pytest.mark.parametrize("page", [1, 16])
def test_rows_that_share_as_cached_need_our_kernels_at_page_sizes_above_1(
    page: int, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's kernels may look up only the first slot of each page, so other backends share nothing."""
    rig = Rig(shifted=0.0)
    rig.pool.page_size = page
    runner = rig.runner
    assert PagedAttention(runner, None).reads_shared == (page > 1)
    for backend, parts, why in (
        ("fa4", attention.AttentionParts(), "this server runs fa4"),
        ("triton", None, "needs an NVIDIA GPU"),
        ("triton", attention.AttentionParts(serves_policies=True), None),
    ):
        runner.prefill_attention_backend_str = runner.decode_attention_backend_str = backend
        config = ReasonCacheConfig(positions="as-cached")
        parts = parts or chosen(runner, backend, positions="as-cached")[1]
        found, reason = attention.resolve_positions(config, parts, runner)
        shares = page == 1 or why is None
        assert (found.shares, reason is None, found.positions) == (shares, shares, "as-cached")
        if not shares:
            assert str(why) in str(reason) and "--page-size above 1" in str(reason)
            assert f"nothing is shared, because: {reason}" in caplog.messages[-1]


@pytest.mark.parametrize("flag", ["enable_deterministic_inference", "rl_on_policy_target"])
def test_keys_without_positions_are_not_shared_where_inference_is_deterministic(flag: str) -> None:
    """They need no rotation, so nothing else would refuse them."""
    runner = Rig(shifted=0.0).runner
    runner.prefill_attention_backend_str = runner.decode_attention_backend_str = "triton"
    runner.server_args = SimpleNamespace(
        **{"enable_deterministic_inference": False, "rl_on_policy_target": None, flag: "fsdp"}
    )
    config = ReasonCacheConfig(positions="as-cached")
    found, reason = attention.resolve_positions(config, attention.AttentionParts(), runner)
    assert not found.shares and str(reason).startswith("--" + flag.replace("_", "-"))


@pytest.mark.parametrize("positions", ["auto", "as-cached"])
def test_a_policy_that_evicts_asks_for_our_kernels(positions: str) -> None:
    """Without an evicting policy SGLang's backend is used. Policies over two backends are refused later."""
    runner = Rig(shifted=0.0).runner
    runner.prefill_attention_backend_str = "triton"

    def made(policy: str) -> str:
        """Check that SGLang's backend serves; return why keys are not corrected."""
        backend, parts, _ = chosen(runner, policy=policy, positions=positions)
        assert backend is STOCK
        assert parts == attention.AttentionParts(uncorrected=parts.uncorrected)
        return parts.uncorrected

    assert ("needs an NVIDIA GPU" in made("reasoncache")) == (positions == "auto")
    flag = f"--reasoncache-policy {re.escape(EVICTS)}"
    with pytest.raises(ValueError, match=f"{flag} over --attention-backend triton needs"):
        made(EVICTS)
    runner.prefill_attention_backend_str = "flashinfer"
    assert ("got flashinfer and triton" in made(EVICTS)) == (positions == "auto")


def test_auto_is_corrected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(shifted=0.0)
    rig.runner.prefill_attention_backend_str = "triton"

    def on_the_cpu(runner: Any, _name: str, cached: Any, _config: Any, *, requested_by: str) -> Any:
        assert (runner, cached) == (rig.runner, rig.cached_at)
        assert requested_by == "--reasoncache-positions corrected"
        return backend_of("cuda", rig)

    monkeypatch.setattr(attention, "make_cuda", on_the_cpu)
    backend, parts, config = chosen(rig.runner, cached=rig.cached_at)
    assert backend is not STOCK and parts.rotations is not None and not parts.uncorrected
    assert attention.resolve_positions(config, parts, rig.runner)[0].positions == "corrected"
    assert not caplog.messages


@pytest.fixture
def no_decode_graphs(published_config: None) -> Iterator[None]:
    off = CudaGraphConfig(decode=PhaseConfig(backend="disabled"))
    with get_exec().graph.override(cuda_graph_config=off):
        yield


@pytest.mark.usefixtures("no_decode_graphs")
@pytest.mark.parametrize("at", ["__init__", "warm_up", "install"])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ImportError], ids=["memory", "library"])
def test_auto_goes_on_where_ours_fails(
    kind: type[Exception], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If our backend fails, ``auto`` frees it and uses SGLang's. Other requests for ours raise ValueError."""
    rig = Rig(shifted=0.0)
    rig.runner.prefill_attention_backend_str = "triton"
    rig.runner.device = "cuda"
    made: list[weakref.ref[Any]] = []

    def fails(*_: Any, **__: Any) -> None:
        raise kind("none\nleft")

    def make(*_: Any, **__: Any) -> Any:
        backend = backend_of("cuda", rig)
        # ``make_cuda`` requires our Triton kernels, which are chosen only on a GPU.
        backend.paged.backend = "triton"
        made.append(weakref.ref(backend))
        return backend

    first = fails if at == "__init__" else make
    monkeypatch.setattr(attention, "backend_class", lambda *_: first)
    compiled = fails if at == "warm_up" else lambda *_: None
    monkeypatch.setattr(warm_up, "compile_attention", compiled)
    monkeypatch.setattr(graph_votes, "install", fails)
    warned = list[str]()
    # Pytest's log handler would keep the traceback, and with it the backend.
    monkeypatch.setattr(attention.logger, "warning", lambda *args, exc_info: warned.append(args[1]))
    told = f"{kind.__name__}: none left"
    why = f"--reasoncache-positions corrected over --attention-backend triton failed .*: {told}"
    backend, found, _ = chosen(rig.runner, cached=rig.cached_at)
    assert backend is STOCK
    assert found.rotations is None and re.fullmatch(why, found.uncorrected)
    assert warned == [found.uncorrected] and len(made) == (at != "__init__")
    assert all(backend() is None for backend in made)
    with pytest.raises(ValueError, match=why):
        chosen(rig.runner, cached=rig.cached_at, positions="corrected")
    flag = f"--reasoncache-policy {EVICTS}"
    with pytest.raises(ValueError, match=f"{flag} over --attention-backend triton failed .*{told}"):
        chosen(rig.runner, cached=rig.cached_at, policy=EVICTS)


@pytest.mark.parametrize(
    ("backend", "fields", "why"),
    [
        ("fa4", {}, "needs --attention-backend .*flashinfer, triton, .*, this server runs fa4"),
        ("fa4", {"enable_mis": True}, "cannot be combined with: --enable-mis "),
        ("triton", {}, "over --attention-backend triton needs an NVIDIA GPU"),
    ],
)
def test_auto_says_why_it_is_not_corrected(
    backend: str, fields: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``auto`` nothing is shared, and the log says why. ``corrected`` raises ValueError."""
    runner = Rig(shifted=0.0).runner
    runner.server_args = compat.ServerArgs(model_path="none", **fields)
    runner.prefill_attention_backend_str = runner.decode_attention_backend_str = backend

    def settled(asked: str) -> tuple[str, bool]:
        config = ReasonCacheConfig(positions=asked)
        parts = attention.AttentionParts()
        if backend in compat.CUDA_BACKENDS:
            parts = chosen(runner, backend, positions=asked)[1]
        found, reason = attention.resolve_positions(config, parts, runner)
        assert (reason is None) == found.shares
        return found.positions, found.shares

    assert settled("as-cached") == ("as-cached", True) and not caplog.messages
    assert settled("auto") == ("as-cached", False)
    (told,) = caplog.messages
    assert re.search(f"nothing is shared, .*corrected {why}.*as-cached .*30 points", told)
    with pytest.raises(ValueError, match=f"--reasoncache-positions corrected {why}"):
        settled("corrected")


def test_where_nothing_rotates_keys_no_loss_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Reading such keys as cached may be exact. What it cost was measured with rotated keys."""
    rig = Rig(shifted=0.0)
    rig.runner.model = torch.nn.ModuleList([rig.layer])
    parts = attention.AttentionParts(uncorrected="found none; as-cached works without")
    attention.resolve_positions(ReasonCacheConfig(), parts, rig.runner)
    assert caplog.messages == [f"reasoncache: nothing is shared, because: {parts.uncorrected}"]
