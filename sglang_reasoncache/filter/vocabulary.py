# SPDX-License-Identifier: Apache-2.0
"""Reads the bytes of every token id once, so that steps of reasoning can be decoded without the tokenizer.

Vocabularies store tokens in several ways (byte-level alphabets, ``▁`` and ``<0x0A>``, ``##``), and a token's
text may depend on its neighbours. This module first takes each token's bytes from XGrammar, joins them for a
few hundred sequences, and compares these texts with the tokenizer's ``decode``. If XGrammar fails or any text
differs, the module also gets each token's bytes from ``decode``, and keeps whichever of the two differs less.

Joined bytes may differ from ``decode`` in three ways that do not matter for steps: the space that some
tokenizers leave out at the start of a text, ``clean_up_tokenization_spaces`` across tokens (``do n't``), and
the number of U+FFFD in place of bytes that are not UTF-8.
"""

import logging
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_SAMPLES = (
    "Let me think. We have x + 1 = 2, so x = 1.\n\nWait, 3 + 4 = 7?  \n \nYes.\n\n\n",
    "<think>\nOkay, so \\( \\frac{1}{2} \\) and $x^2$ it is: (a, b).\n\n</think>\n\n**Answer** \\boxed{5}",
    "```python\ndef f(x):\n    return x + 1\n\n\tprint('don\\'t')\n```\r\n\r\nDone!",
    "Ünïcödé — 数学です, e\u0301, 😀👩‍🔬 ≤ √2 · ½.\n\n它是 10 000 000.\n",
)
_NUM_RANDOM = 256
_RANDOM_LENGTH = 6
_UNDECODABLE = re.compile("\ufffd+")


class Vocabulary:
    """The bytes of each token id. A text is the concatenation of its tokens' bytes. ``pieces``: bytes of
    the tokens 0, 1, 2, ...; empty for an id without a token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        # XGrammar has its own bytes class, and unpickling it would import torch in the filter process.
        self.pieces = tuple(map(bytes, pieces))

    def text(self, token_ids: Iterable[int]) -> str:
        """The decoded text. Bytes that are no UTF-8 become U+FFFD. Unknown ids add nothing."""
        pieces = self.pieces
        size = len(pieces)
        joined = b"".join([pieces[i] for i in token_ids if 0 <= i < size])
        return joined.decode("utf-8", errors="replace")


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a Hugging Face tokenizer, or of an object that behaves like one. Reading
    150 000 tokens takes one second, or two if they must also be read through ``decode``.

    Raises:
        ValueError: The object cannot encode or decode a text, or both ways of reading its tokens fail.
    """
    kind = type(tokenizer).__name__
    try:
        size = _size(tokenizer)
        sequences, num_texts = _sequences(tokenizer, size)
        decoded = [_comparable(_decode(tokenizer, ids)) for ids in sequences]
    except Exception as error:
        # The code of a custom tokenizer may raise anything.
        raise ValueError(f"cannot read the tokens of {kind}: {error}") from error
    # For each way of reading: how many (sample texts, sequences in all) differ, its name, its vocabulary.
    readings: list[tuple[tuple[int, int], str, Vocabulary]] = []
    for route in (_by_bytes, _by_context):
        try:
            vocabulary = Vocabulary(route(tokenizer, size))
        except Exception as error:
            logger.debug("reasoncache: %s of %s: %s", route.__name__, kind, error)
            continue
        texts = (_comparable(vocabulary.text(ids)) for ids in sequences)
        wrong = [i for i, text in enumerate(texts) if text != decoded[i]]
        # The sample texts count first, because no model writes ids in random order.
        readings.append(
            ((sum(i < num_texts for i in wrong), len(wrong)), route.__name__, vocabulary)
        )
        if not wrong:
            break
    if not readings:
        raise ValueError(f"cannot read the tokens of {kind}")
    (wrong_texts, total), name, vocabulary = min(readings, key=lambda reading: reading[0])
    logger.log(
        logging.WARNING if wrong_texts else logging.INFO,
        "reasoncache: %d tokens of %s read %s, %d of %d sequences differ from its decode",
        size,
        kind,
        name.strip("_").replace("_", " "),
        total,
        len(sequences),
    )
    return vocabulary


def _size(tokenizer: Any) -> int:
    """The largest id plus 1, added tokens included."""
    ids = tokenizer.get_vocab().values() if hasattr(tokenizer, "get_vocab") else ()
    return max((*ids, -1, len(tokenizer) - 1 if hasattr(tokenizer, "__len__") else -1)) + 1


def _sequences(tokenizer: Any, size: int) -> tuple[list[list[int]], int]:
    """Token sequences to decode for the comparison, sample texts first, and the number of sample texts."""
    texts = [list(tokenizer.encode(text, add_special_tokens=False)) for text in _SAMPLES]
    rng = random.Random(size)
    drawn = [[rng.randrange(size) for _ in range(_RANDOM_LENGTH)] for _ in range(_NUM_RANDOM)]
    # Added tokens are few but matter, because the markers of reasoning are among them.
    added = sorted(_added(tokenizer))[:_NUM_RANDOM]
    drawn += [[rng.randrange(size), i, rng.randrange(size)] for i in added]
    return texts + drawn, len(texts)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _comparable(text: str) -> str:
    """``text`` without leading spaces, and with one U+FFFD for several in a row."""
    return _UNDECODABLE.sub("\ufffd", text.lstrip(" "))


def _added(tokenizer: Any) -> dict[int, str]:
    """The text of each added or special token, by id. Unlike other tokens, these are stored as plain text."""
    entries = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {int(i): str(getattr(token, "content", token)) for i, token in entries.items()}


def _by_bytes(tokenizer: Any, size: int) -> list[bytes]:
    """The exact bytes of each token, from XGrammar, which every SGLang installation has."""
    from xgrammar import TokenizerInfo

    stop = [getattr(tokenizer, "eos_token_id", None) or 0]
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=stop)
    pieces = info.decoded_vocab
    for i, content in _added(tokenizer).items():
        if i < size:
            pieces[i] = content.encode("utf-8", errors="replace")
    return pieces


def _by_context(tokenizer: Any, size: int) -> list[bytes]:
    """For each token, the bytes that ``decode`` adds when the token follows a word, letter or digit."""
    words = (
        int(i)
        for text in ("so", "a", "x", "1")
        for i in reversed(tokenizer.encode(text, add_special_tokens=False))
    )
    anchor = next(i for i in words if _decode(tokenizer, [i]).strip().isalnum())
    before = _decode(tokenizer, [anchor])
    texts = (_decode(tokenizer, [anchor, i]) for i in range(size))
    return [
        (text[len(before) :] if text.startswith(before) else _decode(tokenizer, [i])).encode()
        for i, text in enumerate(texts)
    ]
