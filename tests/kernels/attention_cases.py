# SPDX-License-Identifier: Apache-2.0
"""Makes KV pools, rows (the slot of each position of a request) and expected results for paged attention tests.
If a row has a slot at a position other than the one its key was cached for, the key must be rotated. Expected
results come from dense fp64 attention, with rotation by complex multiplication, not from our kernels."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.kernels.row_plan import TILE as TILE_ENTRIES
from sglang_reasoncache.kernels.row_plan import Rotations, RowPlan
from tests.triton_runs import INTERPRETED

#: Memory layouts. halves: K and V are each contiguous, as in SGLang. slot: K and V of a slot are side by side.
#: head-major: heads are the outer dimension. gaps: there are gaps between heads. odd: addresses are unaligned.
LAYOUTS = ("halves", "slot", "head-major", "gaps", "odd")
#: Layout of MLA: value and key of a slot are parts of one vector.
LATENT = "latent"
#: Number of positions in the rotary table.
TABLE = 40_000

#: Dtype of the result -> (relative, absolute) tolerance for values of about 1. The relative part covers
#: rounding (half a unit in the last place), the absolute part covers fp32 sums over 256 dims and rotation.
TOLERANCE = {
    torch.float32: (0.0, 2e-5),
    torch.bfloat16: (2.0**-8, 2e-5),
    torch.float16: (2.0**-11, 2e-5),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Describes a KV pool and a batch of requests, whose numbers of positions are ``lengths``."""

    lengths: tuple[int, ...] = (0, 1, 19, 989)
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 64
    v_dim: int = 64
    rotary_dim: int = 64  # 0: no rotation
    is_neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    query_dtype: torch.dtype = torch.bfloat16
    shared: float = 0.3  # fraction of positions whose key was cached for another position
    repeated: float = 0.0  # about how many times a position gets another position's slot
    evicted: float = 0.0  # fraction of evicted positions; 1 leaves one position per row
    layout: str = "halves"  # one of LAYOUTS, or LATENT

    @property
    def query_dim(self) -> int:
        return self.k_dim + (self.v_dim if self.layout == LATENT else 0)

    def latent(self, **changed: Any) -> "Case":
        """This case with one KV head in the latent layout, and dims as in DeepSeek."""
        mla: dict[str, Any] = dict(
            kv_heads=1, v_dim=512, rotary_dim=64, is_neox=False, layout=LATENT
        )
        return dataclasses.replace(self, **(mla | changed))


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

CASES = [
    *(Case(shared=shared, evicted=evicted)
      for shared, evicted in itertools.product((0.0, 0.3, 1.0), (0.0, 0.4, 1.0))),
    *(Case(heads=heads, kv_heads=kv_heads) for heads, kv_heads in
      ((1, 1), (3, 3), (5, 1), (6, 2), (7, 1), (8, 1), (12, 1), (32, 8), (16, 1))),
    *(Case(k_dim=dim, v_dim=dim, rotary_dim=dim, is_neox=neox, lengths=(1, 70))
      for dim, neox in itertools.product((8, 24, 32, 72, 80, 96, 128, 192, 256), (True, False))),
    Case(k_dim=128, v_dim=128, rotary_dim=32),
    Case(k_dim=96, v_dim=40, rotary_dim=80, is_neox=False),
    Case(rotary_dim=0, shared=0.0),
    *(Case(dtype=dtype, query_dtype=dtype) for dtype in (torch.float32, torch.float16)),
    *(Case(dtype=dtype, query_dtype=torch.float32, k_dim=72, v_dim=72, rotary_dim=72)
      for dtype in (torch.bfloat16, *_FP8)),
    *(Case(layout=layout, dtype=dtype, query_dtype=torch.float32, kv_heads=2, heads=6)
      for layout, dtype in itertools.product(LAYOUTS, (torch.bfloat16, torch.float32))),
    *(Case(lengths=(1, 64, 0, 500, 1300), shared=0.1, repeated=repeated, evicted=evicted, heads=heads)
      for repeated, evicted, heads in ((0.3, 0.0, 4), (0.8, 0.2, 6), (9.0, 0.4, 32))),
    Case(lengths=(512, 513, 1024, 1536), shared=0.5),
    Case(lengths=()),
    Case(lengths=(30_000,), shared=0.1),
    *(Case((0, 1, 64, 500), shared=shared, repeated=repeated, evicted=evicted).latent(heads=heads)
      for heads, shared, repeated, evicted in
      ((1, 0.0, 0.0, 0.0), (2, 1.0, 0.0, 0.0), (3, 0.3, 0.3, 0.0), (16, 0.1, 0.8, 0.2), (20, 0.1, 9.0, 0.4))),
    Case((1, 1500), shared=0.1, repeated=0.3).latent(heads=128),
    *(Case((1, 300), repeated=0.3, dtype=dtype, query_dtype=torch.float32).latent(heads=5, v_dim=72, k_dim=24,
      rotary_dim=24) for dtype in (torch.float32, torch.float16, *_FP8)),
]  # fmt: skip

#: Cases for interpreted Triton and for builds for older CPUs: fewer positions, all dtypes, most layouts.
FEW = [
    Case(evicted=0.4),
    Case(heads=5, kv_heads=1, k_dim=80, v_dim=80, rotary_dim=80, lengths=(1, 70)),
    Case(heads=40, kv_heads=2, lengths=(19,)),
    Case(k_dim=96, v_dim=40, rotary_dim=80, is_neox=False, lengths=(1, 300)),
    Case(k_dim=128, v_dim=128, rotary_dim=32, lengths=(70,), query_dtype=torch.float32),
    Case(k_dim=192, v_dim=128, rotary_dim=64, lengths=(70,)),
    Case(k_dim=256, v_dim=256, rotary_dim=256, is_neox=False, lengths=(70,)),
    Case(k_dim=8, v_dim=8, rotary_dim=8, lengths=(70,)),
    Case(rotary_dim=0, shared=0.0, lengths=(0, 1, 300)),
    Case(shared=1.0, lengths=(300,), dtype=torch.float16, query_dtype=torch.float16),
    Case(dtype=torch.float32, query_dtype=torch.float32, lengths=(1, 300), layout="gaps"),
    Case(dtype=torch.float8_e4m3fn, lengths=(150,), layout="slot"),
    Case(dtype=torch.float8_e5m2, lengths=(150,), query_dtype=torch.float16, layout="odd"),
    Case(lengths=(1, 150, 0, 300), shared=0.1, repeated=0.4, evicted=0.1),
    Case(lengths=(200,), repeated=5.0, dtype=torch.float32, query_dtype=torch.float32, heads=6),
    Case((0, 1, 150), shared=0.3).latent(heads=20),
    Case((150,), shared=0.1, repeated=0.4, evicted=0.1).latent(heads=3),
    Case((500,), shared=0.1, repeated=0.3).latent(heads=128, v_dim=64),
    Case((70,), shared=0.0, dtype=torch.float8_e4m3fn).latent(heads=1),
    Case((150,), repeated=5.0, dtype=torch.float32, query_dtype=torch.float32).latent(
        v_dim=40, k_dim=24, rotary_dim=24
    ),
    Case(lengths=()),
]


@dataclasses.dataclass
class Rig:
    """A case's tensors. Slots that no request reads hold NaN, also slot 0, which SGLang uses for padding."""

    case: Case
    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor
    requests: torch.Tensor
    lengths: torch.Tensor
    cached_at: torch.Tensor
    rotation: KeyRotation | None
    query: torch.Tensor

    @property
    def scale(self) -> float:
        return self.case.query_dim**-0.5

    def plan(self, merge: bool = False) -> RowPlan:
        """The expected plan: an entry for each position that is not evicted. With ``merge``, a slot that a row
        has at its cached position gets one entry; its other positions become rotations in that entry's tile."""
        indptr = [0]
        tile_ptr = [0]
        entries: list[tuple[int, int]] = []
        rotations: list[tuple[int, int]] = []
        for b, (request, length) in enumerate(
            zip(self.requests.tolist(), self.lengths.tolist(), strict=True)
        ):
            row = self.rows[request, :length].tolist()
            home = [int(self.cached_at[slot]) if slot >= 0 else -1 for slot in row]
            of: dict[int, int] = {}
            for at, slot in enumerate(row):
                is_alias = slot >= 0 and home[at] != at and 0 <= home[at] < length
                if merge and is_alias and row[home[at]] == slot:
                    of[at] = home[at]
                elif slot >= 0:
                    of[at] = at
            place = {at: i for i, at in enumerate(at for at, to in of.items() if to == at)}
            entries += [(row[at], at - home[at]) for at in place]
            tiles: dict[int, list[list[int]]] = {}
            last = None
            for at, to in of.items():
                if not merge or home[at] == at:
                    continue
                tile, bit = divmod(place[to], TILE_ENTRIES)
                # A tile's rotations begin with 0, whose bits mark keys used at their cached positions.
                found = tiles.setdefault(tile, [[0, -1]])
                if last != (at - 1, tile, at - home[at], to == at):
                    found.append([at - home[at], 0])
                found[-1][1] |= 1 << bit
                found[0][1] &= ~((to == at) << bit)
                last = at, tile, at - home[at], to == at
            first = indptr[-1] // TILE_ENTRIES + b
            tile_ptr += [tile_ptr[-1]] * (first + 1 - len(tile_ptr))
            for tile in range(-(-len(place) // TILE_ENTRIES)):
                signed = ((by, (bits + 2**63) % 2**64 - 2**63) for by, bits in tiles.get(tile, []))
                rotations += signed
                tile_ptr.append(len(rotations))
            indptr.append(len(entries))
        last_tile = indptr[-1] // TILE_ENTRIES + len(indptr) - 1
        tile_ptr += [tile_ptr[-1]] * (last_tile + 1 - len(tile_ptr))
        indices, shift = torch.tensor(entries).view(-1, 2).T.int().contiguous()
        found_rotations = None
        if rotations:
            by, bits = torch.tensor(rotations).T.contiguous()
            found_rotations = Rotations(torch.tensor(tile_ptr).int(), by.int(), bits)
        shifts = shift if not merge and shift.any() else None
        return RowPlan(torch.tensor(indptr).int(), indices, shifts, found_rotations)

    def rotated(self, plan: RowPlan) -> torch.Tensor:
        """The keys of the plan's entries, rotated by their shifts: fp64 ``[total, kv_heads, query_dim]``."""
        slots = plan.kv_indices.long()
        keys = self.turned(self.keys.float()[slots].double(), plan.shift)
        return self.with_values(keys, slots)

    def with_values(self, keys: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``keys``, or in the latent layout values and ``keys`` joined: queries are multiplied by both."""
        if self.case.layout != LATENT:
            return keys
        return torch.cat((self.values.float()[slots].to(keys.dtype), keys), dim=2)

    def turned(self, keys: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        if shift is None or self.rotation is None:
            return keys
        by = shift.long()
        rotation = self.rotation
        sines = rotation.sin.double()[by.abs()] * by.sign()[:, None]
        turn = torch.complex(rotation.cos.double()[by.abs()], sines)
        return turned(keys, turn, self.case.is_neox)

    def expected(
        self, plan: RowPlan, spans: tuple[torch.Tensor, torch.Tensor] | None = None,
        query: torch.Tensor | None = None, cap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The output, fp64 ``[batch, heads, v_dim]``. ``spans``: where each query's entries begin and end."""
        begin, end = (plan.kv_indptr[:-1], plan.kv_indptr[1:]) if spans is None else spans
        query = self.query if query is None else query
        keys = self.rotated(plan)
        values = self.values.float()[plan.kv_indices.long()]
        out = torch.zeros((*query.shape[:2], self.case.v_dim), dtype=torch.float64)
        for b, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
            sides = query[b : b + 1], keys[first:last], values[first:last]
            out[b : b + 1], _ = dense(*sides, self.scale, cap=cap, sinks=sinks)
        return out


def make(case: Case, seed: int = 3) -> Rig:
    generator = torch.Generator().manual_seed(seed)
    total = sum(case.lengths)
    num_slots = total + 40
    width = max((1, *case.lengths)) + 3

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    sizes = num_slots, case.kv_heads, case.k_dim, case.v_dim
    keys, values = lay_out(case.layout, made, *sizes)
    # Fills rows with stale slots, which remain behind each request's last position and in rows of no request.
    rows = torch.randint(0, num_slots, (len(case.lengths) + 2, width), generator=generator)
    cached_at = torch.randint(0, 3000, (num_slots,), generator=generator)
    order = torch.randperm(num_slots - 1, generator=generator) + 1
    requests = torch.randperm(len(case.lengths) + 2, generator=generator)[: len(case.lengths)]
    used = torch.zeros(num_slots, dtype=torch.bool)
    own = order[:total].split(list(case.lengths))
    for request, slots in zip(requests.tolist(), own, strict=True):
        count = len(slots)
        at = torch.arange(count)
        cached_at[slots] = at
        if case.rotary_dim and count:
            # Some runs of 8 slots were cached for positions nearby, the first and last slot for distant ones.
            away = torch.rand((count + 7) // 8, generator=generator) < case.shared
            away = away.repeat_interleave(8)[:count]
            near = torch.randint(-50, 50, (len(away),), generator=generator)
            runs = near[at // 8 * 8 % len(near)]
            cached_at[slots] = torch.where(away, at - runs, at)
            if case.shared:
                cached_at[slots[0]] = TABLE - 1
                cached_at[slots[-1]] = count - 1 - (TABLE - 1) if count > 1 else TABLE - 1
        for _ in range(round(case.repeated * count / 10) if count > 20 else 0):
            # Copies a run of slots to other positions. This may overwrite shifted slots and earlier copies.
            run, to, source = torch.randint(1, count - 20, (3,), generator=generator).tolist()
            run = 1 + run % 20
            slots[to : to + run] = slots[source : source + run].clone()
        evicted = torch.rand(count, generator=generator) < case.evicted
        if case.evicted == 1 and count:
            evicted[count // 2] = False
        rows[request, :count] = torch.where(evicted, -1 - at % 3, slots)
        used[slots[~evicted]] = True
    for buffer in (keys, values):
        poison(buffer, ~used)
    query = torch.randn((len(case.lengths), case.heads, case.query_dim), generator=generator)
    lengths = torch.tensor(case.lengths).long()
    rotation = make_rotation(case.rotary_dim, case.is_neox)
    sides = keys, values, rows.int(), requests, lengths, cached_at.int()
    return Rig(case, *sides, rotation, query.to(case.query_dtype))


def poison(buffer: torch.Tensor, where: torch.Tensor) -> None:
    """Writes NaN into the slots that a mask chooses."""
    filled = buffer.float()
    filled[where] = float("nan")
    buffer.copy_(filled.to(buffer.dtype))
    # Exactly these slots, among them slot 0, must hold NaN. Otherwise the tests would prove nothing.
    assert torch.equal(buffer.float().isnan().any(dim=(1, 2)), where) and where[0]
    assert buffer.float()[where].isnan().all()


def assert_plans(found: RowPlan, expected: RowPlan) -> None:
    """Checks that plans are equal. The rotations of a tile may differ in order, except for the first."""
    sides = *zip(found[:3], expected[:3], strict=True), *_lists(found, expected)
    for mine, other in sides:
        assert (mine is None) == (other is None)
        assert mine is None or other is None or torch.equal(mine.cpu(), other)


def _lists(*plans: RowPlan) -> list[tuple[torch.Tensor | None, ...]]:
    """Pairs the fields of two plans' ``rotations``. In each tile, all rotations but the first are sorted."""
    sides: list[list[torch.Tensor | None]] = []
    for plan in plans:
        if plan.rotations is None:
            sides.append([None] * 3)
            continue
        tile_ptr, by, bits = (side.cpu() for side in plan.rotations)
        tiles = torch.arange(len(tile_ptr) - 1).repeat_interleave(tile_ptr.diff())
        behind = torch.ones_like(by)
        behind[tile_ptr[:-1][tile_ptr.diff() > 0].long()] = 0
        keys = zip(tiles.tolist(), behind.tolist(), by.tolist(), bits.tolist(), strict=True)
        order = [i for _, i in sorted((key, i) for i, key in enumerate(keys))]
        sides.append([tile_ptr, by[order], bits[order]])
    return list(zip(*sides, strict=True))


def assert_attention(
    found: torch.Tensor, expected: torch.Tensor, atol: float | None = None
) -> None:
    """Checks that results are equal within ``atol``, or by default ``TOLERANCE``. NaN never passes."""
    relative, absolute = TOLERANCE[found.dtype] if atol is None else (0.0, atol)
    if INTERPRETED and found.dtype == torch.bfloat16:
        relative *= 2  # the interpreter truncates to bf16, a GPU rounds
    torch.testing.assert_close(found.cpu().double(), expected, rtol=relative, atol=absolute)


@functools.cache
def make_rotation(rotary_dim: int, is_neox: bool) -> KeyRotation | None:
    """The original RoPE on the first ``rotary_dim`` dims, with base 10,000; None if ``rotary_dim`` is 0."""
    if not rotary_dim:
        return None
    powers = torch.arange(0, rotary_dim, 2).double() / rotary_dim
    angles = torch.arange(TABLE).double()[:, None] * 10_000.0**-powers
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    return KeyRotation(table, rotary_dim, is_neox)


def lay_out(
    layout: str, made: Callable[..., torch.Tensor], slots: int, heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[slots, heads, dim]`` as views of tensors that ``made(*shape)`` returns."""
    match layout:
        case "halves" if k_dim == v_dim:
            keys, values = made(2, slots, heads, k_dim)
        case "halves":
            keys = made(slots, heads, k_dim)
            values = made(slots, heads, v_dim)
        case "latent":
            values, keys = made(slots, heads, v_dim + k_dim).split((v_dim, k_dim), dim=2)
        case "slot":
            keys, values = made(slots, 2, heads, k_dim).unbind(1)
        case "head-major":
            keys, values = made(2, heads, slots, k_dim).transpose(1, 2)
        case "gaps":
            both = made(2, slots, heads, k_dim + 5)
            keys = both[0, :, :, :k_dim]
            values = both[1, :, :, 3 : k_dim + 3]
        case "odd":
            flat = made(2, slots * heads * k_dim + 1)[:, 1:]
            keys, values = (side.view(slots, heads, k_dim) for side in flat)
        case _:
            raise AssertionError(layout)
    return keys, values


def turned(keys: torch.Tensor, turn: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotates fp64 keys: multiplies each pair of dims, as a complex number, by ``turn`` ``[tokens, pairs]``."""
    half = turn.shape[1]
    turn = turn[:, None]
    x = keys[..., : 2 * half]
    rest = keys[..., 2 * half :]
    if is_neox:
        pairs = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((pairs.real, pairs.imag, rest), dim=-1)
    pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * turn
    return torch.cat((torch.view_as_real(pairs).flatten(-2), rest), dim=-1)


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *,
    hidden: torch.Tensor | None = None, cap: float = 0.0, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """fp64 attention of queries ``[tokens, heads, dim]`` to keys ``[held, kv_heads, dim]``. Returns its output
    and weights ``[heads, tokens, held]``. ``hidden`` ``[tokens, held]`` is True where a token ignores a key."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (side.double().repeat_interleave(group, dim=1) for side in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if cap:
        logits = cap * (logits / cap).tanh()
    if hidden is not None:
        logits = logits.masked_fill(hidden, float("-inf"))
    powers = logits.exp()
    total = powers.sum(-1) + (0 if sinks is None else sinks.double().exp()[:, None])
    weights = powers / total[..., None]
    return torch.einsum("hqk,khd->qhd", weights, values), weights
