# SPDX-License-Identifier: Apache-2.0
"""Reads the bytes of every token id once, so that steps of reasoning can be decoded without the tokenizer.

Vocabularies store tokens in several ways (byte-level alphabets, ``▁`` and ``<0x0A>``, ``##``), and a token's
text may depend on its neighbours. This module first takes each token's bytes from XGrammar, joins them for a
few hundred sequences, and compares these texts with the tokenizer's ``decode``. If XGrammar fails or any text
differs, the module also asks the library inside the tokenizer (tiktoken, mistral-common), then ``decode``, for
each token's bytes, and keeps what differs least. An id that cannot be decoded has no bytes.

Joined bytes may differ from ``decode`` in three ways that do not matter for steps: the space that some
tokenizers leave out at the start of a text, ``clean_up_tokenization_spaces`` across tokens (``do n't``), and
the number of U+FFFD in place of bytes that are not UTF-8.
"""

import contextlib
import logging
import random
import re
from collections.abc import Callable, Iterable, Sequence
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
    the tokens 0, 1, 2, ...; empty for an id without a token. Without any pieces no text is known."""

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
        ValueError: The object decodes no text, or all ways of reading its tokens fail.
    """
    kind = type(tokenizer).__name__
    try:
        size = _size(tokenizer)
        texts = _decoded(tokenizer, _texts(tokenizer))
        others = _decoded(tokenizer, _drawn(tokenizer, size))
    except Exception as error:
        # The code of a custom tokenizer may raise anything.
        raise ValueError(f"cannot read the tokens of {kind}: {error}") from error
    if not texts and not others:
        raise ValueError(f"cannot read the tokens of {kind}: its decode fails")
    # For each way of reading: how many (sample texts, sequences in all) differ, its name, its vocabulary.
    readings: list[tuple[tuple[int, int], str, Vocabulary]] = []
    for route in (_by_bytes, _by_library, _by_context):
        try:
            vocabulary = Vocabulary(route(tokenizer, size))
            wrong_texts, wrong_others = (
                sum(_comparable(vocabulary.text(ids)) != text for ids, text in sequences)
                for sequences in (texts, others)
            )
        except Exception as error:
            logger.debug("reasoncache: %s of %s: %s", route.__name__, kind, error)
            continue
        # The sample texts count first, because no model writes ids in random order.
        readings.append(((wrong_texts, wrong_texts + wrong_others), route.__name__, vocabulary))
        if not wrong_texts + wrong_others:
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
        len(texts) + len(others),
    )
    return vocabulary


def _size(tokenizer: Any) -> int:
    """The largest id plus 1, added tokens included."""
    size = _largest(
        lambda: max(tokenizer.get_vocab().values()) + 1, lambda: len(tokenizer)
    ) or _largest(lambda: tokenizer.vocab_size, lambda: tokenizer.n_vocab)
    if size < 1:
        raise ValueError("it does not tell how many there are")
    return size


def _largest(*ways: Callable[[], Any]) -> int:
    """The largest size that one of ``ways`` tells. 0 if none does."""
    sizes = [0]
    for way in ways:
        with contextlib.suppress(Exception):
            sizes.append(int(way()))
    return max(sizes)


def _texts(tokenizer: Any) -> list[list[int]]:
    """The sample texts as tokens, those that can be encoded."""
    texts = []
    for text in _SAMPLES:
        with contextlib.suppress(Exception):
            texts.append(list(tokenizer.encode(text, add_special_tokens=False)))
    return texts


def _drawn(tokenizer: Any, size: int) -> list[list[int]]:
    """Random token sequences to decode for the comparison."""
    rng = random.Random(size)
    drawn = [[rng.randrange(size) for _ in range(_RANDOM_LENGTH)] for _ in range(_NUM_RANDOM)]
    # Added tokens are few but matter, because the markers of reasoning are among them.
    added = sorted(_added(tokenizer))[:_NUM_RANDOM]
    return drawn + [[rng.randrange(size), i, rng.randrange(size)] for i in added]


def _decoded(tokenizer: Any, sequences: list[list[int]]) -> list[tuple[list[int], str]]:
    """Those of ``sequences`` that can be decoded, each with its text for the comparison."""
    pairs = []
    for ids in sequences:
        with contextlib.suppress(Exception):
            pairs.append((ids, _comparable(_decode(tokenizer, ids))))
    return pairs


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _comparable(text: str) -> str:
    """``text`` without leading spaces, and with one U+FFFD for several in a row."""
    return _UNDECODABLE.sub("\ufffd", text.lstrip(" "))


def _added(tokenizer: Any) -> dict[int, str]:
    """The text of each added or special token, by id. Unlike other tokens, these are stored as plain text."""
    with contextlib.suppress(Exception):
        entries = tokenizer.added_tokens_decoder.items()
        return {int(i): str(getattr(token, "content", token)) for i, token in entries}
    # mistral-common has special tokens only, and its attribute of that name is a method that raises.
    special = {}
    for i in getattr(tokenizer, "all_special_ids", ()):
        with contextlib.suppress(Exception):
            special[int(i)] = _decode(tokenizer, [i])
    return special


def _by_bytes(tokenizer: Any, size: int) -> list[bytes]:
    """The exact bytes of each token, from XGrammar, which every SGLang installation has."""
    from xgrammar import TokenizerInfo

    stop = [getattr(tokenizer, "eos_token_id", None) or 0]
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=stop)
    return _with_added(tokenizer, info.decoded_vocab)


def _by_library(tokenizer: Any, size: int) -> list[bytes]:
    """The exact bytes of each token, from the library that the tokenizer wraps: tiktoken or mistral-common."""
    inner = tokenizer.tokenizer
    if hasattr(inner, "instruct_tokenizer"):
        bytes_of = inner.instruct_tokenizer.tokenizer.id_to_byte_piece
    else:
        bytes_of = inner.decode_single_token_bytes
    return _with_added(tokenizer, [_or_nothing(bytes_of, i) for i in range(size)])


def _with_added(tokenizer: Any, pieces: list[bytes]) -> list[bytes]:
    for i, content in _added(tokenizer).items():
        if i < len(pieces):
            pieces[i] = content.encode("utf-8", errors="replace")
    return pieces


def _or_nothing(bytes_of: Callable[[int], bytes], i: int) -> bytes:
    """The bytes of the token ``i``; empty if it cannot be decoded, such as an id in a gap of the vocabulary."""
    try:
        return bytes_of(i)
    except Exception:
        return b""


def _by_context(tokenizer: Any, size: int) -> list[bytes]:
    """For each token, the bytes that ``decode`` adds when the token follows a word, letter or digit."""
    words = (
        int(i)
        for text in ("so", "a", "x", "1")
        for i in reversed(tokenizer.encode(text, add_special_tokens=False))
    )
    anchor = next(i for i in words if _decode(tokenizer, [i]).strip().isalnum())
    before = _decode(tokenizer, [anchor])

    def bytes_of(i: int) -> bytes:
        text = _decode(tokenizer, [anchor, i])
        text = text[len(before) :] if text.startswith(before) else _decode(tokenizer, [i])
        return text.encode()

    return [_or_nothing(bytes_of, i) for i in range(size)]
