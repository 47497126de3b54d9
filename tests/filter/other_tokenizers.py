# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that are not Hugging Face's fast ones, or whose vocabulary has gaps."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mistral_common
import sentencepiece
from sglang.srt.tokenizer.tiktoken_tokenizer import TiktokenTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_mistral_common import MistralCommonBackend

_MISTRAL_FILES = Path(mistral_common.__file__).parent / "data"
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,=+\\{}"
# Without these mistral-common loads no file.
_MISTRAL_SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]",
]  # fmt: skip


def tekken(folder: Path, markers: tuple[str, ...] = ()) -> Any:
    """A Mistral model's tokenizer with few tokens, and ``markers`` as special tokens from id 19 on."""
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [b"th", b"\n\n", b".\n\n", " 数".encode(), "数".encode()[:2]]
    vocabulary = [
        {"rank": i, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for i, piece in enumerate(pieces)
    ]
    special = [
        {"rank": i, "token_str": text, "is_control": True}
        for i, text in enumerate((*_MISTRAL_SPECIAL, *markers))
    ]
    config = {
        "pattern": r"\s*[\r\n]+|\s+|\S+[\r\n]*",
        "num_vocab_tokens": len(vocabulary),
        "default_vocab_size": len(vocabulary) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v13",
    }
    path = folder / "tekken.json"
    whole = {"config": config, "vocab": vocabulary, "special_tokens": special}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return MistralCommonBackend(str(path))


def _mistral(name: str) -> Any:
    return MistralCommonBackend(str(_MISTRAL_FILES / name))


def _sglang_tiktoken(folder: Path) -> Any:
    """SGLang's own class, without ``len`` and ``get_vocab``. The ids 256 to 259 cannot be decoded."""
    special = ["<|pad|>", "<|eos|>", "<|separator|>"]
    whole = {
        "regular_tokens": [{"bytes": [byte], "token": byte} for byte in range(256)],
        "special_tokens": [{"bytes": [*text.encode()], "token": 260 + i} for i, text in enumerate(special)],
        "word_split": "V1",
    }  # fmt: skip
    path = folder / "tokens.json"
    path.write_text(json.dumps(whole), encoding="utf-8")
    return TiktokenTokenizer(str(path))


class _SentencePiece:
    """Around a file of Mistral's, in the way of custom code. Its decode leaves out special tokens."""

    eos_token_id = 2

    def __init__(self) -> None:
        path = _MISTRAL_FILES / "mistral_instruct_tokenizer_240323.model.v3"
        self.sp_model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.all_special_ids = [i for i in range(len(self)) if self.sp_model.is_control(i)]

    def __len__(self) -> int:
        return int(self.sp_model.get_piece_size())

    def get_vocab(self) -> dict[str, int]:
        return {self.sp_model.id_to_piece(i): i for i in range(len(self))}

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(self.sp_model.encode(text))

    def decode(self, token_ids: list[int]) -> str:
        return str(self.sp_model.decode(token_ids))


class _Slow(PreTrainedTokenizer):
    """In Python, with a character for every third id. Other ids cannot be decoded."""

    def __init__(self) -> None:
        self._ids = {letter: 3 * i + 5 for i, letter in enumerate(f"{_LETTERS} \n")}
        self._letters = {i: letter for letter, i in self._ids.items()}
        super().__init__(unk_token=None)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [letter for letter in text if letter in self._ids]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._letters[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def _gaps(_folder: Path) -> Any:
    """Byte-level BPE with a token for every third id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: 3 * i + 5 for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _word_piece(folder: Path) -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), "let", "wait", "##ing"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    return BertTokenizer(str(folder / "vocab.txt"))


#: Name -> a function that makes the tokenizer. It may write files to the folder.
OTHERS: dict[str, Callable[[Path], Any]] = {
    "tekken": lambda _: _mistral("tekken_240911.json"),
    "small-tekken": tekken,
    "mistral-sentencepiece": lambda _: _mistral("mistral_instruct_tokenizer_241114.model.v7"),
    "sglang-tiktoken": _sglang_tiktoken,
    "sentencepiece": lambda _: _SentencePiece(),
    "slow": lambda _: _Slow(),
    "gaps": _gaps,
    "word-piece": _word_piece,
}
