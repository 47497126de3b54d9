# SPDX-License-Identifier: Apache-2.0
"""KV pools, rows (block tables) and batches to test attention backends, and the expected results."""

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.models.olmo2 import Olmo2Attention

from sglang_reasoncache import compat
from sglang_reasoncache.attention.batch_mark import MarkedRids
from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.owner import NoOwner
from sglang_reasoncache.plugin import graph_votes
from tests.kernels.attention_cases import dense, turned

DIM = 16
#: How many latent and rotated dims a token's MLA KV has. SGLang's Triton kernels also support 512 and 64.
RANK = 256
ROTATED = 32
BASE = 10_000
CONTEXT = 1024
LENGTHS = [1, 19, 989]
SHORT = [1, 19, 70]

#: In fp32, rounding changes an angle of up to 1024 radians by up to 1024 * 2**-24, and thereby a softmax weight
#: by about as much. In bf16, keys, softmax weights and results are each rounded to 8 bits.
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 3e-2}


#: Numbers of new tokens in the three rows. "few": so few that our kernels compute each token as in decode.
BATCHES = {
    "decode": [1, 1, 1],
    "whole": [1, 19, 989],
    "with-prefix": [1, 7, 300],
    "mixed": [1, 1, 40],
    "few": [1, 3, 4],
}


class Rig:
    """A pool and rows with random KV. ``shifted``: fraction of slots whose key was cached for another position.

    ``interleaved``: whether rotation pairs neighbouring dims (GPT-J). ``latent``: rows of MLA. ``window``: how
    many positions a query sees before its own; 0 means all. ``own_pool``: if not 0, the layer with the window
    has its own pool. Tokens that none of a row's newest ``own_pool`` tokens sees count as freed from this pool.
    ``page``: tokens per page; a row names whole pages, until :meth:`scatter`.
    """

    def __init__(
        self,
        *,
        shifted: float,
        lengths: list[int] = LENGTHS,
        heads: int = 4,
        kv_heads: int = 2,
        dtype: torch.dtype = torch.float32,
        interleaved: bool = False,
        latent: bool = False,
        window: int = 0,
        own_pool: int = 0,
        page: int = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(23)
        self.generator = generator
        #: Moves queries, keys and values to the backend's device.
        self.placed: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        self.lengths = lengths
        self.heads = heads
        self.kv_heads = kv_heads
        self.dtype = dtype
        self.interleaved = interleaved
        self.latent = latent
        self.v_dim, self.query_dim = (RANK, RANK + ROTATED) if latent else (DIM, DIM)
        dims = ROTATED if latent else DIM
        self.frequencies = BASE ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        self.page = page
        size = sum(-(-length // page) * page for length in lengths) + 64
        heads_of_pool: Any = dict(head_num=kv_heads, head_dim=DIM)
        if latent:
            heads_of_pool = dict(kv_lora_rank=RANK, qk_rope_head_dim=ROTATED)
        kind: Any = MLATokenToKVPool if latent else MHATokenToKVPool
        layers: Any = dict(layer_num=2, enable_memory_saver=False)
        #: Slot in a row -> slot of the same token in layer 1. With ``own_pool``, -1 (evicted) stays -1.
        self.peers = torch.arange(size + 2)
        if own_pool:
            kind = SWAKVPool
            layers = dict(size_swa=size, swa_attention_layer_ids=[1])
            heads_of_pool["full_attention_layer_ids"] = [0]
            self.peers[1:] = size - torch.arange(size + 1)
            self.peers[-1] = -1
        sizes = dict(size=size, page_size=page, **layers, **heads_of_pool)
        self.pool = kind(**sizes, dtype=dtype, device="cpu")
        places: Any = dict(dtype=dtype, device="cpu", kvcache=self.pool, need_sort=False)
        stock: Any = TokenToKVPoolAllocator(size, **places)
        if own_pool:
            stock = SWATokenToKVPoolAllocator(size, size, 1, **places)
        self.allocator = shared_allocator_of(stock)
        self.allocator.has_shifted_slots = shifted > 0
        if own_pool:
            self.pool.register_mapping(self.peers)
        sides = [compat.kv_of(self.pool, layer) for layer in (0, 1)]
        self.buffers = [*sides[0], *sides[1]]
        for buffer in self.buffers:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        self.rows = ReqToTokenPool(len(lengths), CONTEXT, "cpu", False)
        # Beyond its end a row has entries left over from earlier requests.
        stale = torch.randint(1, size + 1, self.rows.req_to_token.shape, generator=generator)
        self.rows.req_to_token.copy_(stale)
        last = size + page
        self.cached_at = CachedPositions(last, "cpu")
        self.cached_at.record(
            torch.arange(last), torch.randint(0, CONTEXT, (last,), generator=generator)
        )
        pages = torch.randperm(size // page, generator=generator) + 1
        order = (pages[:, None] * page + torch.arange(page)).flatten()
        # Slots in no row hold NaN, which spoils the result if they are read. Page 0 (padding) may be read.
        for buffer, peer in zip(*sides, strict=True):
            buffer[order[-64:]] = peer[self.peers[order[-64:]]] = float("nan")
        self.row_of = torch.arange(1, len(lengths) + 1)
        whole = [-(-length // page) * page for length in lengths]
        for row, length, held in zip(
            self.row_of, lengths, order.split([*whole, 64])[:-1], strict=True
        ):
            slots = held[:length]
            self.rows.req_to_token[row, : len(slots)] = slots.to(torch.int32)
            at = torch.arange(len(slots))
            elsewhere = torch.randint(0, CONTEXT, at.shape, generator=generator)
            stays = torch.rand(at.shape, generator=generator) >= shifted
            self.cached_at.record(slots, torch.where(stays, at, elsewhere))
            if own_pool:
                self.peers[slots[: max(len(slots) - own_pool - window, 0)]] = 0
        rope = factory.get_rope(dims, dims, CONTEXT, BASE, not interleaved, None, torch.float32)
        self.scale = self.query_dim**-0.5
        shape = heads, self.query_dim, self.scale, kv_heads
        sees = dict(v_head_dim=self.v_dim, sliding_window_size=window or -1)
        self.layer = RadixAttention(*shape, layer_id=1, **sees)
        model: Any = torch.nn.ModuleList([rope, self.layer])
        self.layers = [self.layer]
        if window:
            sees["sliding_window_size"] = -1
            both = [RadixAttention(*shape, layer_id=0, **sees), self.layer]
            model = _olmo(rope, *both)
            self.layers = both if own_pool else self.layers
        #: ``unread``: how many of a window's oldest positions a decode step skips, as in ``PagedBackend``.
        self.window = window
        self.unread = 0
        #: Stands in for SGLang's model runner. It has the fields that our backends read when a server starts.
        self.runner: Any = SimpleNamespace(
            device="cpu",
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            dtype=dtype,
            model=model,
            model_config=SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False),
            use_mla_backend=latent,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            is_draft_worker=False,
            is_generation=True,
            decode_attention_backend_str="triton",
            server_args=SimpleNamespace(
                enable_deterministic_inference=False, rl_on_policy_target=None
            ),
        )

    def batch(self, new: list[int]) -> ForwardBatch:
        """A batch that computes the last ``new[i]`` tokens of row i: a decode step if all counts are 1."""
        decode = all(count == 1 for count in new)
        ends = torch.tensor(self.lengths)
        slots = []
        positions = []
        for row, end, count in zip(self.row_of, self.lengths, new, strict=True):
            slots.append(self.rows.req_to_token[row, end - count : end].long())
            positions.append(torch.arange(end - count, end))
        before = ends - torch.tensor(new)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(new),
            input_ids=torch.cat(positions),
            req_pool_indices=self.row_of,
            seq_lens=ends,
            seq_lens_cpu=ends,
            seq_lens_sum=sum(self.lengths),
            out_cache_loc=torch.cat(slots),
            positions=torch.cat(positions),
            extend_seq_lens=torch.tensor(new),
            extend_prefix_lens=before,
            extend_seq_lens_cpu=new,
            extend_prefix_lens_cpu=before.tolist(),
            rids=[f"r{i}" for i in range(len(new))],
        )

    def verification(self, tree: torch.Tensor, topk: int = -1) -> ForwardBatch:
        """A batch that verifies the last tokens of each row as drafted tokens. ``tree``: which of them each one
        sees, bool ``[drafted, drafted]``. With ``topk`` 1 the backend takes them for a chain."""
        count = len(tree)
        batch = self.batch([count] * len(self.lengths))
        before = torch.tensor(self.lengths) - count
        masks = [torch.cat((torch.ones(count, n), tree), dim=1).flatten() for n in before.tolist()]
        depths = tree.sum(1) - 1
        return dataclasses.replace(
            batch,
            forward_mode=ForwardMode.TARGET_VERIFY,
            seq_lens=before,
            seq_lens_cpu=before,
            seq_lens_sum=int(before.sum()),
            positions=(before[:, None] + depths).flatten(),
            extend_seq_lens_cpu=None,
            extend_prefix_lens_cpu=None,
            spec_info=SimpleNamespace(
                draft_token_num=count,
                tree_topk=topk,
                custom_mask=torch.cat(masks).bool(),
                is_draft_input=lambda: False,
            ),
        )

    def evict(self, new: list[int], share: float = 0.4) -> None:
        """Evict random positions of each row ``i``, but none of its last ``new[i] + 1`` positions."""
        self.allocator.has_evicted = True
        for row, end, count in zip(self.row_of, self.lengths, new, strict=True):
            gone = torch.rand(max(end - count - 1, 0), generator=self.generator) < share
            self.rows.req_to_token[row, : len(gone)][gone] = -1

    def scatter(self) -> None:
        """Move each row's tokens to other slots of the row, so that its pages say nothing about its slots."""
        for row, end in zip(self.row_of, self.lengths, strict=True):
            entries = self.rows.req_to_token[row]
            entries[:end] = entries[:end][torch.randperm(end, generator=self.generator)]

    def settle(self) -> None:
        """Record the slots in all rows as cached at their positions there, so that no slot is shifted."""
        for row, end in zip(self.row_of, self.lengths, strict=True):
            slots = self.rows.req_to_token[row, :end].long()
            held = slots >= 0
            self.cached_at.record(slots[held], torch.arange(end)[held])

    def forward(self, backend: Any, batch: Any) -> torch.Tensor:
        """Run ``backend``; return ``[tokens, heads, v_dim]``. Keeps the queries for :meth:`expected`."""
        tokens = len(batch.out_cache_loc)
        generator = torch.Generator().manual_seed(tokens)
        q, k, v = (
            self.placed(torch.randn(tokens, heads, dim, generator=generator).to(self.dtype))
            for heads, dim in (
                (self.heads, self.query_dim),
                (self.kv_heads, self.query_dim),
                (self.kv_heads, self.v_dim),
            )
        )
        v = k[..., : self.v_dim] if self.latent else v
        self.query = q
        if translator := getattr(backend, "kv_index_translator", None):
            # Sets the batch's ``kv_loc_plan``, which SGLang's Triton backend reads.
            translator.bind_runner_slots(batch)
        backend.init_forward_metadata(batch)
        run = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
        return run(q.flatten(1), k, v, self.layer, batch).view(tokens, self.heads, self.v_dim)

    def check(self, backend: Any, batch: Any, logit_cap: float = 0.0) -> None:
        """Check that the backend's result for the batch is close to :meth:`expected`."""
        found = self.forward(backend, batch).double()
        expected = self.expected(batch, logit_cap)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[self.dtype])

    def expected(self, batch: Any, logit_cap: float = 0.0) -> torch.Tensor:
        """The expected result, fp64 ``[tokens, heads, v_dim]``. Each key is rotated to its position in the row,
        except in a window pool. Evicted positions are masked."""
        layer = self.layer.layer_id
        keys, values = (side.double() for side in compat.kv_of(self.pool, layer))
        found = []
        query = iter(self.query.split(batch.extend_seq_lens.tolist()))
        masks = iter(self._drafts_hidden(batch))
        positions = iter(batch.positions.split(batch.extend_seq_lens.tolist()))
        for row, end in zip(self.row_of, self.lengths, strict=True):
            slots = self.rows.req_to_token[row, :end].long()
            at = torch.arange(end)
            evicted = slots < 0
            slots = slots.clamp_min(0)
            by = (at - self.cached_at.positions[slots])[:, None] * self.frequencies
            if layer in compat.window_layers(self.pool):
                slots = self.peers[slots]
                by = torch.zeros(1, 1)
            k = turned(keys[slots], torch.polar(torch.ones_like(by), by), not self.interleaved)
            if self.latent:
                k = torch.cat((values[slots], k), dim=2)
            q = next(query)
            own = torch.arange(end - len(q), end)[:, None]
            hidden = evicted | (at > own)
            if batch.forward_mode.is_target_verify():
                hidden = next(masks)
            if layer and self.window:
                decode = batch.forward_mode.is_decode()
                # In a tree a drafted token's own position is not that of its slot.
                own = next(positions)[:, None]
                hidden |= at < own - self.window + (self.unread if decode else 0)
            out, _ = dense(q, k, values[slots], self.scale, hidden=hidden, cap=logit_cap)
            found.append(out)
        return torch.cat(found)

    def _drafts_hidden(self, batch: Any) -> list[torch.Tensor]:
        """For each request that a batch verifies: what each drafted token does not see of the row."""
        if not batch.forward_mode.is_target_verify():
            return []
        count = batch.spec_info.draft_token_num
        masks = batch.spec_info.custom_mask.split([count * length for length in self.lengths])
        return [~mask.view(count, -1) for mask in masks]


def _olmo(rope: Any, *layers: RadixAttention) -> torch.nn.Module:
    """Attention modules of OLMo 3. This model has sliding windows, and our backends can rotate its keys."""
    found = torch.nn.ModuleList()
    for layer in layers:
        owner: Any = Olmo2Attention.__new__(Olmo2Attention)
        torch.nn.Module.__init__(owner)
        owner.rotary_emb = rope
        owner.attn = layer
        found.append(owner)
    return found


def announced(
    backend: Any, batch: ForwardBatch, shifted: bool = False, evicted: Sequence[int] = ()
) -> ForwardBatch:
    """Calls our hook for new batches, which marks ``batch``. The prefix tree tells the hook ``shifted``
    (whether requests read shifted slots) and ``evicted`` (how many positions of each request are evicted)."""
    runner: Any = SimpleNamespace(attn_backend=backend)
    graph_votes._after_forward_batch(batch, type(batch), requests_of(shifted, evicted), runner)
    return batch


def requests_of(shifted: bool, evicted: Sequence[int], **more: Any) -> Any:
    """A scheduler's batch with a stand-in for the prefix tree, which returns ``shifted`` and ``evicted``."""
    reqs: list[Any] = [SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=3 * CONTEXT))]
    tree = SimpleNamespace(
        owner=NoOwner(),
        reads_shifted=lambda of: shifted and of is reqs,
        evicted_of=lambda of: evicted if of is reqs else [],
    )
    return SimpleNamespace(tree_cache=tree, reqs=reqs, **more)


def mark(batch: ForwardBatch, needs_ours: bool) -> None:
    """Marks the batch. ``needs_ours``: whether its rows have shifted slots or evicted positions."""
    if isinstance(batch.rids, MarkedRids):
        batch.rids.needs_ours = needs_ours
        batch.rids.evicted = None
    else:
        batch.rids = MarkedRids(batch.rids or [], needs_ours)


#: A change to a :class:`Rig` that our backends must refuse, and words of the error message.
UNSUPPORTED: list[tuple[Callable[[Any], None], str]] = [
    (lambda r: setattr(r.layer, "is_cross_attention", True), "cross attention"),
    (lambda r: setattr(r.layer, "attn_type", AttentionType.ENCODER_ONLY), "attention type"),
    (lambda r: setattr(r.layer, "xai_temperature_len", 4), "temperature"),
    (lambda r: setattr(r.runner.model_config, "is_encoder_decoder", True), "encoder-decoder"),
    (lambda r: setattr(r.runner.model_config, "is_local_attention_model", True), "in chunks"),
    (lambda r: setattr(r.layer, "enable_sink_attention", True), "sinks that a model applies"),
    (lambda r: setattr(r.layer, "learnable_sink_param", r.rows), "sinks of latent attention"),
    (lambda r: setattr(r.pool, "kv_cache_layout", "hnd"), "hnd"),
    (lambda r: setattr(r.runner, "token_to_kv_pool", SimpleNamespace()), "SimpleNamespace"),
]
