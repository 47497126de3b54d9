# SPDX-License-Identifier: Apache-2.0
"""Loads Hugging Face tokenizers and caches the four that were used last."""

from functools import lru_cache
from typing import Any


class TokenizerError(ValueError):
    """Raised if a tokenizer cannot be loaded. The message has the model and the first line of the reason."""


@lru_cache(maxsize=4)
def load_tokenizer(model: str, local: bool = False) -> Any:
    """A tokenizer of ``transformers``; ``model`` is a folder or a name on the hub. If ``local``, nothing is
    downloaded. Raises TokenizerError if there is no tokenizer or it cannot be read."""
    # Imported only here, because importing transformers takes seconds, and not all programs load a tokenizer.
    from transformers import AutoTokenizer

    try:
        # With trust_remote_code=None, transformers would ask on the terminal whether to run a model's own code.
        return AutoTokenizer.from_pretrained(model, local_files_only=local, trust_remote_code=False)
    except Exception as error:
        # Bad tokenizer files raise errors of many kinds.
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise TokenizerError(f"the tokenizer of {model!r} cannot be loaded: {first}") from error
