# SPDX-License-Identifier: Apache-2.0
"""Builds the untrained model, the tokenizer and the chat template of the tiny reasoner; saves checkpoints."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from eval.tiny_reasoner.task import ASSISTANT, EOS, PAD, USER, VOCABULARY

TOKEN_ID = {token: i for i, token in enumerate(VOCABULARY)}
MAX_NEW_TOKENS = 1024


def chat_template(gap: str) -> str:
    """A chat template. For each message it writes a marker of the role, ``gap``, the content and ``gap``."""
    turn = f"('{USER}{gap}' if m['role'] == 'user' else '{ASSISTANT}{gap}') + m['content']"
    return (
        f"{{%- for m in messages -%}}{{{{- {turn} + '{gap}' -}}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
    )


def encode(words: list[str]) -> list[int]:
    return [TOKEN_ID[w] for w in words]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each word. Decoding joins words with one space."""
    inner = Tokenizer(models.WordLevel(dict(TOKEN_ID), unk_token=PAD))
    # "\n\n" becomes a word of its own even if a client has stripped the spaces around it.
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n\n", "isolated"), pre_tokenizers.Split(Regex(" +"), "removed")]
    )
    marks = dict(eos_token=EOS, pad_token=PAD, padding_side="left")
    how: dict[str, Any] = dict(clean_up_tokenization_spaces=False, model_max_length=2048)
    how["chat_template"] = chat_template(" ")
    return PreTrainedTokenizerFast(tokenizer_object=inner, **marks, **how)


def build_model() -> Qwen3ForCausalLM:
    sizes: dict[str, Any] = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4)
    # 64 is the smallest head size that all common GPU attention kernels support.
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    # The vocabulary is padded to a multiple of 64, which suits tensor-parallel serving.
    sizes |= dict(vocab_size=-(-len(VOCABULARY) // 64) * 64, max_position_embeddings=2048)
    ends = dict(bos_token_id=None, eos_token_id=TOKEN_ID[EOS], pad_token_id=TOKEN_ID[PAD])
    config = Qwen3Config(**sizes, **ends, rope_theta=10000.0, tie_word_embeddings=True)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                # The default standard deviation, 0.02, suits wide models, but makes this model learn slowly.
                std = 0.05 if "embed" in name else 0.7 / math.sqrt(p.shape[1])
                torch.nn.init.normal_(p, std=std)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_(0.35)
    return model


def save_checkpoint(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write the model (in bf16), its tokenizer and its generation defaults to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    out = copy.deepcopy(model).to(torch.bfloat16)
    out.config.dtype = "bfloat16"
    ends = dict(eos_token_id=TOKEN_ID[EOS], pad_token_id=TOKEN_ID[PAD])
    longest: dict[str, Any] = dict(do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    out.generation_config = GenerationConfig(**ends, **longest)
    out.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
