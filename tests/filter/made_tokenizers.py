# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of common kinds, trained here on math, code and Unicode, and the one of ``eval/tiny_reasoner``."""

import functools
import json
from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eval.tiny_reasoner import CHECKPOINT
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of

_VOCAB_SIZE = 6000
_SPECIAL = ["<unk>", "<eos>"]
_REASONING = ["<think>", "</think>", "<\uff5ctool\u2581call\uff5c>"]

# Patterns by which byte-level BPE splits text before merging. With GPT-2's own pattern, a token has at most one
# space before visible text. ``o200k`` is the pattern of o200k_base without the rules for upper case. Its tokens
# may hold punctuation and the newlines or slashes behind it (``)\n\n\n``). With ``no_split``, a token may
# have text on both sides of a blank line.
_BYTE_LEVEL = {
    "gpt2": "",
    "o200k": r"[^\r\n\p{L}\p{N}]?\p{L}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "no_split": r".{1,12}?\n\n\p{L}+|\s|\S+",
}

TEXT = """<think>
Let me think. We have x + 1 = 2, so \\( x = 1 \\).

Wait, 3 + 4 = 7?  \n \nYes (really)!\n\n\n## Step 2: solve \\[ \\frac{a}{b} = \\sqrt{2} \\]\n\n- one\n- two:\n\t
Now the code:
```python
def f(x):
    return [x + 1 for _ in range(3)]  # don't


// see http://a.b/c

\tprint("done\\n\\n");
/* comment */


// more;\n\n//// end
```

Ünïcödé — 数学です。它是这样的。\n\n因此\uff0c答案是 5。\n\nनमस्ते e\u0301 o\u0308 and
😀 \U0001f469\u200d\U0001f52c tokens.\r\n\r\nDone ≤ √2 · ½ …
\t
Really\u2028\u2028done \u00a0\u00a0 here.\x0b\x0c\n</think>

**Answer** \\boxed{5}

"""


def _train(
    model: Any, split: Any, trainer: type, texts: list[str] | None = None, **knobs: Any
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    knobs = {"vocab_size": _VOCAB_SIZE, "special_tokens": _SPECIAL, "show_progress": False} | knobs
    tokenizer.train_from_iterator(texts or [TEXT] * 40, trainer(**knobs))
    return tokenizer


def _wrap(tokenizer: Tokenizer, decoder: Any) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoder
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.add_tokens(_REASONING, special_tokens=True)
    return fast


def _byte_level(pattern: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE. An empty pattern stands for GPT-2's own pattern."""
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    if pattern:
        isolated = pre_tokenizers.Split(Regex(pattern), "isolated")
        split = pre_tokenizers.Sequence([isolated, split])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = _train(models.BPE(), split, trainers.BpeTrainer, initial_alphabet=alphabet)
    return _wrap(trained, decoders.ByteLevel())


def llama2() -> PreTrainedTokenizerFast:
    """SentencePiece BPE, as in Llama 2. ``▁`` is a space; newlines and rare characters become byte tokens."""
    # Trained on ASCII only, because among equally rare characters the trainer chooses differently in each run.
    text = TEXT.encode("ascii", "ignore").decode().replace("\n", "").replace(" ", "▁")
    split = pre_tokenizers.Split(Regex("▁?[^▁\n]+|▁+|\n"), "isolated")
    trained = _train(models.BPE(unk_token="<unk>"), split, trainers.BpeTrainer, [text] * 40)
    model = json.loads(trained.to_str())["model"]
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    prepend = normalizers.Prepend("▁")
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([prepend, space])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.add_special_tokens(_SPECIAL)
    return _wrap(tokenizer, decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]))


_MAKERS: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(_byte_level, pattern) for name, pattern in _BYTE_LEVEL.items()},
    "llama2": llama2,
    # The word-level tokenizer of ``eval/tiny_reasoner``, with about 130 words.
    "embedded": lambda: AutoTokenizer.from_pretrained(CHECKPOINT),
}
NAMES = list(_MAKERS)


@functools.cache
def made(name: str) -> Any:
    return _MAKERS[name]()


@functools.cache
def read(name: str) -> Vocabulary:
    return vocabulary_of(made(name))
