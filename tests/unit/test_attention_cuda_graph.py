# SPDX-License-Identifier: Apache-2.0
"""Our mixin over SGLang's Triton backend. Each batch size has two decode graphs: one with SGLang's kernels, one
with ours, which read *shifted* slots (keys rotated for other positions). The tests need no GPU: Triton's
interpreter runs the kernels on CPU tensors, and a replay repeats the captured calls with the capture's state.
The last tests use a stand-in for a GPU (``tests/strict_device.py``): hooks and plans must not wait for it."""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import graph_variants
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
    DecodeCudaGraphRunner,
    build_replay_fb_view,
)
from sglang.srt.model_executor.runner_utils.capture_mode import _set_capture_attention_variant
from sglang.srt.runtime_context import get_exec, get_parallel
from transformers import Qwen3Config

from sglang_reasoncache import compat
from sglang_reasoncache.attention import paged
from sglang_reasoncache.attention.batch_mark import MarkedRids
from sglang_reasoncache.attention.paged_cuda import PLAIN, SHIFTED, GraphVariants
from sglang_reasoncache.attention.warm_up import compile_attention
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan_triton import PlanBuffers
from sglang_reasoncache.plugin import attention, graph_votes
from tests.eviction.test_recent_queries import assert_kept
from tests.property.world import in_host
from tests.strict_device import no_wait, on_device, strict_device
from tests.triton_runs import long_if, shrink_launches, under_interpreter
from tests.triton_runs import test_interpreted as test_interpreted
from tests.unit.attention_rig import CONTEXT, SHORT, TOLERANCE, Rig, announced, mark
from tests.unit.test_attention import REQUESTED_BY, Backend

#: Batch sizes of the captured graphs. A batch is padded to one of these sizes.
SIZES = (3, 1)

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")


def backend_over(
    name: str, rig: Rig, monkeypatch: pytest.MonkeyPatch, corrected: bool = True
) -> Any:
    """Our backend over SGLang's backend ``name``, made as when a server starts. The runner and its config
    have what all of SGLang's backends read."""
    runner = rig.runner
    runner.sliding_window_size = rig.window or None
    runner.page_size = rig.page
    runner.kv_index_translator = KVIndexTranslator(
        req_to_token=rig.rows.req_to_token,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        token_to_kv_pool=rig.pool,
        page_size=rig.page,
        device="cpu",
    )
    config = runner.model_config
    config.attention_arch = AttentionArch.MLA if rig.latent else AttentionArch.MHA
    config.head_dim = rig.query_dim
    config.kv_lora_rank = rig.v_dim
    config.get_num_kv_heads = lambda *_: rig.kv_heads
    # As on a GPU, our Triton kernels run.
    monkeypatch.setattr(paged, "PagedKv", functools.partial(PagedKv, backend="triton"))
    backend = attention.backend_class(name, rig.latent)(
        runner, rig.cached_at if corrected else None, requested_by=REQUESTED_BY
    )
    before = [buffer.clone() for buffer in rig.buffers]
    compile_attention(backend.paged)
    torch.testing.assert_close(before, rig.buffers, rtol=0, atol=0, equal_nan=True)
    return backend


def triton_backend(rig: Rig, monkeypatch: pytest.MonkeyPatch, corrected: bool = True) -> Any:
    runner = rig.runner
    rig.unread = 1
    runner.gpu_id = 0
    runner.kv_cache_dtype = rig.dtype
    runner.decode_num_tokens_per_req = lambda: 1
    config = runner.model_config
    config.hf_config = config.hf_text_config = Qwen3Config(architectures=["Qwen3ForCausalLM"])
    config.linear_attn_registry_result = None
    config.v_head_dim = config.swa_v_head_dim = rig.query_dim
    config.get_max_num_attention_heads = lambda: rig.heads
    return backend_over("triton", rig, monkeypatch, corrected)


class Graphs:
    """Calls the backend like SGLang's decode graph runner. A "graph" here is a function that repeats calls."""

    def __init__(self, rig: Rig, backend: Any) -> None:
        self.rig = rig
        self.backend = backend
        self.runner = SimpleNamespace(attention_graph_variants=GraphVariants(backend))
        most = max(SIZES)
        backend.init_cuda_graph_state(most, most)
        fill = backend.get_cuda_graph_seq_len_fill_value()
        whole = functools.partial(torch.zeros, most, dtype=torch.int64)
        ints = ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu")
        self.buffers = SimpleNamespace(mamba_track_indices=None, **{n: whole() for n in ints})
        self.buffers.seq_lens.fill_(fill)
        self.buffers.seq_lens_cpu.fill_(fill)
        self.fill = fill
        self.out_cache_loc = whole()
        self.q = torch.zeros(most, rig.heads * rig.query_dim, dtype=rig.dtype)
        made = functools.partial(torch.zeros, most, rig.kv_heads, dtype=rig.dtype)
        self.kv = made(rig.query_dim), made(rig.v_dim)
        self.graphs: dict[tuple[int, str], Any] = {}
        self.replayed: list[str] = []
        for size in SIZES:
            for label in self.runner.attention_graph_variants.capture_labels:
                _set_capture_attention_variant(label)
                self.graphs[size, label] = self._capture(size)
        _set_capture_attention_variant(None)

    def _capture(self, size: int) -> Any:
        backend = self.backend
        buffers = self.buffers
        slices = {name: side[:size] for name, side in vars(buffers).items() if side is not None}
        batch = ForwardBatch(
            **slices,
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            seq_lens_sum=size * self.fill,
            out_cache_loc=self.out_cache_loc[:size],
        )
        backend.kv_index_translator.bind_runner_slots(batch)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        state = backend.paged.rows, backend.paged.windows, backend.forward_metadata

        def replay() -> torch.Tensor:
            backend.paged.rows, backend.paged.windows, backend.forward_metadata = state
            backend.paged._new_peers = self.out_cache_loc[:0]  # left over from SGLang's trial run
            backend.init_forward_metadata_in_graph(batch)
            q, k, v = (side[:size] for side in (self.q, *self.kv))
            return backend.forward_decode(q, k, v, self.rig.layer, batch)

        replay()
        made = backend.paged._chosen
        if made is not None:
            # SGLang runs it twice before it captures. What those runs made is gone when the graph is replayed.
            replay()
            assert backend.paged._chosen is not made
        return replay

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        real = batch.batch_size
        self.size = min(size for size in SIZES if size >= real)
        graph_votes._before_load_batch(self.backend, self.runner, batch)
        for name in ("positions", "req_pool_indices", "seq_lens", "seq_lens_cpu"):
            getattr(self.buffers, name)[:real] = getattr(batch, name)
            getattr(self.buffers, name)[real:] = self.fill if "seq_lens" in name else 0
        self.out_cache_loc[:real] = batch.out_cache_loc
        self.out_cache_loc[real:] = 0
        self.backend.kv_index_translator.bind_runner_slots(batch)
        view = build_replay_fb_view(
            forward_batch=batch,
            buffers=self.buffers,
            bs=self.size,
            raw_bs=real,
            num_tokens=self.size,
            global_num_tokens_cpu=None,
            seq_len_fill_value=self.fill,
            capture_forward_mode=ForwardMode.DECODE,
            is_encoder_decoder=False,
        )
        self.backend.init_forward_metadata_out_graph(view)
        # As in SGLang 0.5.22, the runner asks for the variant only now. 0.5.23 asks before it prepares.
        label = DecodeCudaGraphRunner._resolve_attention_variant(self.runner, batch, self.size)
        assert label is not None
        self.replayed.append(label)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _layer: Any, _batch: Any
    ) -> torch.Tensor:
        real = len(q)
        self.q[:real] = q
        self.kv[0][:real] = k
        self.kv[1][:real] = v
        return self.graphs[self.size, self.replayed[-1]]()[:real]


@pytest.fixture
def rig() -> Rig:
    return Rig(shifted=0.4, lengths=SHORT, heads=2, kv_heads=1)


@pytest.fixture
def ranks() -> Iterator[None]:
    with get_parallel().override(attn_dcp_rank=0, attn_tp_rank=0):
        yield


@pytest.fixture
def backend(rig: Rig, ranks: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    return triton_backend(rig, monkeypatch)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrinks each kernel launch to a few programs, because the interpreter runs programs one by one."""
    shrink_launches(monkeypatch)


def close(rig: Rig, found: torch.Tensor, batch: ForwardBatch) -> bool:
    error = (found.double() - rig.expected(batch)).abs().max()
    return bool(error <= TOLERANCE[rig.dtype])


#: Arguments for :class:`Rig`, by the name of a test case.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "latent": dict(interleaved=True, latent=True),
    "window": dict(window=17), "wide": dict(window=500), "window pool": dict(window=17, own_pool=30),
}  # fmt: skip


@under_interpreter
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kind", long_if(KINDS, "window", "wide"))
def test_forwards_go_to_one_or_the_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch is marked as having shifted slots, keys are rotated to the positions where they are used, else
    read as cached. SGLang's Triton decode kernels leave out a window's oldest position. Slots in a window pool
    (SGLang's pool for windowed layers) are never shared."""
    if kind != "plain":
        shrink_launches(monkeypatch)
    rig = Rig(shifted=0.4, lengths=SHORT, heads=2, kv_heads=1, **KINDS[kind])
    backend = triton_backend(rig, monkeypatch)
    graphs = Graphs(rig, backend)
    for settled, shifts in ((False, True), (False, False), (False, True), (True, False)):
        if settled:
            rig.settle()
        for runner, new in ((backend, [1, 1, 1]), (graphs, [1, 1, 1]), (backend, [1, 3, 30])):
            batch = rig.batch(new)
            mark(batch, shifts)
            at = batch.out_cache_loc
            for layer in rig.layers:
                rig.layer = layer
                rig.cached_at.positions[at] = 7
                found = rig.forward(runner, batch)
                assert torch.equal(rig.cached_at.positions[at].long(), batch.positions)
                own_pool = layer.layer_id in compat.window_layers(rig.pool)
                assert close(rig, found, batch) == (settled or shifts or own_pool)
    assert graphs.replayed == [label for label in [SHIFTED, PLAIN] * 2 for _ in rig.layers]


@under_interpreter
@pytest.mark.usefixtures("few_programs")
def test_graphs_read_rows_as_they_are_when_replayed(rig: Rig, backend: Any) -> None:
    """Each replay makes a new plan (a list of the slots to read), because rows, lengths, batch sizes and cached
    positions change. An eager forward between two replays does not disturb the graphs."""
    graphs = Graphs(rig, backend)
    for lengths in ([1, 19, 70], [1, 2, 33]):
        rig.lengths = lengths
        batch = rig.batch([1, 1, 1])
        assert close(rig, rig.forward(graphs, batch), batch)
        rig.cached_at.record(rig.rows.req_to_token[3, : lengths[2] - 1].long(), torch.tensor(5))
    extend = rig.batch([1, 2, 30])
    assert close(rig, rig.forward(backend, extend), extend)
    assert close(rig, rig.forward(graphs, batch), batch)
    for lengths, size in (([12, 33], 3), ([33], 1)):
        rig.row_of = rig.row_of[-len(lengths) :]
        rig.lengths = lengths
        batch = rig.batch([1] * len(lengths))
        assert close(rig, rig.forward(graphs, batch), batch)
        assert graphs.size == size


@under_interpreter
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as-cached"])
def test_graphs_and_eager_forwards_skip_evicted_positions(
    rig: Rig, ranks: None, monkeypatch: pytest.MonkeyPatch, corrected: bool
) -> None:
    """Positions are evicted after the capture. If keys are read as cached, our kernels run only after that."""
    backend = triton_backend(rig, monkeypatch, corrected)
    if not corrected:
        rig.settle()
    graphs = Graphs(rig, backend)
    batch = rig.batch([1, 1, 1])
    assert close(rig, rig.forward(graphs, batch), batch)
    rig.evict([1, 3, 30], share=0.3)
    for runner, new in ((backend, [1, 1, 1]), (backend, [1, 3, 30]), (graphs, [1, 1, 1])):
        batch = rig.batch(new)
        assert close(rig, rig.forward(runner, batch), batch)
    assert graphs.replayed == [SHIFTED if corrected else PLAIN, SHIFTED]


@under_interpreter
def test_queries_are_kept_whichever_kernel_attends(rig: Rig, backend: Any) -> None:
    """Eager forwards and both decode graphs keep recent queries. Prefill graphs keep none and may not run."""
    found = backend.paged.keep_queries(3)
    graphs = Graphs(rig, backend)
    for shifted in (True, False):
        for new in ([1, 1, 1], [1, 19, 30]):
            batch = announced(backend, rig.batch(new), shifted)
            assert not backend.can_run_prefill_cuda_graph(batch)
            rig.forward(backend, batch)
            assert_kept(rig, found, new)
        found.positions.fill_(-1)
        rig.forward(graphs, announced(backend, rig.batch([1, 1, 1]), shifted))
        assert_kept(rig, found, [1, 1, 1])
    assert graphs.replayed == ["shifted", "plain"]


@under_interpreter
def test_hooks_reach_the_runner_and_every_batch(rig: Rig, backend: Any) -> None:
    """The hooks cannot be removed after the test, but the process that runs these tests ends soon."""
    graph_votes.install(backend)
    hf_config = Qwen3Config(architectures=["Qwen3ForCausalLM"])
    for module in (graph_variants, decode_cuda_graph_runner):
        variants = module.create_attention_graph_variants(hf_config)
        assert isinstance(variants, GraphVariants)
    batch = rig.batch([1, 1, 1])
    assert variants.select(batch) == SHIFTED
    mark(batch, False)
    assert variants.select(batch) == PLAIN
    mark(batch, True)
    with pytest.raises(AttributeError, match="dllm_uses_input_embeds"):
        DecodeCudaGraphRunner.load_batch(SimpleNamespace(), batch)
    assert backend._graph_variant == SHIFTED
    mark(batch, False)
    # Checks only that the hook is there; tests/contract checks its parameters.
    assert isinstance(ForwardBatch.__dict__["init_new"], classmethod)
    assert ForwardBatch.init_new.__wrapped__ is not None
    for shifted, evicted in ((True, False), (False, True), (False, False)):
        announced(backend, batch, shifted, [int(evicted)])
        assert backend.needs_ours(batch) == (shifted or evicted)
    graph_votes.let_go()
    assert decode_cuda_graph_runner.create_attention_graph_variants(hf_config) is None


NEW = {"decode": [1, 1, 1], "with-prefix": [1, 7, 30], "few": [1, 3, 4]}
ON_DEVICE = ["input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"]
ON_DEVICE += ["extend_seq_lens", "extend_prefix_lens"]


@pytest.fixture
def device(few_programs: None) -> Iterator[None]:
    with strict_device():
        yield


class Replayed:
    """Stands in for a decode graph: makes the calls that SGLang makes before a replay and in a capture."""

    def __init__(self, backend: Any) -> None:
        backend.init_cuda_graph_state(3)
        self._backend = backend
        self.forward_decode = backend.forward_decode

    def init_forward_metadata(self, batch: Any) -> None:
        assert self._backend.choose_graph(batch) == SHIFTED
        self._backend.init_forward_metadata_out_graph(batch)
        self._backend.init_forward_metadata_in_graph(batch)


def moved(part: Any) -> Any:
    """A copy of ``part``, such as a KV pool. Its tensors become device tensors over the same memory, except
    ``req_generation``, which SGLang keeps in host memory."""
    found = copy.copy(part)
    for name, value in vars(part).items():
        if name != "req_generation":
            setattr(found, name, moved(value) if hasattr(value, "k_buffer") else on_device(value))
    found.device = "cuda"
    return found


def runner_on_stand_in(rig: Rig) -> Any:
    runner = copy.copy(rig.runner)
    runner.device = "cuda"
    runner.req_to_token_pool = moved(rig.rows)
    runner.token_to_kv_pool = moved(rig.pool)
    rig.placed = on_device
    return runner


def on_stand_in(rig: Rig, corrected: bool = True) -> Any:
    cached = moved(rig.cached_at) if corrected else None
    backend = Backend(runner_on_stand_in(rig), cached, requested_by=REQUESTED_BY)
    assert backend.paged.backend == "triton"
    return backend


def batch_of(rig: Rig, backend: Any, new: list[int], evicted: list[int] | None = None) -> Any:
    """A batch on the device, marked by our hook, which must not wait for the device."""
    batch = rig.batch(new)
    there = {name: on_device(getattr(batch, name)) for name in ON_DEVICE}
    batch = dataclasses.replace(batch, **there)
    gone = [0] * len(new) if evicted is None else evicted
    with no_wait():
        return announced(backend, batch, True, gone)


def check_on_stand_in(
    rig: Rig, backend: Any, new: list[int], evicted: list[int] | None = None, runner: Any = None
) -> None:
    batch = batch_of(rig, backend, new, evicted)
    with no_wait():
        found = rig.forward(runner or backend, batch)
    rig.query = in_host(rig.query)
    expected = rig.expected(rig.batch(new))
    torch.testing.assert_close(in_host(found).double(), expected, rtol=0, atol=TOLERANCE[rig.dtype])


@under_interpreter
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as-cached"])
@pytest.mark.parametrize("new", NEW.values(), ids=NEW)
def test_hooks_and_plans_do_not_wait(new: list[int], corrected: bool) -> None:
    """Runs a batch with evicted positions and, before that, if ``corrected``, a batch with shifted slots. Each
    batch of ``NEW`` and each value of ``corrected`` run in one case with kept queries, in another without."""
    keeps = corrected != (new == NEW["with-prefix"])
    rig = Rig(shifted=0.4, lengths=SHORT, heads=2, kv_heads=1)
    backend = on_stand_in(rig, corrected)
    if keeps:
        backend.paged.keep_queries(3)
    if not corrected:
        rig.settle()
    if corrected:
        check_on_stand_in(rig, backend, new)
    rig.evict(new)
    rows = rig.rows.req_to_token[rig.row_of]
    gone = [int((row[:end] < 0).sum()) for row, end in zip(rows, SHORT, strict=True)]
    check_on_stand_in(rig, backend, new, gone)
    if new == NEW["decode"]:
        check_on_stand_in(rig, backend, new, gone, Replayed(backend))


@under_interpreter
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["latent", "window pool"])
def test_latent_rows_and_window_pools_on_a_stand_in(kind: str) -> None:
    rig = Rig(shifted=0.4, lengths=SHORT, heads=2, kv_heads=1, **KINDS[kind])
    backend = on_stand_in(rig)
    for layer in rig.layers:
        rig.layer = layer
        for runner in (None, Replayed(backend)):
            check_on_stand_in(rig, backend, NEW["decode"], runner=runner)
        check_on_stand_in(rig, backend, NEW["with-prefix"])


#: What each of four drafted tokens sees of them: a chain, and a tree whose root has two children.
CHAIN = torch.ones(4, 4, dtype=torch.bool).tril()
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)


def verifying(rig: Rig, backend: Any, tree: torch.Tensor, topk: int = -1) -> Any:
    """A batch on the device that verifies drafted tokens, marked as having shifted slots."""
    batch = rig.verification(tree, topk)
    there = {name: on_device(getattr(batch, name)) for name in ON_DEVICE}
    info = SimpleNamespace(**vars(batch.spec_info))
    info.custom_mask = on_device(info.custom_mask)
    with no_wait():
        batch = dataclasses.replace(batch, **there, spec_info=info)
        batch = announced(backend, batch, True, [0] * len(rig.lengths))
    # SGLang's Triton backend does without lengths on the host: rows name at most so many slots.
    assert isinstance(batch.rids, MarkedRids)
    batch.rids.slots = sum(rig.lengths)
    return dataclasses.replace(batch, seq_lens_cpu=None) if topk == 1 else batch


def check_drafts(
    rig: Rig, backend: Any, tree: torch.Tensor, topk: int = -1, runner: Any = None
) -> None:
    batch = verifying(rig, backend, tree, topk)
    with no_wait():
        found = rig.forward(runner or backend, batch)
    rig.query = in_host(rig.query)
    plain = rig.verification(tree)
    # A slot is recorded at its place in the row, where SGLang moves the KV of an accepted token.
    assert torch.equal(
        rig.cached_at.positions[plain.out_cache_loc].long(),
        torch.cat([torch.arange(end - len(tree), end) for end in rig.lengths]),
    )
    expected = rig.expected(plain)
    torch.testing.assert_close(in_host(found).double(), expected, rtol=0, atol=TOLERANCE[rig.dtype])


class Padded:
    """Runs a verification that SGLang pads: with a request, and with two tokens of no request, as for ranks
    that gather a number of tokens which they divide."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        length = SimpleNamespace(get_cuda_graph_seq_len_fill_value=lambda: 1)
        self._runner: Any = SimpleNamespace(attn_backend=length)
        self._padded: Any = None

    def init_forward_metadata(self, batch: Any) -> None:
        self._padded = dataclasses.replace(batch)
        requests = batch.batch_size + 1
        tokens = requests * batch.spec_info.draft_token_num + 2
        self._padded._pad_inputs_to_size(self._runner, tokens, requests)
        self._backend.init_forward_metadata(self._padded)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, _batch: Any) -> Any:
        tokens = len(self._padded.out_cache_loc)
        padded = (
            torch.cat((side, side.new_zeros(tokens - len(side), *side.shape[1:])))
            for side in (q, k, v)
        )
        found = self._backend.forward_extend(*padded, layer, self._padded)
        assert len(found) == tokens
        return found[: len(q)]


class VerifyingGraph:
    """Stands in for a graph that verifies drafted tokens of three requests. It is captured once with other
    rows, and a replay repeats only the calls that the capture recorded."""

    def __init__(self, backend: Any, count: int) -> None:
        self._backend = backend
        backend.init_cuda_graph_state(3, 3 * count)
        fill = 1
        ints = functools.partial(torch.zeros, dtype=torch.int64)
        self._sides = dict(
            req_pool_indices=on_device(ints(3)),
            seq_lens=on_device(ints(3) + fill),
            out_cache_loc=on_device(ints(3 * count)),
            positions=on_device(ints(3 * count)),
        )
        # At capture SGLang's mask is a buffer without meaning.
        mask = on_device(torch.zeros(8, dtype=torch.bool))
        info = SimpleNamespace(draft_token_num=count, tree_topk=-1, custom_mask=mask)
        self._captured = ForwardBatch(
            **self._sides, forward_mode=ForwardMode.TARGET_VERIFY, batch_size=3, input_ids=None,
            seq_lens_sum=3 * fill, spec_info=info,
        )  # fmt: skip
        _set_capture_attention_variant(SHIFTED)
        backend.init_forward_metadata_out_graph(self._captured, in_capture=True)
        _set_capture_attention_variant(None)
        paged = backend.paged
        self._state = paged.rows, paged.windows, paged._sees

    def init_forward_metadata(self, batch: Any) -> None:
        assert self._backend.choose_graph(batch) == SHIFTED
        real = batch.batch_size
        for name, side in self._sides.items():
            value = getattr(batch, name)
            side[: len(value)] = value
        self._sides["seq_lens"][real:] = 1
        view = dataclasses.replace(batch, batch_size=3, **self._sides)
        self._backend.init_forward_metadata_out_graph(view)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, _batch: Any) -> Any:
        paged = self._backend.paged
        paged.rows, paged.windows, paged._sees = self._state
        self._backend.init_forward_metadata_in_graph(self._captured)
        padded = []
        for side in (q, k, v):
            whole = side.new_zeros((len(self._sides["positions"]), *side.shape[1:]))
            whole[: len(side)] = side
            padded.append(whole)
        return self._backend.forward_extend(*padded, layer, self._captured)[: len(q)]


@under_interpreter
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["plain", "latent", "window", "window pool"])
def test_drafted_tokens_read_shifted_slots(kind: str) -> None:
    """Verified outside of graphs and in a graph: chains and trees, which change from replay to replay, as rows,
    lengths and the number of requests do. Nothing waits for the device. A layer with a window sees other
    positions for each drafted token."""
    rig = Rig(shifted=0.4, lengths=[5, 19, 70], heads=2, kv_heads=1, **KINDS[kind])
    rig.runner.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    rig.runner.server_args.speculative_num_draft_tokens = 4
    backend = on_stand_in(rig)
    graph = VerifyingGraph(backend, 4)
    whole = rig.row_of, rig.lengths
    for layer in rig.layers:
        rig.layer = layer
        rig.row_of, rig.lengths = whole
        check_drafts(rig, backend, CHAIN, topk=1)
        check_drafts(rig, backend, TREE)
        if kind == "plain":
            check_drafts(rig, backend, CHAIN, topk=1, runner=Padded(backend))
        check_drafts(rig, backend, TREE, runner=graph)
        rig.lengths = [5, 12, 33]
        check_drafts(rig, backend, CHAIN, runner=graph)
        rig.row_of = rig.row_of[1:]
        rig.lengths = [18, 60]
        check_drafts(rig, backend, TREE, runner=graph)
        check_drafts(rig, backend, CHAIN, topk=1, runner=graph)


@pytest.fixture
def made(
    published_config: None, device: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Makes the attention backend of a server with three rows. SGLang plans decode graphs of up to 8 requests.
    Returns the backend (``STOCK`` stands for SGLang's own) and its ``AttentionParts``."""
    monkeypatch.setattr(attention, "backend_class", lambda *_: Backend)
    # The hooks cannot be removed after the test.
    monkeypatch.setattr(graph_votes, "install", lambda _backend: None)
    rig = Rig(shifted=0.0, lengths=SHORT, heads=2, kv_heads=1)
    rig.runner.prefill_attention_backend_str = "triton"
    rig.runner.server_args = compat.ServerArgs(model_path="none", device="cpu")

    def make(config: ReasonCacheConfig) -> Any:
        runner = runner_on_stand_in(rig)
        cached = moved(rig.cached_at)
        backend, parts = attention.attention_backend(
            runner, config, "triton", lambda _runner: STOCK, cached
        )
        return backend, parts, runner

    decode = PhaseConfig(backend="full", max_bs=8, bs=[1, 2, 4, 8])
    with get_exec().graph.override(cuda_graph_config=CudaGraphConfig(decode=decode)):
        yield make


STOCK: Any = object()
#: Bytes of the plans of three requests: 28 bytes a position, and some for each request.
NEEDED = (28 * 3 * CONTEXT, 29 * 3 * CONTEXT)


@under_interpreter
def test_memory_for_plans_is_taken_when_the_backend_is_made(
    made: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """At most as many requests run as there are rows, so SGLang captures no larger graph. Without decode graphs
    no memory is taken."""
    caplog.set_level("INFO")
    backend, _, runner = made(ReasonCacheConfig())
    [plans] = backend._graphs
    taken = sum(buffers.nbytes for buffers in plans.values())
    assert plans[0].batch == 3 and NEEDED[0] < taken == backend.paged.graph_bytes(3) < NEEDED[1]
    assert "plans of decode graphs, 3 requests x 1024 positions, take 0.1 MiB" in caplog.text
    backend.init_cuda_graph_state(3)
    assert [id(one) for one in backend._graphs] == [id(plans)]
    off = CudaGraphConfig(decode=PhaseConfig(backend="disabled"))
    with get_exec().graph.override(cuda_graph_config=off):
        assert made(ReasonCacheConfig())[0]._graphs == []
    runner.is_generation = False
    assert compat.largest_decode_graph(runner) == 0


@under_interpreter
@pytest.mark.parametrize("fails", ["too little free", "allocation"])
def test_a_server_without_memory_for_plans_starts_and_shares_nothing(
    made: Callable[..., Any],
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SGLang's backend serves, and the warning and the report name the bytes and the flags. A server that was
    asked for ``corrected`` does not start."""
    needed = made(ReasonCacheConfig())[0].paged.graph_bytes(3)
    free = 2 * needed - (fails == "too little free")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 1 << 40))
    if fails == "allocation":
        assert made(ReasonCacheConfig())[0] is not STOCK
        allocated = PlanBuffers.of

        def of(batch: int, capacity: int, device: torch.device, *, merge: bool) -> PlanBuffers:
            if device.type == "cuda":
                raise torch.OutOfMemoryError("none left")
            return allocated(batch, capacity, device, merge=merge)

        monkeypatch.setattr(PlanBuffers, "of", of)
    caplog.clear()
    backend, parts, runner = made(ReasonCacheConfig())
    assert backend is STOCK and parts.rotations is None
    for told in (
        f"{REQUESTED_BY}: plans of decode graphs for 3 requests x 1024 positions take {needed} bytes",
        f"half of the {free} bytes",
        "lower --cuda-graph-max-bs-decode, --context-length or --mem-fraction-static",
    ):
        assert told in parts.uncorrected
    config, reason = attention.resolve_positions(ReasonCacheConfig(), parts, runner)
    assert not config.shares and reason is not None and reason == parts.uncorrected
    assert f"nothing is shared, because: {reason}" in caplog.messages[-1]
    with pytest.raises(ValueError, match=re.escape(reason)):
        made(ReasonCacheConfig(positions="corrected"))
