# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test. Instead of redirecting a row (block table) to shared slots, it copies K and V,
with keys rotated, from the shared slots to the row's own. Answers must equal those with redirected rows."""

from collections.abc import Callable, Sequence
from typing import Any


def register() -> None:
    from sglang_reasoncache.device.upload import upload
    from sglang_reasoncache.kernels.paged import read_keys
    from sglang_reasoncache.sharing.meter import BlockMeter
    from sglang_reasoncache.sharing.redirect import Redirected, Redirector

    meters: list[Any] = []
    made = BlockMeter.__init__

    def remembered(meter: BlockMeter, *arguments: Any, **named: Any) -> None:
        made(meter, *arguments, **named)
        meters.append(meter)

    def copying(_redirector: Redirector, done: Sequence[Redirected]) -> Callable[[], None]:
        reads = {
            (shared.row, position): move.new
            for shared in done
            for move in shared.moves
            for position in move.positions
        }
        meter = meters[-1]
        entries = [(*at, slot) for at, slot in reads.items()]
        rows, positions, src = upload(entries, meter._rows.device).unbind(1)
        dst = meter._rows[rows, positions].long()
        shift = meter._shift(src, positions)

        def copy() -> None:
            for rotation, layers in meter._layers.items():
                for keys, values in layers:
                    # A key that keeps its position (shift 0) is copied bit for bit.
                    keys[dst] = read_keys(keys, src, shift, rotation).to(keys.dtype)
                    values[dst] = values[src]

        return copy

    BlockMeter.__init__ = remembered  # type: ignore[assignment,method-assign]
    Redirector.prepare = copying  # type: ignore[assignment,method-assign]
