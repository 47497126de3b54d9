# SPDX-License-Identifier: Apache-2.0
"""How far the blocks of two similar steps are apart, in every layer, in a local model's KV.

The forward pass is Hugging Face's on the CPU; steps, candidates and aligned blocks are
the filter's own, and so are the sums of squares behind the distance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eval.tokenizers import TokenizerError, load_tokenizer
from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.vocabulary import Vocabulary

#: Longer sequences are cut: the picture needs two steps, not the end of a response.
MAX_TOKENS = 4096
#: A model whose weights are larger is only run if asked for by name.
MAX_WEIGHT_BYTES = 4 << 30
_MAX_STARTS = 64
_MAX_LAYERS = 4
_WAVE = 256


class HeatmapError(ValueError):
    """There is no picture; the message says why."""


@dataclass(frozen=True)
class StepPair:
    """Two similar steps, as positions in the sequence.

    Attributes:
        later, earlier: [start, end) of either.
        block: tokens a block.
        aligned: first tokens of the blocks that the filter pairs, (later, earlier).
        similarity: as stage 1 has it.
    """

    later: tuple[int, int]
    earlier: tuple[int, int]
    block: int
    aligned: list[tuple[int, int]]
    similarity: float


@dataclass(frozen=True)
class Heatmap:
    """Distances of all blocks of a later step to all of an earlier one.

    Attributes:
        pair: the steps.
        layers: numbers of the layers shown, of ``num_layers``.
        starts: first tokens of the blocks, of the later and the earlier step.
        sides: by "K as cached", "K at the later position" (absent where the model's
            rotation is not known) and "V": ``[layers, later, earlier]``, in the papers'
            units ``||x - y|| / (2 d h)``.
        prompt_tokens: in front of the response; 0 if it went without its prompt.
    """

    pair: StepPair
    layers: list[int]
    num_layers: int
    starts: tuple[list[int], list[int]]
    sides: dict[str, npt.NDArray[np.float64]]
    prompt_tokens: int


def weight_bytes(folder: Path) -> int:
    """Size of the weights in a model's folder."""
    return sum(f.stat().st_size for s in ("safetensors", "bin") for f in folder.glob(f"*.{s}"))


def measure(folder: Path, texts: Sequence[tuple[str, str]], block: int) -> Heatmap:
    """The two steps that stage 1 pairs most of, and their distances.

    Args:
        folder: a Hugging Face model with its tokenizer.
        texts: user message ("" if it is not known) and response, to choose from.
        block: tokens a block.

    Raises:
        HeatmapError: no such pair, or a model that this cannot run.
    """
    from sglang_reasoncache.filter.tokenizer_bytes import vocabulary_of

    try:
        tokenizer = load_tokenizer(str(folder), local=True)
    except TokenizerError as error:
        raise HeatmapError(str(error)) from error
    vocabulary = vocabulary_of(tokenizer)
    classes = TokenClasses(vocabulary)
    best: tuple[list[int], int, StepPair] | None = None
    for prompt, response in texts:
        before, tokens = _tokens(tokenizer, prompt, response)
        pair = choose(tokens, len(before), block, vocabulary, classes)
        if pair and (best is None or len(pair.aligned) > len(best[2].aligned)):
            best = ([*before, *tokens][: pair.later[1]], len(before), pair)
    if best is None:
        raise HeatmapError(f"no two steps of {len(texts)} responses share a block of {block}")
    return _distances(folder, *best)


def choose(
    tokens: Sequence[int], offset: int, block: int, vocabulary: Vocabulary, classes: TokenClasses
) -> StepPair | None:
    """The two steps that share the most aligned blocks; the filter's defaults but for ``block``."""
    request = RequestFilter(FilterConfig(block=block), classes, vocabulary, offset)
    spans: list[tuple[int, int]] = []
    best: StepPair | None = None
    for proposal in request.push(tokens):
        by_source: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for pair in proposal.pairs:
            source = next((s for s in spans if s[0] <= pair.src_start < s[1]), None)
            if source is not None:
                by_source.setdefault(source, []).append((pair.dst_start, pair.src_start))
        span = proposal.step.start, proposal.step.start + len(proposal.step.token_ids)
        for source, aligned in by_source.items():
            if best is None or len(aligned) > len(best.aligned):
                similarity = next(
                    pair.similarity for pair in proposal.pairs if pair.src_start == aligned[0][1]
                )
                best = StepPair(span, source, block, aligned, similarity)
        spans.append(span)
    return best


def _tokens(tokenizer: Any, prompt: str, response: str) -> tuple[list[int], list[int]]:
    before: list[int] = []
    if prompt and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    after = tokenizer.encode(response, add_special_tokens=False, verbose=False)
    return before[:MAX_TOKENS], after[: max(0, MAX_TOKENS - len(before))]


def _distances(folder: Path, tokens: list[int], prompt_tokens: int, pair: StepPair) -> Heatmap:
    import torch

    from sglang_reasoncache.kernels.distance import DistanceKernel

    layers, rotation = _key_values(folder, tokens)
    heads, block = layers[0][0].shape[1], pair.block
    starts = _starts(pair.later, block), _starts(pair.earlier, block)
    shown = sorted({round(i) for i in np.linspace(0, len(layers) - 1, _MAX_LAYERS)})
    kernel = DistanceKernel([layers[i] for i in shown], rotation, backend="torch")
    offsets = torch.arange(block)
    both = torch.tensor(list(itertools.product(*starts)))
    found: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for wave in both.split(_WAVE):
        dst, src = (wave[:, i, None] + offsets for i in (0, 1))
        found[False].append(kernel.squares(dst, src, None))
        if rotation is not None:
            found[True].append(kernel.squares(dst, src, (dst - src).int()))
    shape = len(starts[0]), len(starts[1]), len(shown)

    def side(moved: bool, column: int) -> npt.NDArray[np.float64]:
        squares = torch.cat(found[moved])[..., column]
        scaled = squares.sqrt() / (2 * block * heads)
        return np.moveaxis(scaled.numpy().reshape(shape), -1, 0)

    sides = {"K as cached": side(False, 0)}
    if rotation is not None:
        sides["K at the later position"] = side(True, 0)
    sides["V"] = side(False, 1)
    return Heatmap(pair, shown, len(layers), starts, sides, prompt_tokens)


def _starts(span: tuple[int, int], block: int) -> list[int]:
    """First tokens of blocks inside a step, every one or evenly thinned out."""
    number = span[1] - span[0] - block + 1
    return list(range(span[0], span[0] + number, -(-number // _MAX_STARTS)))


def _key_values(folder: Path, tokens: list[int]) -> tuple[list[tuple[Any, Any]], Any]:
    """Keys and values ``[tokens, heads, head_dim]`` of every layer, and the keys' rotation."""
    import torch
    from transformers import AutoModel

    try:
        # Without the language model's head: nobody reads the logits.
        model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        with torch.inference_mode():
            cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
        layers = [
            (layer.keys[0].transpose(0, 1).clone(), layer.values[0].transpose(0, 1).clone())
            for layer in cache.layers
        ]
    except Exception as error:
        # Foreign models fail in as many ways as there are kinds of them.
        raise HeatmapError(f"{folder}: forward pass failed: {_first_line(error)}") from error
    if not layers or any(keys.shape[0] != len(tokens) for keys, _ in layers):
        raise HeatmapError(f"{folder}: not every layer keeps all keys and values")
    return layers, _rotation(model, len(tokens), layers[0][0].shape[2])


def _rotation(model: Any, positions: int, head_dim: int) -> Any:
    """None where the model has no plain rotary embedding of its own."""
    import torch

    from sglang_reasoncache.kernels.rotation import KeyRotation

    inverse = getattr(getattr(model, "rotary_emb", None), "inv_freq", None)
    if not isinstance(inverse, torch.Tensor) or 2 * len(inverse) > head_dim:
        return None
    angles = torch.outer(torch.arange(positions).float(), inverse.float())
    return KeyRotation(torch.cat((angles.cos(), angles.sin()), -1), 2 * len(inverse), True)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
