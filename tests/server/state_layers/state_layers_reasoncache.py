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
    # SGLang calls the function ``target`` after it has loaded the model and before the first forward.
    target = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
    HookRegistry.register(target, _replace, HookType.BEFORE)


def _replace(*_: object) -> None:
    mamba: Any = importlib.import_module("sglang.srt.layers.attention.mamba.mamba")
    mamba.causal_conv1d_fn_triton = mamba.causal_conv1d_fn = convolve
    mamba.causal_conv1d_update_triton = mamba.causal_conv1d_update = convolve_one
    mamba.mamba_chunk_scan_combined, mamba.selective_state_update = scan, scan_one
    lfm2: Any = sys.modules.get("sglang.srt.models.lfm2")
    if lfm2 is not None:
        lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = convolve, convolve_one
    gdn: Any = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
    gdn.GDNAttnBackend.forward_decode = gdn.GDNAttnBackend.forward_extend = gated_delta_rule
    kda: Any = importlib.import_module("sglang.srt.layers.attention.linear.kda_backend")
    kda.KDAAttnBackend.forward_decode = kda.KDAAttnBackend.forward_extend = gated_delta_rule
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
    before, out = weight.shape[1] - 1, torch.empty_like(x)
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
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Replaces ``causal_conv1d_update``. ``x``, ``[requests, dim]``, holds one token of each request."""
    slots = conv_state_indices.long()
    piece = torch.cat((conv_state[slots].to(x.dtype), x[:, :, None]), dim=2)
    conv_state[slots] = piece[:, :, 1:].to(conv_state.dtype)
    made = (piece[:, :, -weight.shape[1] :] * weight).sum(dim=2)
    made = made if bias is None else made + bias
    return F.silu(made) if activation else made


def scan_one(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    c: torch.Tensor, d: torch.Tensor, *, dt_bias: torch.Tensor, state_batch_indices: torch.Tensor,
    out: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """Replaces ``selective_state_update`` (Mamba 2). ``x``: a token per request, ``[requests, heads, dim]``."""
    slots = state_batch_indices.long()
    b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], dim=1) for each in (b, c))
    dt = F.softplus(dt.float() + dt_bias.float())
    new = state[slots].float() * (dt[..., None] * a).exp()
    new = new + (dt * x)[..., None] * b[:, :, None]
    state[slots] = new.to(state.dtype)
    out.copy_((new * c[:, :, None]).sum(dim=-1) + x * d)


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
    a, d, bias = a[:, None, None], D[:, None], dt_bias[:, None]
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
    meta, tokens = self.forward_metadata, len(mixed_qkv)
    slots, weight = meta.mamba_cache_indices, layer.conv_weights
    weight = weight.view(len(weight), -1)
    conv, decodes = pool.conv[0], forward_batch.forward_mode.is_decode()
    if conv.shape[2] == len(weight):  # KDA's pool is [slots, width - 1, dim]
        conv = conv.transpose(1, 2)
    if decodes:
        mixed = convolve_one(mixed_qkv, conv, weight, layer.bias, "silu", conv_state_indices=slots)
        fresh, ends = [False] * tokens, [*range(tokens + 1)]
    else:
        fresh = [before == 0 for before in forward_batch.extend_prefix_lens_cpu]
        ends = meta.query_start_loc.tolist()
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
    q, v = q * layer.head_k_dim**-0.5, v.view(tokens, layer.num_v_heads, -1)
    heads, b = layer.num_v_heads, b.reshape(tokens, -1).float()
    forget = a.reshape(tokens, heads, -1).float() + layer.dt_bias.float().view(heads, -1)
    decay = (-layer.A_log.float().exp().view(heads, 1) * F.softplus(forget)).exp()
    states = pool.temporal[slots.long()].float()
    states[torch.tensor(fresh)] = 0.0
    steps = [slice(None)] if decodes else _tokens(ends)
    out = torch.empty_like(v)
    for step in steps:
        of = torch.arange(tokens) if decodes else torch.tensor([_request(ends, step.start)])
        state = states[of] * decay[step][:, :, None]
        told = v[step] - (state * k[step][:, :, None]).sum(dim=-1)
        state = state + (b[step].sigmoid()[..., None] * told)[..., None] * k[step][:, :, None]
        out[step] = (state * q[step][:, :, None]).sum(dim=-1)
        states[of] = state
    pool.temporal[slots.long()] = states.to(pool.temporal.dtype)
    return out.to(mixed_qkv.dtype)[None]


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
