# SPDX-License-Identifier: Apache-2.0
"""Selectors that answer something else than Quest."""

from __future__ import annotations

from typing import Any

from sglang_reasoncache.selection.quest import Quest


class Wrong(Quest):
    """Answers something else."""

    answer: Any = None

    def keep(self, shares: Any, held: Any, newest: Any, page: int) -> Any:
        return self.answer(super().keep(shares, held, newest, page), newest)


def wrong(answer: Any, budget: int = 16) -> Wrong:
    policy = Wrong(budget=budget, whole_layers=0)
    object.__setattr__(policy, "answer", answer)
    return policy


NONSENSE = [
    (lambda keep, _newest: None, "malformed", "must give a plain bool tensor .*, got NoneType"),
    (lambda keep, _newest: keep.float(), "malformed", "got Tensor torch.float32"),
    (lambda keep, _newest: keep[:, :-1], "malformed", "must give a plain bool tensor"),
    (lambda keep, _newest: keep.to_sparse(), "malformed", "must give a plain bool tensor"),
    (lambda keep, _newest: 1 / 0, "policy_failed", "ZeroDivisionError: division by zero"),
]
