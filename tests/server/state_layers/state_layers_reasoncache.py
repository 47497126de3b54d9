# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test: it computes the state layers of hybrid models (Mamba, linear attention, short
convolutions) in PyTorch, not in Triton, which needs a GPU. SGLang still manages the slots that hold states."""

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Qwen3-Next creates its norms on ``get_device_module().current_device()``. By default this is a GPU, which
    # a test machine may not have.
    setattr(torch, "get_device_module", lambda device=None: torch.cpu)  # noqa: B010
    if not torch.cuda.is_available():
        # Pinned memory needs a GPU.
        setattr(torch.Tensor, "pin_memory", lambda self, *_: self)  # noqa: B010
    # SGLang's CPU has no copies of states. The functions below make them where SGLang's kernels would.
    from sglang_reasoncache.cpu.platform import TorchCpuPlatform

    platform: Any = TorchCpuPlatform
    platform.support_mamba_cache_extra_buffer = lambda _: True
    # SGLang calls the function ``target`` after it has loaded the model and before the first forward.
    target = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
    HookRegistry.register(target, _replace, HookType.BEFORE)


def _replace(*_: object) -> None:
    mamba: Any = importlib.import_module("sglang.srt.layers.attention.mamba.mamba")
    mamba.causal_conv1d_fn_triton = mamba.causal_conv1d_fn = convolve
    mamba.causal_conv1d_update_triton = mamba.causal_conv1d_update = convolve_one
    mamba.mamba_chunk_scan_combined = scan
    mamba.selective_state_update = scan_one
    lfm2: Any = sys.modules.get("sglang.srt.models.lfm2")
    if lfm2 is not None:
        lfm2.causal_conv1d_fn = convolve
        lfm2.causal_conv1d_update = convolve_one
    gdn: Any = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
    gdn.GDNAttnBackend.forward_decode = gdn.GDNAttnBackend.forward_extend = gated_delta_rule
    kda: Any = importlib.import_module("sglang.srt.layers.attention.linear.kda_backend")
    kda.KDAAttnBackend.forward_decode = kda.KDAAttnBackend.forward_extend = gated_delta_rule
    hybrid: Any = importlib.import_module("sglang.srt.layers.attention.hybrid_linear_attn_backend")
    hybrid.scatter_mamba_states_after_mtp_verify = keep_accepted
    norm: Any = importlib.import_module("sglang.kernels.ops.attention.fla.fused_norm_gate")
    norm.FusedRMSNormGated.forward = gated_norm
    norm = importlib.import_module("sglang.kernels.ops.attention.fla.layernorm_gated")
    norm.RMSNorm.forward = gated_norm
    qwen: Any = sys.modules.get("sglang.srt.models.qwen3_5")
    if qwen is not None:
        qwen.fused_sigmoid_mul = lambda x, gate, inplace: x.mul_(gate.reshape(x.shape).sigmoid())
    moe: Any = sys.modules.get("sglang.srt.models.qwen2_moe")
    if moe is not None:
        moe.fused_gate_sigmoid_mul_add = add_gated


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
    query_start_loc: torch.Tensor, cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None, conv_states: torch.Tensor,
    activation: str | None = "silu", **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Replaces ``causal_conv1d_fn``. ``x``, ``[dim, tokens]``, holds the tokens of several requests;
    ``conv_states`` is ``[slots, dim, width - 1]``."""
    before = weight.shape[1] - 1
    out = torch.empty_like(x)
    ends = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()[: len(ends) - 1]):
        state = conv_states[slot, :, -before:].to(x.dtype)
        if has_initial_state is None or not has_initial_state[i]:
            state = torch.zeros_like(state)
        piece = torch.cat((state, x[:, ends[i] : ends[i + 1]]), dim=1)
        conv_states[slot, :, -before:] = piece[:, -before:].to(conv_states.dtype)
        made = F.conv1d(piece[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, ends[i] : ends[i + 1]] = F.silu(made) if activation else made
    return out


def convolve_one(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None, activation: str | None = None, *,
    conv_state_indices: torch.Tensor, intermediate_conv_window: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Replaces ``causal_conv1d_update``. ``x``, ``[requests, dim]``, holds one token of each request, or
    ``[requests, dim, drafted]`` the drafted tokens of each. The states of these go to
    ``intermediate_conv_window``, and their parents in the tree to ``retrieve_parent_token``."""
    slots = conv_state_indices.long()

    def one(token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        piece = torch.cat((state.to(x.dtype), token[:, :, None]), dim=2)
        made = (piece[:, :, -weight.shape[1] :] * weight).sum(dim=2)
        made = made if bias is None else made + bias
        return F.silu(made) if activation else made, piece[:, :, 1:].to(conv_state.dtype)

    if intermediate_conv_window is None:
        made, conv_state[slots] = one(x, conv_state[slots])
        return made
    out = torch.empty_like(x)
    first = conv_state[slots]
    parents = _parents(len(x), x.shape[2], retrieve_next_token, retrieve_next_sibling)
    if retrieve_parent_token is not None:
        retrieve_parent_token.copy_(parents)
    for at in range(x.shape[2]):
        state = _after(parents[:, at], first, intermediate_conv_window)
        out[:, :, at], intermediate_conv_window[: len(x), at] = one(x[:, :, at], state)
    return out


def _parents(
    requests: int, drafted: int, child: torch.Tensor | None, sibling: torch.Tensor | None
) -> torch.Tensor:
    """The token that each drafted token follows, int64 ``[requests, drafted]``. -1: the newest accepted one.
    ``child`` and ``sibling`` are a tree's links; None for a chain."""
    if child is None or sibling is None:
        return (torch.arange(drafted) - 1).expand(requests, drafted)
    found = torch.full((requests, drafted), -1)
    for request in range(requests):
        for token in range(drafted):
            below = int(child[request, token])
            while below >= 0:
                found[request, below] = token
                below = int(sibling[request, below])
    return found


def _after(parents: torch.Tensor, first: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The state after each request's token in ``parents``: one of ``kept``, ``[rows, drafted, ...]``, or of
    ``first``, ``[requests, ...]``, for the parent -1."""
    found = kept[torch.arange(len(parents)), parents.clamp(min=0)]
    return torch.where(parents.view(-1, *[1] * (first.dim() - 1)) < 0, first, found)


def keep_accepted(
    caches: Any, slots: torch.Tensor, steps: torch.Tensor,
    track_slots: torch.Tensor | None, track_steps: torch.Tensor | None, **_: Any,
) -> None:  # fmt: skip
    """Replaces ``scatter_mamba_states_after_mtp_verify``: each request's state becomes that after its last
    accepted token (``steps``)."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    keep = HybridLinearAttnBackend._scatter_speculative_state_with_mask
    pairs = [
        (caches.temporal, caches.intermediate_ssm),
        *zip(caches.conv, caches.intermediate_conv_window, strict=True),
    ]
    for state, kept in pairs:
        keep(state, kept, slots, steps)
        if track_slots is not None and track_steps is not None:
            keep(state, kept, track_slots, track_steps)


def scan_one(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    c: torch.Tensor, d: torch.Tensor, *, dt_bias: torch.Tensor, state_batch_indices: torch.Tensor,
    out: torch.Tensor, intermediate_states_buffer: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None, **_: Any,
) -> None:  # fmt: skip
    """Replaces ``selective_state_update`` (Mamba 2). ``x``: a token per request, ``[requests, heads, dim]``, or
    drafted tokens, ``[requests, drafted, heads, dim]``, whose states go to ``intermediate_states_buffer``."""
    slots = state_batch_indices.long()
    times = x.shape[-2] // b.shape[-2]
    b, c = (each.repeat_interleave(times, dim=-2) for each in (b, c))
    dt = F.softplus(dt.float() + dt_bias.float())

    def one(at: Any, before: torch.Tensor) -> torch.Tensor:
        new = before.float() * (dt[at][..., None] * a).exp()
        new = new + (dt[at] * x[at])[..., None] * b[at][:, :, None]
        out[at] = ((new * c[at][:, :, None]).sum(dim=-1) + x[at] * d).to(out.dtype)
        return new.to(state.dtype)

    kept = intermediate_states_buffer
    if kept is None:
        state[slots] = one(slice(None), state[slots])
        return
    if retrieve_parent_token is None:
        parents = _parents(x.shape[0], x.shape[1], None, None)
    else:
        parents = retrieve_parent_token.long()
    for token in range(x.shape[1]):
        before = _after(parents[:, token], state[slots], kept)
        kept[: len(x), token] = one((slice(None), token), before)


def scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *,
    D: torch.Tensor, dt_bias: torch.Tensor, cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None, out: torch.Tensor, state_dtype: torch.dtype, **_: Any,
) -> tuple[None, torch.Tensor, None]:  # fmt: skip
    """Replaces ``mamba_chunk_scan_combined``. ``x``, ``[1, tokens, heads, dim]``, holds tokens of several
    requests. Fills ``out`` and returns the requests' last states."""
    ends = cu_seqlens.tolist()
    size = len(ends) - 1, *x.shape[2:], b.shape[-1]
    states = torch.zeros(size, dtype=state_dtype)
    if initial_states is not None:
        states.copy_(initial_states)
    a = a[:, None, None]
    d = D[:, None]
    bias = dt_bias[:, None]
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        where = torch.tensor([i])
        for at in range(start, end):
            token = slice(at, at + 1)
            one = x[0, token], dt[0, token, :, None], a, b[0, token], c[0, token], d
            scan_one(states, *one, dt_bias=bias, state_batch_indices=where, out=out[0, token])
    return None, states, None


def gated_delta_rule(
    self: Any, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Replaces ``forward_decode`` and ``forward_extend`` of ``GDNAttnBackend`` (a decay for each head) and of
    ``KDAAttnBackend`` (a decay for each dim of keys). Returns ``[1, tokens, heads, dim]``."""
    pool = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    meta = self.forward_metadata
    tokens = len(mixed_qkv)
    slots = meta.mamba_cache_indices
    weight = layer.conv_weights
    weight = weight.view(len(weight), -1)
    conv = pool.conv[0]
    mode = forward_batch.forward_mode
    decodes = mode.is_decode()
    verifies = mode.is_target_verify()
    turned = conv.shape[2] == len(weight)  # KDA's pool is [slots, width - 1, dim]
    conv = conv.transpose(1, 2) if turned else conv
    links = (meta.retrieve_next_token, meta.retrieve_next_sibling) if verifies else (None, None)
    fresh = [False] * len(slots)
    if verifies:
        drafted = forward_batch.spec_info.draft_token_num
        windows = pool.intermediate_conv_window[0]
        mixed = convolve_one(
            mixed_qkv.view(len(slots), drafted, -1).transpose(1, 2), conv, weight, layer.bias, "silu",
            conv_state_indices=slots, retrieve_next_token=links[0], retrieve_next_sibling=links[1],
            intermediate_conv_window=windows.transpose(2, 3) if turned else windows,
        ).transpose(1, 2).reshape(tokens, -1)  # fmt: skip
    elif decodes:
        mixed = convolve_one(mixed_qkv, conv, weight, layer.bias, "silu", conv_state_indices=slots)
    else:
        fresh = [before == 0 for before in forward_batch.extend_prefix_lens_cpu]
        mixed = convolve(
            mixed_qkv.T, weight, layer.bias, query_start_loc=meta.query_start_loc,
            cache_indices=slots, has_initial_state=~torch.tensor(fresh), conv_states=conv,
        ).T  # fmt: skip
    q, k, v = (part.float() for part in mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1))
    times = layer.num_v_heads // layer.num_k_heads
    unit = [
        F.normalize(part.view(tokens, layer.num_k_heads, -1), dim=-1, eps=1e-6)
        for part in (q * 1.0, k * 1.0)
    ]
    q, k = (part.repeat_interleave(times, dim=1) for part in unit)
    q = q * layer.head_k_dim**-0.5
    v = v.view(tokens, layer.num_v_heads, -1)
    heads = layer.num_v_heads
    b = b.reshape(tokens, -1).float()
    forget = a.reshape(tokens, heads, -1).float() + layer.dt_bias.float().view(heads, -1)
    decay = (-layer.A_log.float().exp().view(heads, 1) * F.softplus(forget)).exp()
    states = pool.temporal[slots.long()].float()
    states[torch.tensor(fresh)] = 0.0
    out = torch.empty_like(v)

    def learn(step: Any, state: torch.Tensor) -> torch.Tensor:
        state = state * decay[step][:, :, None]
        told = v[step] - (state * k[step][:, :, None]).sum(dim=-1)
        state = state + (b[step].sigmoid()[..., None] * told)[..., None] * k[step][:, :, None]
        out[step] = (state * q[step][:, :, None]).sum(dim=-1)
        return state

    if verifies:
        parents = _parents(len(slots), drafted, *links)
        for at in range(drafted):
            state = _after(parents[:, at], states, pool.intermediate_ssm).float()
            state = learn(torch.arange(len(slots)) * drafted + at, state)
            pool.intermediate_ssm[: len(slots), at] = state.to(pool.temporal.dtype)
        return out.to(mixed_qkv.dtype)[None]
    if decodes:
        states = learn(slice(None), states)
    else:
        ends = meta.query_start_loc.tolist()
        copies = _copies(self, forward_batch, ends)
        for step in _tokens(ends):
            of = [_request(ends, step.start)]
            states[of] = learn(step, states[of])
            if step.stop in copies:
                to = copies[step.stop]
                before = conv.shape[2]
                pool.temporal[to] = states[of[0]].to(pool.temporal.dtype)
                conv[to] = mixed_qkv[step.stop - before : step.stop].T.to(conv.dtype)
    pool.temporal[slots.long()] = states.to(pool.temporal.dtype)
    if decodes and forward_batch.mamba_track_mask is not None:
        chosen = forward_batch.mamba_track_mask.nonzero().flatten()
        to = meta.mamba_track_indices.long()[chosen]
        of = slots.long()[chosen]
        pool.temporal[to] = pool.temporal[of]
        conv[to] = conv[of]
    return out.to(mixed_qkv.dtype)[None]


def _copies(backend: Any, batch: Any, ends: Sequence[int]) -> dict[int, int]:
    """The tokens of a prefill after which SGLang wants a copy of the state -> the copy's slot."""
    if not backend.forward_metadata.has_mamba_track_mask:
        return {}
    chunk = backend.mamba_chunk_size
    found = {}
    for request in batch.mamba_track_mask.nonzero().flatten().tolist():
        length = int(batch.mamba_track_seqlens[request]) - batch.extend_prefix_lens_cpu[request]
        found[ends[request] + length // chunk * chunk] = int(batch.mamba_track_indices[request])
    return found


def _tokens(ends: Sequence[int]) -> list[slice]:
    return [slice(at, at + 1) for at in range(ends[-1])]


def _request(ends: Sequence[int], token: int) -> int:
    return sum(end <= token for end in ends[1:])


def add_gated(x: torch.Tensor, gate: torch.Tensor, one: torch.Tensor, total: torch.Tensor) -> None:
    """Replaces ``fused_gate_sigmoid_mul_add``, with which Qwen3-Next adds the output of its shared expert."""
    total += (x @ gate).sigmoid()[:, None] * one


def gated_norm(self: Any, x: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Replaces ``FusedRMSNormGated.forward`` (Qwen3-Next, Kimi-Linear) and ``RMSNorm.forward`` (Qwen3.5)."""
    gate = torch.sigmoid if self.activation == "sigmoid" else F.silu
    unit = x.float() * (x.float().square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
    return (unit * self.weight.float() * gate(g.float())).to(x.dtype)
