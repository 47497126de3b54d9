# SPDX-License-Identifier: Apache-2.0
"""Hugging Face tokenizers, each loaded once."""

from functools import lru_cache
from typing import Any


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message names the model and the first line of the reason."""


@lru_cache(maxsize=4)
def load_tokenizer(model: str, local: bool = False) -> Any:
    """A tokenizer of ``transformers``; ``model`` is a folder or a name on the hub. If ``local``, nothing is
    downloaded. Raises TokenizerError if there is no tokenizer or it cannot be read."""
    # Imported here, because transformers takes seconds and most importers of this module do not need it.
    from transformers import AutoTokenizer

    try:
        # If trust_remote_code is None, transformers asks on the terminal whether a model's own code may run.
        return AutoTokenizer.from_pretrained(model, local_files_only=local, trust_remote_code=False)
    except Exception as error:
        # Bad tokenizer files raise errors of many kinds.
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise TokenizerError(f"the tokenizer of {model!r} cannot be loaded: {first}") from error
