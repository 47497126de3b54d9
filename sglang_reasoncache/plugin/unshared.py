# SPDX-License-Identifier: Apache-2.0
"""What runs of the plugin where a model's KV cannot be shared: admission learns how much to reserve.

Allocator, prefix cache and attention stay SGLang's own, and no KV is touched."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import SharingBudget, WindowSharingBudget
from sglang_reasoncache.cache.owner import NOTHING_PROMISED, NoOwner, Promise
from sglang_reasoncache.compat.types import PrefixTree, Request, TreeCacheBuildContext
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.plugin.beams import Beams
from sglang_reasoncache.plugin.containment import Containment
from sglang_reasoncache.plugin.disaggregation import PreallocAdmission
from sglang_reasoncache.plugin.report import GAUGES, SharingMetrics
from sglang_reasoncache.sharing.headroom import Shortage
from sglang_reasoncache.sharing.stats import SharingStats

logger = logging.getLogger(__name__)


class Unshared(NoOwner):
    """Replaces, in a scheduler process, all parts of the plugin. SGLang's scheduler calls it through hooks.

    Args:
        config: The operator's settings.
        allocator: SGLang's allocator. Its prefill budgets ask this object how much to reserve.
        reason: Why nothing is shared.
        dp_rank: Index of the scheduler's data-parallel replica or DP-attention group.

    Attributes:
        admission: Decides on the decode server of a PD pair. None on other servers.
        disabled: The failure since which admission is SGLang's own. None if nothing failed.
    """

    def __init__(
        self, config: ReasonCacheConfig, allocator: Any, reason: str, dp_rank: int = 0
    ) -> None:
        self.admission: PreallocAdmission | None = None
        self.disabled: str | None = None
        self.containment = Containment(Ranks(), self._disable)
        ahead = compat.get_alloc_reserve_per_decode()
        self.shortage = Shortage(int(allocator.size_full), ahead)
        self._allocator = allocator
        self._config = config
        self._reason = reason
        self._dp_rank = dp_rank
        self._stats = SharingStats()
        self._beams = Beams()
        self._metrics: SharingMetrics | None = None
        if not config.is_active:
            # The settings would share nothing anyway.
            return
        # The method of SGLang's class, which the attribute of this one object hides.
        self._stock_budget = allocator.create_prefill_budget
        allocator.create_prefill_budget = self._budget
        logger.warning(
            "reasoncache: nothing is shared, only admission learns how much to reserve, because: %s",
            reason,
        )

    def tree(self, context: TreeCacheBuildContext, metrics: SharingMetrics | None) -> Any:
        """Make SGLang's own prefix cache. ``metrics``: Prometheus series."""
        if context.server_args.disaggregation_mode == "decode":
            self.admission = PreallocAdmission(self)
        self._metrics = metrics
        self._publish()
        return compat.default_radix_cache_factory(context)

    def _budget(self, tree_cache: PrefixTree, **mixed: int) -> Any:
        """The prefill budget of one pass of SGLang's scheduler."""
        stock = self._stock_budget(tree_cache, **mixed)
        with self.containment:
            # SGLang counts pools that share memory, or that have windows only, in other ways.
            kinds = {
                compat.PrefillBudget: SharingBudget,
                compat.SWAPrefillBudget: WindowSharingBudget,
            }
            learned = kinds.get(type(stock))
            if learned is not None and not getattr(stock, "all_swa", False) and not self.disabled:
                promise = self.promise()
                return learned(self._allocator, tree_cache, promise=promise, owner=self, **mixed)
        return stock

    @property
    def steps(self) -> int:
        return self.shortage.steps

    def promise(self) -> Promise:
        """The learned reserve. While beams run, which SGLang ends if slots are missing, admission is SGLang's
        own."""
        if self.disabled or not self._config.is_active or self._beams:
            return NOTHING_PROMISED
        kept = 1.0 - self._config.admission_credit
        return Promise(shareable=0, ahead=self.shortage.headroom.ahead, kept=kept)

    def request_waits(self, again: bool) -> None:
        self.shortage.request_waits(again)

    def before_prefill(self, reqs: Sequence[Request]) -> None:
        """Requests are about to be prefilled."""
        self._beams.begin(reqs)

    def after_decode(self, tokens: int) -> None:
        """Count a decode step that gave ``tokens`` tokens."""
        self.shortage.decoded(tokens)

    def log_part(self) -> str:
        """Our part of SGLang's decode log line."""
        return f"#reserved per request: {self.shortage.headroom.ahead:.0f}"

    def response(self, _rid: str) -> None:
        """No response is kept."""

    def describe(self, details: bool = False, blocks: bool = True) -> dict[str, Any]:
        """JSON for ``GET /reasoncache``: of the fields that :meth:`Report.describe` has, those that say
        something here."""
        return {
            "dp_rank": self._dp_rank,
            "disabled": self.disabled,
            "uncorrected": self._reason,
            "documents_off": self._reason,
            "config": self._config.to_dict(),
            "slots_saved_now": 0,
            "slots_shareable_now": 0,
            "reserved_per_request": self.shortage.headroom.ahead,
            "totals": self._stats.to_dict(),
            **({"recent": []} if details else {}),
        }

    def _disable(self, reason: str) -> None:
        self.disabled = reason
        self._publish()

    def _publish(self) -> None:
        """Set the Prometheus series. A rank that cannot must go on like the others, so a failure is logged."""
        if self._metrics is None:
            return
        gauges = dict.fromkeys(GAUGES, 0.0) | {"uncorrected": 1.0}
        gauges["disabled"] = float(self.disabled is not None)
        try:
            self._metrics.update(self._stats, gauges, None)
        except Exception:
            logger.exception("reasoncache: no Prometheus series")
