# SPDX-License-Identifier: Apache-2.0
"""Whether a model's prompts end within its reasoning, as those of QwQ and the R1 distills do."""

from __future__ import annotations

from eval.tasks.answers import THINK, with_opened_thinking
from eval.tokenizers import load_tokenizer

__all__ = ["opens_thinking", "with_opened_thinking"]


def opens_thinking(model: str) -> bool:
    """Whether the chat template's generation prompt ends in ``<think>``.

    Then no response has that tag, and one that was cut off within its reasoning has neither: it
    is graded as :func:`with_opened_thinking`.

    Args:
        model: folder or hub name.

    Returns:
        False also if there is no tokenizer or no template that can be used.
    """
    if not model:
        return False
    try:
        prompt = load_tokenizer(model).apply_chat_template(
            [{"role": "user", "content": "1 + 1"}], tokenize=False, add_generation_prompt=True
        )
    except Exception:
        # Templates fail, as tokenizers do, in as many ways as there are kinds of them.
        return False
    return isinstance(prompt, str) and prompt.rstrip().endswith(THINK)
