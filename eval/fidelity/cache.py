# SPDX-License-Identifier: Apache-2.0
"""A KV cache whose entries can be edited, for use with transformers' own model code."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, Cache

from sglang_reasoncache.kernels.rotation import KeyRotation

_NAME = "editable_cache"
_CHUNK = 256  # tokens of one forward of a prefill
#: Called with a layer's number, its rotated queries ``[heads, tokens, head_dim]`` and its fp32 attention
#: weights ``[KV heads, query heads per KV head, tokens, positions]``.
Watch = Callable[[int, torch.Tensor, torch.Tensor], None]
#: Called with a layer's number and one row's rotated queries ``[heads, tokens, head_dim]``, keys ``[KV heads,
#: positions, head_dim]`` and mask, bool ``[tokens, positions]``. Returns the mask of each head, bool ``[heads,
#: tokens, positions]``.
Visible = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EditableCache(Cache):
    """KV of a batch. All rows get the same tokens, but each row may be edited differently. ``keys`` (after
    rotary embedding) and ``values`` have the shape ``[layers, rows, heads, capacity, head_dim]``. ``visible``
    has the shape ``[rows, capacity]``, and is false for positions that attention must skip."""

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self._shape = layers, rows, capacity
        self.keys = self.values = torch.empty(0)
        self.visible = torch.ones(rows, capacity, dtype=torch.bool, device=device)
        # rows in use, positions written
        self.rows = 1
        self.length = 0
        self.at: torch.Tensor | None = None  # positions to overwrite; None: new KV is appended
        self.rounded: dict[int, torch.dtype] = {}  # row -> fp8 dtype to which its new KV is rounded
        self.by_head: dict[int, Visible] = {}  # row -> what each of its heads may read

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new K and V, ``[rows, heads, tokens, head_dim]``; returns the layer's K and V so far."""
        if not len(self.keys):
            layers, rows, capacity = self._shape
            self.keys, self.values = (
                new.new_zeros(layers, rows, new.shape[1], capacity, new.shape[3])
                for new in (key_states, value_states)
            )
        if self.at is not None:
            keys, values = (
                all_[layer_idx, : self.rows, :, : self.length] for all_ in (self.keys, self.values)
            )
            keys[:, :, self.at] = key_states
            values[:, :, self.at] = value_states
            return keys, values
        end = self.length + key_states.shape[2]
        keys, values = (all_[layer_idx, : self.rows, :, :end] for all_ in (self.keys, self.values))
        keys[:, :, self.length :] = key_states
        values[:, :, self.length :] = value_states
        for row, dtype in self.rounded.items():
            for new in (keys[row, :, self.length :], values[row, :, self.length :]):
                new.copy_(new.to(dtype))
        return keys, values

    def branch(self) -> int:
        """Add a row that is a copy of row 0; return its number."""
        row = self.rows
        self.rows = self.rows + 1
        for all_ in (self.keys, self.values) if self.length else ():
            all_[:, row, :, : self.length] = all_[:, 0, :, : self.length]
        return row

    def redirect(
        self,
        row: int,
        reads: Sequence[tuple[int, int]],
        rotation: KeyRotation | None,
        lender: tuple["EditableCache", int] | None = None,
    ) -> None:
        """For each ``(position, source position)`` of ``reads``, copy K and V from the source to the position.
        The source is in this row or in ``lender`` (cache, row). If rotation is None, keys are not rotated."""
        to, source = torch.tensor(reads, device=self.keys.device).T
        cache, lent = lender or (self, row)
        keys = cache.keys[:, lent, :, source]
        if rotation is not None:
            rotated = rotation.rotate(keys.transpose(1, 2), (to - source).expand(len(keys), -1))
            keys = rotated.transpose(1, 2).to(keys.dtype)
        self.keys[:, row, :, to] = keys
        self.values[:, row, :, to] = cache.values[:, lent, :, source]


class Reader:
    """Feeds tokens to a model that uses an :class:`EditableCache`. Raises ValueError if the model's attention
    or rotary embedding is not supported."""

    def __init__(self, model: Any) -> None:
        model.set_attn_implementation(_NAME)
        self.model = model.eval()
        self.device = model.device
        config = model.config.get_text_config()
        self.layers = config.num_hidden_layers
        # As transformers itself takes it: some configurations have no such field.
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        scales = (getattr(module, "scaling", None) for module in model.modules())
        #: What logits are multiplied by; None for ``head_dim ** -0.5``.
        self.scaling = next((scale for scale in scales if isinstance(scale, float)), None)
        self.rotation = self._rotation()

    def cache(self, rows: int, capacity: int) -> EditableCache:
        return EditableCache(self.layers, rows, capacity, self.device)

    @torch.no_grad()
    def forward(
        self, cache: EditableCache, tokens: Sequence[int], first: int = 0, **options: Any
    ) -> torch.Tensor:
        """Appends ``tokens``. Returns logits ``[rows, tokens, vocabulary]``. ``first`` is the position of the
        cache's first entry. The model gets ``options``, and passes ``watch`` on to :func:`_attention`."""
        end = cache.length + len(tokens)
        at = torch.arange(cache.length, end, device=self.device)
        causal = torch.arange(end, device=self.device) <= at[:, None]
        if cache.by_head:
            options["by_head"] = cache.by_head
        logits = self.model(
            input_ids=torch.tensor(tokens, device=self.device).expand(cache.rows, -1),
            attention_mask=cache.visible[: cache.rows, None, None, :end] & causal,
            position_ids=(first + at).expand(cache.rows, -1),
            past_key_values=cache,
            use_cache=True,
            **options,
        ).logits
        cache.length = end
        return logits

    def prefill(self, cache: EditableCache, tokens: Sequence[int]) -> None:
        """Appends ``tokens`` in chunks, of which no logits are needed."""
        for at in range(0, len(tokens), _CHUNK):
            self.forward(cache, tokens[at : at + _CHUNK], logits_to_keep=1)

    def unrotated(self, rotated: torch.Tensor, first: int) -> torch.Tensor:
        """Queries or keys ``[..., heads, tokens, head_dim]`` from position ``first`` on, unrotated: fp32."""
        back = -torch.arange(first, first + rotated.shape[-2], device=rotated.device)
        by_token = rotated.transpose(-3, -2)
        return self.rotation.rotate(by_token, back.expand(by_token.shape[:-2])).transpose(-3, -2)

    @torch.no_grad()
    def again(self, cache: EditableCache, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Recompute the KV of ``tokens`` at ``positions``, where the cache already has KV."""
        at = cache.at = torch.tensor(positions, device=self.device)
        causal = torch.arange(cache.length, device=self.device) <= at[:, None]
        self.model(
            input_ids=torch.tensor(tokens, device=self.device).expand(cache.rows, -1),
            attention_mask=cache.visible[: cache.rows, None, None, : cache.length] & causal,
            position_ids=at.expand(cache.rows, -1),
            past_key_values=cache,
            use_cache=True,
        )
        cache.at = None

    @torch.no_grad()
    def _rotation(self) -> KeyRotation:
        """Finds the rotation that moves keys to other positions, by trying candidates on layer 0's keys."""
        modules = [m for m in self.model.modules() if hasattr(m, "inv_freq")]
        kinds = {getattr(module, "rope_type", "default") for module in modules}
        if len(modules) != 1 or kinds & {"dynamic", "longrope"}:
            raise ValueError(f"one plain rotary embedding is needed, found {len(modules)}: {kinds}")
        longest = self.model.config.get_text_config().max_position_embeddings
        at = torch.arange(longest, device=self.device)[None]
        cos, sin = modules[0](torch.zeros(1, device=self.device), at)
        size = cos.shape[-1]
        shift = torch.full((5,), 7, device=self.device)
        tokens = range(5)
        here, there = (self.cache(1, len(tokens)) for _ in range(2))
        self.forward(here, tokens)
        self.forward(there, tokens, int(shift[0]))
        keys, wanted = (cache.keys[0, 0].transpose(0, 1).float() for cache in (here, there))
        halves = slice(size // 2)
        neighbours = slice(None, None, 2)
        for part, is_neox in ((halves, True), (halves, False), (neighbours, False)):
            table = torch.cat((cos[0, :, part], sin[0, :, part]), dim=-1)
            rotation = KeyRotation(table, size, is_neox)
            error = (rotation.rotate(keys, shift) - wanted).norm() / wanted.norm()
            if error < (1e-4 if self.model.dtype == torch.float32 else 1e-2):
                return rotation
        raise ValueError("keys cannot be rotated to another position by the model's own table")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    watch: Watch | None = None,
    by_head: Mapping[int, Visible] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the same as ``sdpa`` of transformers, without repeating KV heads. ``watch`` gets only row 0."""
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {name}, not computed here")
    if watch is not None:
        groups = query[0].float().unflatten(0, (key.shape[1], -1))
        logits = groups @ key[0].float().mT[:, None] * (scaling or key.shape[-1] ** -0.5)
        weights = logits.masked_fill(~attention_mask[0], -torch.inf).softmax(-1)
        layer: Any = module.layer_idx
        watch(layer, query[0], weights)
    if by_head:
        attention_mask = attention_mask.repeat(1, query.shape[1], 1, 1)
        for row, visible in by_head.items():
            number: Any = module.layer_idx
            attention_mask[row] = visible(number, query[row], key[row], attention_mask[row, 0])
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
