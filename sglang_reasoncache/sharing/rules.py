# SPDX-License-Identifier: Apache-2.0
"""The rules that must allow a block before it may share: one ordered table, :data:`RULES`.

The rules look at neither text nor KV. They check that sharing keeps the KV cache consistent, that enough tokens
follow the block, and what the threshold decided. A rule only answers: it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from sglang_reasoncache import compat
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.sharing.blocks import BlockProposal
from sglang_reasoncache.sharing.merges import Key
from sglang_reasoncache.sharing.request import has_row, known_record, record_of

#: A block is accepted only if at most this many positions name, or will name, each of its slots. Redirecting
#: the block redirects all these positions. More of them would keep the scheduler's thread busy for long.
MAX_READERS = 16


class Refusal(Enum):
    """Why a block does not share (docs/architecture.md). The values are those of a Prometheus label."""

    WARMUP = "warmup"
    DISTANCE = "distance"
    TREE_OWNED = "tree_owned"
    NOT_WRITTEN = "not_written"
    SAME_SLOTS = "same_slots"
    OVERLAP = "overlap"
    TOO_YOUNG = "too_young"
    READERS = "readers"
    LATE = "late"
    ACROSS = "across"
    IN_WINDOW = "in_window"
    EVICTED = "evicted"


class Stage(Enum):
    """When a rule is asked."""

    #: At every step of a block's way, because rows change between the steps.
    ALWAYS = auto()
    #: When the filter proposed the block.
    PROPOSED = auto()
    #: When its distance is known.
    MEASURED = auto()
    #: When the slots of the block and its source are in the host's rows, and again when it shares.
    LOCATED = auto()
    #: Before it enters the ledger, beside the blocks that were accepted before.
    ACCEPTED = auto()


class Judgement(NamedTuple):
    """What the threshold says of a block. ``is_warm``: whether it has seen enough distances to accept any."""

    accepted: bool
    is_warm: bool


#: For stages at which no distance is known.
_NOT_JUDGED = Judgement(accepted=True, is_warm=True)


class Rule(NamedTuple):
    """``refuses``: whether the rule refuses the block now."""

    refusal: Refusal
    stage: Stage
    refuses: Callable[[Rules, BlockProposal, Judgement], bool]


@dataclass(frozen=True)
class Rules:
    """The rules of a server.

    Attributes:
        min_age: How many tokens must follow a block before it may share.
        has_window_pool: Whether sliding-window layers have a pool of their own.
        page: Page size, in tokens.
    """

    min_age: int = 0
    has_window_pool: bool = False
    page: int = 1

    def refusal(
        self, block: BlockProposal, stage: Stage, judgement: Judgement = _NOT_JUDGED
    ) -> Refusal | None:
        """The first refusal of ``block`` by the rules of ``stage``, or None."""
        for refusal, refuses in _OF_STAGE[stage]:
            if refuses(self, block, judgement):
                return refusal
        return None

    def keys(self, block: BlockProposal) -> tuple[list[Key], list[Key]]:
        """The positions of the block and of its source, with their rows' numbers."""
        row, lender_row = block.rows
        return (
            [(row.number, at) for at in range(block.dst_start, block.dst_end)],
            [(lender_row.number, at) for at in block.sources()],
        )


def _is_late(_: Rules, block: BlockProposal, __: Judgement) -> bool:
    """A request has lost the row for which the block was proposed."""
    return not (_has_row(block.req, block.row) and _has_row(block.lender, block.lender_row))


def _has_row(req: Request, row: HostRow | None) -> bool:
    record = record_of(req)
    return record is not None and record.row is row and has_row(req)


def _is_tree_owned(_: Rules, block: BlockProposal, __: Judgement) -> bool:
    """The prefix tree owns slots of the destination, so other requests may read them. Or it owns slots of a
    source in another request, and may evict them once that request no longer locks them."""
    if block.dst_start < block.req.kv.cache_protected_len:
        return True
    return block.is_across and block.src_start < block.lender.kv.cache_protected_len


def _is_not_written(_: Rules, block: BlockProposal, __: Judgement) -> bool:
    return block.dst_end > written_positions(block.req) or block.src_end > written_positions(
        block.lender
    )


def _is_too_young(rules: Rules, block: BlockProposal, _: Judgement) -> bool:
    if block.dst_end > written_positions(block.req) - rules.min_age:
        return True
    return block.is_across and block.src_end > written_positions(block.lender) - rules.min_age


def _is_evicted(_: Rules, block: BlockProposal, __: Judgement) -> bool:
    row, lender_row = block.rows
    return row.any_evicted(block.dst_start, block.dst_end) or any(
        lender_row.any_evicted(run.src_start, run.src_end) for run in block.runs
    )


def _is_in_window(rules: Rules, block: BlockProposal, _: Judgement) -> bool:
    """Positions in the window need their own window-pool slots: a shared one would be freed too early."""
    if not rules.has_window_pool:
        return False
    start, end = compat.freed_of_window(block.req.kv, rules.page)
    return not start <= block.dst_start < block.dst_end <= end


def _overlaps_a_candidate(_: Rules, block: BlockProposal, __: Judgement) -> bool:
    return known_record(block.req).overlaps(block.dst_start, block.length)


def _came_before_warm_up(_: Rules, __: BlockProposal, judgement: Judgement) -> bool:
    return not judgement.accepted and not judgement.is_warm


def _is_too_far(_: Rules, __: BlockProposal, judgement: Judgement) -> bool:
    return not judgement.accepted


def _reads_the_trees_slots(_: Rules, block: BlockProposal, __: Judgement) -> bool:
    """Another request's source names a slot that the prefix tree owns."""
    if not block.is_across:
        return False
    lender_row = block.rows[1]
    owned = block.lender.kv.cache_protected_len
    return any(at < owned for source in block.sources() for at in lender_row.readers(source))


def _names_the_same_slots(_: Rules, block: BlockProposal, __: Judgement) -> bool:
    row, lender_row = block.rows
    sources = np.fromiter(block.sources(), dtype=np.int64, count=block.length)
    return bool((row.between(block.dst_start, block.dst_end) == lender_row.at(sources)).all())


def _is_read_by_others(_: Rules, block: BlockProposal, __: Judgement) -> bool:
    """Another request's row names a slot of the destination, so redirecting it would free no slot."""
    row = block.rows[0]
    return not row.in_other_rows.isdisjoint(row.between(block.dst_start, block.dst_end).tolist())


def _has_many_readers(rules: Rules, block: BlockProposal, _: Judgement) -> bool:
    merges = known_record(block.req).merges
    dst, _src = rules.keys(block)
    return max(merges.size(key) for key in dst) > MAX_READERS


def _will_be_read_by_others(rules: Rules, block: BlockProposal, _: Judgement) -> bool:
    merges = known_record(block.req).merges
    dst, _src = rules.keys(block)
    return any(merges.is_across(key) for key in dst)


def _will_name_the_same_slots(rules: Rules, block: BlockProposal, _: Judgement) -> bool:
    dst, src = rules.keys(block)
    return known_record(block.req).merges.would_repeat(dst, src)


#: Within a stage the first rule that refuses gives the reason. Before the rules of another stage are asked,
#: those of ``ALWAYS`` must have allowed the block: they make sure that both rows are there.
RULES: tuple[Rule, ...] = (
    Rule(Refusal.LATE, Stage.ALWAYS, _is_late),
    Rule(Refusal.TREE_OWNED, Stage.ALWAYS, _is_tree_owned),
    Rule(Refusal.NOT_WRITTEN, Stage.ALWAYS, _is_not_written),
    Rule(Refusal.TOO_YOUNG, Stage.ALWAYS, _is_too_young),
    Rule(Refusal.EVICTED, Stage.ALWAYS, _is_evicted),
    Rule(Refusal.IN_WINDOW, Stage.ALWAYS, _is_in_window),
    Rule(Refusal.OVERLAP, Stage.PROPOSED, _overlaps_a_candidate),
    Rule(Refusal.WARMUP, Stage.MEASURED, _came_before_warm_up),
    Rule(Refusal.DISTANCE, Stage.MEASURED, _is_too_far),
    Rule(Refusal.TREE_OWNED, Stage.LOCATED, _reads_the_trees_slots),
    Rule(Refusal.SAME_SLOTS, Stage.LOCATED, _names_the_same_slots),
    Rule(Refusal.ACROSS, Stage.LOCATED, _is_read_by_others),
    Rule(Refusal.READERS, Stage.ACCEPTED, _has_many_readers),
    Rule(Refusal.ACROSS, Stage.ACCEPTED, _will_be_read_by_others),
    Rule(Refusal.SAME_SLOTS, Stage.ACCEPTED, _will_name_the_same_slots),
)
_OF_STAGE = {
    stage: [(rule.refusal, rule.refuses) for rule in RULES if rule.stage is stage]
    for stage in Stage
}
