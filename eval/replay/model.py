# SPDX-License-Identifier: Apache-2.0
"""A small model for replaying recorded responses, with random weights and a tokenizer trained on the responses.

QwQ-32B in bf16 has 65.5 GB of weights and 262 KB of KV per token, a ratio of 250,000. This model's ratio is
130,000. The ratios are similar, so throughput on CPUs depends on the number of running requests as on GPUs."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from eval.tiny_reasoner.model import chat_template
from eval.tiny_reasoner.task import ASSISTANT, USER

VOCABULARY_SIZE = 16_000
CONTEXT_LENGTH = 65_536
_PAD = "<|pad|>"


def replay_config(**others: Any) -> Any:
    """A Qwen3 model with two layers, each with one KV head: 256 bytes of KV per token in bf16, 17 M parameters.
    ``others`` override these sizes, for another model with the same vocabulary."""
    # The type is Any, because transformers' annotations are too coarse for the arguments of these classes.
    config: Any = Qwen3Config
    sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=8192, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=1, head_dim=32)
    sizes |= dict(max_position_embeddings=CONTEXT_LENGTH, rope_theta=1e6, tie_word_embeddings=True)
    tokens = dict(vocab_size=VOCABULARY_SIZE, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    return config(**tokens, **(sizes | others))


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with at most :data:`VOCABULARY_SIZE` pieces. It reproduces any text exactly."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY_SIZE, show_progress=False)
    sizes["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    special = [_PAD, USER, ASSISTANT]
    inner.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=special, **sizes))
    how: dict[str, Any] = dict(eos_token=_PAD, pad_token=_PAD, model_max_length=CONTEXT_LENGTH)
    how |= dict(clean_up_tokenization_spaces=False, chat_template=chat_template(""))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **how)


def build(folder: Path, texts: Sequence[str], seed: int = 0, shape: Any = None) -> Path:
    """Write model and tokenizer into a subfolder of ``folder``, unless the subfolder is there; return its path.
    ``texts`` train the tokenizer. A hash of texts, seed and configuration names the subfolder. If ``shape``,
    another configuration, is given, no weights are written; servers then need ``--load-format dummy``."""
    config = shape or replay_config()
    key = hashlib.sha256(repr((config.to_dict(), seed)).encode())
    for text in texts:
        key.update(text.encode("utf-8", "surrogatepass"))
    home = folder / f"replay-{key.hexdigest()[:12]}"
    if home.is_dir():
        return home
    # The folder gets its final name at the end, so that an interrupted build is repeated.
    partial = home.with_name(f"{home.name}.partial")
    train_tokenizer(texts).save_pretrained(partial)
    generation: Any = GenerationConfig(eos_token_id=0, pad_token_id=0, do_sample=False)
    if shape is None:
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
        model = model.to(torch.bfloat16)
        model.config.dtype = "bfloat16"
        model.generation_config = generation
        model.save_pretrained(partial)
    else:
        config.save_pretrained(partial)
        generation.save_pretrained(partial)
    return partial.rename(home)
