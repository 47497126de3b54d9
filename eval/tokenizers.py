# SPDX-License-Identifier: Apache-2.0
"""Hugging Face tokenizers, each loaded once."""

from functools import lru_cache
from typing import Any


class TokenizerError(ValueError):
    """A model's tokenizer cannot be had; the message names the model and the first reason."""


@lru_cache(maxsize=4)
def load_tokenizer(model: str, local: bool = False) -> Any:
    """A tokenizer of ``transformers``; ``model`` is a folder, or with ``local`` False also a hub
    name. Raises TokenizerError: there is none, or it is one that cannot be read."""
    # Takes seconds to import, and few who import this module need it.
    from transformers import AutoTokenizer

    try:
        # False, not None: None asks on the terminal whether a model's own code may run.
        return AutoTokenizer.from_pretrained(model, local_files_only=local, trust_remote_code=False)
    except Exception as error:
        # Tokenizer files fail in as many ways as there are kinds of them.
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise TokenizerError(f"the tokenizer of {model!r} cannot be loaded: {first}") from error
