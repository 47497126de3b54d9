# SPDX-License-Identifier: Apache-2.0
"""What attention kernels do with a tile of KV entries: tensor-core products, rotated queries, logits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from sglang_reasoncache.kernels import common_triton as common

#: Fewest lines (matrix rows) in a program's products: what a tensor core multiplies at least.
FEWEST_LINES = 16
#: Most lines in a program's products, other than of latent rows, of at most 128 columns.
MOST_LINES = 32
#: Most lines in a program's products of latent rows. Since sm_90, four warps multiply so many together.
WIDE_LINES = tl.constexpr(64)
#: Most columns of a latent for which :func:`latent_shape` has been compiled.
LATENT_COLUMNS = 512
LOG2E = tl.constexpr(1.4426950408889634)
# Triton's interpreter multiplies bf16 as bit patterns, not as values, so :func:`dot` converts to fp32 first.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def operand(raw, ELEMENT: tl.constexpr):
    """A pool's elements as tensor cores multiply them: fp8 becomes fp16, without rounding."""
    if ELEMENT == "e4m3" or ELEMENT == "e5m2":
        return common.fp8_to_fp16(raw, ELEMENT)
    else:
        return raw


@triton.jit
def dot(x, y, sums):
    if _INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), sums)
    return tl.dot(x, y, sums, input_precision="ieee")


@triton.jit
def times(x, y, sums, ELEMENT: tl.constexpr, EXACT: tl.constexpr):
    """``sums + x @ y`` for fp32 ``x``. If products take a narrower dtype, each element of ``x`` is split into
    two numbers of that dtype, whose sum keeps at least 16 bits. EXACT: ``x`` fits it and is not split."""
    y = operand(y, ELEMENT)
    if ELEMENT == "fp32":
        sums = dot(x, y, sums)
    elif EXACT:
        sums = dot(x.to(y.dtype), y, sums)
    else:
        high = upper(x, y, ELEMENT)
        sums = dot(high.to(y.dtype), y, sums)
        sums = dot((x - high).to(y.dtype), y, sums)
    return sums


@triton.jit
def upper(x, y, ELEMENT: tl.constexpr):
    """fp32 ``x`` in so few bits that the dtype of ``y`` holds them."""
    if ELEMENT == "bf16":  # a bf16 is the upper half of an fp32's bits
        return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        return x.to(y.dtype).to(tl.float32)


@triton.jit
def times_apart(x, y, sums, true, APART: tl.constexpr, ELEMENT: tl.constexpr, EXACT: tl.constexpr):
    """:func:`times`; if APART, in a branch that is always taken. ``true`` is a condition that holds, but not
    one that the compiler knows to hold.

    Triton looks for a product that takes another's result. If it finds one among products of ``WIDE_LINES``, 8
    warps compute every line twice, in twice the registers. It does not look beyond the end of a branch or of a
    loop. One product in a loop also takes less of sm_100's tensor memory than two."""
    if not APART:
        sums = times(x, y, sums, ELEMENT, EXACT)
    elif true:
        if EXACT:
            sums = dot(x.to(y.dtype), y, sums)
        else:
            for _ in tl.range(0, 2, num_stages=1):
                high = upper(x, y, ELEMENT)
                sums = dot(high.to(y.dtype), y, sums)
                x -= high
    return sums


@triton.jit
def next_shift(shifts):
    """One of the ``shifts`` that is not 0, or 0 if all are 0."""
    most = tl.max(shifts, axis=0)
    return tl.where(most != 0, most, tl.min(shifts, axis=0))


@triton.jit
def turned(
    q_at,
    q_mask,
    k,
    by,
    cosines,
    sines,
    column,
    zeros,
    ELEMENT: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
):
    """Adds to ``zeros`` the queries' products with the tile's keys, rotated by ``by`` positions, a number or
    ``[HEADS, 1]``. Instead of the keys, the queries are rotated, by ``-by``."""
    # The query is loaded again for every rotation, because keeping it would occupy registers all the time.
    q = tl.load(q_at + column[None, :], mask=q_mask, other=0.0).to(tl.float32)
    if NEOX:
        rotated, other, first, angle = common.pairing(column[None, :], HALF, NEOX)
        cosine, sine = common.load_factors(cosines, sines, -by, rotated, first, angle, True, HALF)
        paired = tl.load(q_at + other, mask=q_mask, other=0.0).to(tl.float32)
        back = q * cosine + paired * sine
    else:  # pairs are neighbours
        pair = tl.arange(0, column.shape[0] // 2)[None, :]
        cosine, sine = common.load_factors(cosines, sines, -by, pair < HALF, True, pair, True, HALF)
        even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
        back = tl.join(even * cosine + odd * sine, odd * cosine - even * sine)
        back = tl.reshape(back, q.shape)
    return times(back, k, zeros, ELEMENT, False)


@triton.jit
def query_of(kv_head, member, NEW: tl.constexpr, GROUP: tl.constexpr):
    """Which of a row's NEW queries, and which of its heads, is ``member`` of a KV head's GROUP query heads."""
    of_query: tl.constexpr = GROUP // NEW
    return member // of_query, kv_head * of_query + member % of_query


@triton.jit
def visible(word, new):
    """Which entries each query sees, bool ``[queries, entries]``. ``word``: int64 ``[queries]``, bit i: the
    query sees the i-th new entry. ``new``: ``[entries]``, which new entry it is; below 0: one that all see."""
    bit = tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)
    return (new < 0)[None, :] | (((word[:, None] >> bit[None, :]) & 1) != 0)


@triton.jit
def first_seen(word, count, NEW: tl.constexpr, reach):
    """The first entry that each query of a row sees, int32 ``[queries]``, if it sees ``reach`` positions, and
    the row's ``count`` entries are those of ``verification.window_entries``. ``word``: see :func:`visible`."""
    # How many new entries the query sees, itself included: the bits of its word.
    seen = word - ((word >> 1) & 0x5555555555555555)
    seen = (seen & 0x3333333333333333) + ((seen >> 2) & 0x3333333333333333)
    seen = (seen + (seen >> 4)) & 0x0F0F0F0F0F0F0F0F
    seen += seen >> 8
    seen += seen >> 16
    seen += seen >> 32
    short = tl.maximum(reach + NEW - 1 - count, 0)
    return tl.maximum((seen & 0x7F).to(tl.int32) - 1 - short, 0)


@triton.jit
def rotations(by, bits, which, last, bit, readable, table_rows):
    """Load the rotations ``which``: by how many positions each one rotates, and which entries use it, as bool
    ``[which, entries]``. No entry uses a rotation from index ``last`` on, or one beyond the rotary table.
    ``readable``: bool ``[which or 1, entries]``."""
    back = tl.load(by + which, mask=which < last, other=0)
    sound = (back > -table_rows) & (back < table_rows)
    word = tl.load(bits + which, mask=(which < last) & sound, other=0)
    seen = ((word[:, None] >> bit[None, :].to(tl.int64)) & 1) != 0
    return tl.where(sound, back, 0), seen & readable


@triton.jit
def logits(products, seen, scale, logit_cap, CAPPED: tl.constexpr):
    """Logits times log2(e), as ``exp2`` needs them; -inf where ``seen`` is false or the product is -inf."""
    if CAPPED:  # tanh x = 1 - 2 / (exp 2x + 1)
        seen &= products != float("-inf")
        products = logit_cap * (1 - 2 / (tl.exp(2 / logit_cap * scale * products) + 1))
        scale = 1.0
    return tl.where(seen, products * (scale * LOG2E), float("-inf"))


@triton.jit
def finite(m_i):
    """What to subtract from logits: ``m_i``, or 0 where ``m_i`` is -inf, because -inf - -inf is NaN."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


def columns(dim: int) -> int:
    """Number of columns for heads of ``dim`` elements: a power of 2, and at least 16 for tensor cores."""
    return max(16, triton.next_power_of_2(dim))


def lines(group: int, columns: int) -> int:
    """Number of lines (matrix rows) in a program's products, for ``group`` query heads per KV head. More than
    128 columns leave registers for only ``FEWEST_LINES``."""
    return _up_to(group, MOST_LINES if columns <= 128 else FEWEST_LINES)


def tile(columns: int, element_size: int) -> int:
    """Number of entries read at once: 16 KiB of K or V (fp8 counts as fp16), but at least 16 and at most 64."""
    return max(16, min(64, 2**14 // (columns * max(2, element_size))))


def latent_shape(group: int, element_size: int, exact: bool) -> tuple[int, int]:
    """Numbers of lines and of entries read at once over latent rows: those that spill no registers and read the
    fewest bytes (``tests/kernels/latent_shapes.py``), for all plans alike, as a request's bits do not depend on
    the plans of others. ``exact``: the query has the type in which products are computed."""
    if element_size == 4:
        return FEWEST_LINES, 16
    if not exact:  # as with fp8: every product takes two numbers for an element of the query
        return FEWEST_LINES, 32
    wide: int = WIDE_LINES.value
    if group > wide // 2 and multiplies_wide():
        return wide, 32
    count = _up_to(group, wide // 2)
    # 32 lines and 64 entries take 117 KiB of shared memory. sm_86, sm_89 and sm_120 have 99 KiB.
    little = (cuda_capability_geq(8, 6) and not cuda_capability_geq(9)) or cuda_capability_geq(12)
    return count, 32 if little and count > FEWEST_LINES else 64


def multiplies_wide() -> bool:
    """Whether the GPU multiplies ``WIDE_LINES`` lines at once. Those that do have 227 KiB of shared memory."""
    return bool(cuda_capability_geq(9) and not cuda_capability_geq(11))


def _up_to(group: int, most: int) -> int:
    return min(max(FEWEST_LINES, triton.next_power_of_2(group)), most)
