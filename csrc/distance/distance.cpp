// SPDX-License-Identifier: Apache-2.0
// Computes the sum of squared differences for each pair of KV blocks, in one pass over the pool.

#include "distance.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "pool/workers.h"
#include "sums.h"

namespace reasoncache {
namespace distance {
namespace {

// If a call reads fewer bytes than this, waking a second thread costs more time than it saves.
constexpr std::int64_t kInlineBytes = 1 << 20;
// A worker takes pieces of work of about this many bytes: large enough to keep prefetches going,
// small enough to keep all workers busy to the end.
constexpr std::int64_t kPieceBytes = 1 << 18;
constexpr std::int64_t kLine = 64;
// While row i (one token's K or V in both blocks) is read, the cache lines of row i + kAhead are prefetched.
constexpr std::int64_t kAhead = 2;
// While row i is read, the first address of row i + kPagesAhead is prefetched. The CPU then
// has time to translate the address, which is often on a memory page that was not read lately.
constexpr std::int64_t kPagesAhead = 16;

struct Task {
  const Pool& pool;
  const std::int64_t* dst;
  const std::int64_t* src;
  const std::int32_t* shift;
  std::int64_t pairs;
  std::int64_t block;
  double* out;

  std::int64_t units() const { return pairs * pool.num_layers * 2; }
  std::int64_t entries() const { return pairs * block; }
};

// One token's K or V in both blocks of a pair, x and y, and the offsets from there to the row to prefetch.
template <class Element>
struct Row {
  const Element* x;
  const Element* y;
  std::uintptr_t next_x;  // bytes from x to the row to prefetch, modulo 2^64
  std::uintptr_t next_y;

  RC_INLINE Row at(std::int64_t offset) const { return {x + offset, y + offset, next_x, next_y}; }

  // Prefetches `bytes` bytes of the row to which next_x and next_y lead, from element `index` on. A
  // prefetch is only a hint, so any address is allowed.
  RC_INLINE void fetch(std::int64_t index, std::int64_t bytes) const {
    const auto from_x = reinterpret_cast<std::uintptr_t>(x + index) + next_x;
    const auto from_y = reinterpret_cast<std::uintptr_t>(y + index) + next_y;
    for (std::int64_t line = 0; line < bytes; line += kLine) {
      prefetch(from_x + static_cast<std::uintptr_t>(line));
      prefetch(from_y + static_cast<std::uintptr_t>(line));
    }
  }
};

template <class Element>
RC_INLINE void add_plain(const Row<Element>& row, std::int64_t count, Sum& sum) {
  constexpr std::int64_t kStep = kChains * kLanes;
  std::int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    row.fetch(i, kStep * static_cast<std::int64_t>(sizeof(Element)));
    for (int chain = 0; chain < kChains; ++chain) {
      sum.add(chain, load(row.x + i + chain * kLanes), load(row.y + i + chain * kLanes));
    }
  }
  for (; i + kLanes <= count; i += kLanes) sum.add(0, load(row.x + i), load(row.y + i));
  if (i < count) sum.add(1, load_some(row.x + i, count - i), load_some(row.y + i, count - i));
}

// Element i of the first half of the rotary dims is rotated together with element i of the second half.
template <class Element>
RC_INLINE void add_rotated_halves(const Row<Element>& row, std::int64_t half, const float* cosines,
                                 const float* sines, float sign, Sum& sum) {
  const auto add = [&](int chain, Floats x0, Floats x1, Floats y0, Floats y1, Floats c, Floats s) {
    s *= sign;
    sum.add(chain, x0, multiply_add(y0, c, -(y1 * s)));
    sum.add(chain + 1, x1, multiply_add(y1, c, y0 * s));
  };
  const Element* x = row.x;
  const Element* y = row.y;
  std::int64_t i = 0;
  int chain = 0;
  for (; i + kLanes <= half; i += kLanes, chain ^= 2) {
    if (i * static_cast<std::int64_t>(sizeof(Element)) % kLine == 0) {
      row.fetch(i, 1);
      row.fetch(i + half, 1);
    }
    add(chain, load(x + i), load(x + half + i), load(y + i), load(y + half + i), load(cosines + i),
        load(sines + i));
  }
  if (i < half) {
    const std::int64_t rest = half - i;
    add(chain, load_some(x + i, rest), load_some(x + half + i, rest), load_some(y + i, rest),
        load_some(y + half + i, rest), load_some(cosines + i, rest), load_some(sines + i, rest));
  }
}

// Elements 2i and 2i + 1 are rotated together. `factors` holds rotary_dim cosines, by which
// the elements are multiplied, then rotary_dim signed sines, by which the elements' neighbours are.
template <class Element>
RC_INLINE void add_rotated_neighbours(const Row<Element>& row, std::int64_t rotary_dim,
                                     const float* factors, Sum& sum) {
  const auto add = [&](int chain, Floats x, Floats y, Floats own, Floats other) {
    sum.add(chain, x, multiply_add(y, own, swap_neighbours(y) * other));
  };
  std::int64_t i = 0;
  int chain = 0;
  for (; i + kLanes <= rotary_dim; i += kLanes, chain ^= 1) {
    if (i * static_cast<std::int64_t>(sizeof(Element)) % kLine == 0) row.fetch(i, 1);
    add(chain, load(row.x + i), load(row.y + i), load(factors + i), load(factors + rotary_dim + i));
  }
  if (i < rotary_dim) {
    const std::int64_t rest = rotary_dim - i;
    add(chain, load_some(row.x + i, rest), load_some(row.y + i, rest), load_some(factors + i, rest),
        load_some(factors + rotary_dim + i, rest));
  }
}

void expand_neighbours(const Pool& pool, const float* cosines, const float* sines, float sign,
                       float* factors) {
  float* others = factors + pool.rotary_dim;
  for (std::int64_t i = 0; i < pool.rotary_dim / 2; ++i) {
    factors[2 * i] = factors[2 * i + 1] = cosines[i];
    others[2 * i] = -sign * sines[i];
    others[2 * i + 1] = sign * sines[i];
  }
}

template <class Element>
class Worker {
 public:
  explicit Worker(const Task& task) : task_(task), pool_(task.pool) {
    if (task.shift != nullptr && !pool_.is_neox) {
      factors_.resize(static_cast<std::size_t>(2 * pool_.rotary_dim));
    }
  }

  // Computes units [begin, end). A unit is one pair of blocks in one buffer: K or V of a layer. The
  // units are ordered by buffer, because the page tables of one buffer fit in a cache.
  void run(std::int64_t begin, std::int64_t end) {
    if (begin == end) return;
    const std::int64_t last = end * task_.block - 1;
    std::int64_t at = begin * task_.block;
    Cursor here = cursor(at);
    Cursor soon = cursor(std::min(at + kAhead, last));
    Cursor later = cursor(std::min(at + kPagesAhead, last));
    Sum sum;
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const int side = static_cast<int>(here.buffer % 2);
      const bool rotated = side == 0 && task_.shift != nullptr;
      double* out = task_.out + here.entry / task_.block * 2 * pool_.num_layers + here.buffer;
      for (std::int64_t token = 0; token < task_.block; ++token, ++at) {
        Row<Element> row = locate(here);
        const Row<Element> next = locate(soon);
        row.next_x = reinterpret_cast<std::uintptr_t>(next.x) -
                     reinterpret_cast<std::uintptr_t>(row.x);
        row.next_y = reinterpret_cast<std::uintptr_t>(next.y) -
                     reinterpret_cast<std::uintptr_t>(row.y);
        const Row<Element> distant = locate(later);
        prefetch(reinterpret_cast<std::uintptr_t>(distant.x));
        prefetch(reinterpret_cast<std::uintptr_t>(distant.y));
        const std::int32_t shift = rotated ? task_.shift[here.entry] : 0;
        if (shift == 0) {
          add_as_cached(row, side, sum);
        } else {
          add_rotated(row, shift, sum);
        }
        sum.end_token();
        step(here);
        if (at + kAhead < last) step(soon);
        if (at + kPagesAhead < last) step(later);
      }
      *out = sum.end_block();
    }
  }

 private:
  // Identifies a row: the index of its buffer, and the index of its slots in `dst` and `src`.
  struct Cursor {
    std::int64_t buffer;
    std::int64_t entry;
  };

  Cursor cursor(std::int64_t at) const { return {at / task_.entries(), at % task_.entries()}; }

  RC_INLINE void step(Cursor& cursor) const {
    if (++cursor.entry == task_.entries()) cursor = {cursor.buffer + 1, 0};
  }

  RC_INLINE Row<Element> locate(const Cursor& cursor) const {
    const auto* base = static_cast<const Element*>(pool_.bases[cursor.buffer]);
    const std::int64_t stride = pool_.slot_stride[cursor.buffer % 2];
    return {base + task_.dst[cursor.entry] * stride, base + task_.src[cursor.entry] * stride, 0, 0};
  }

  void add_as_cached(const Row<Element>& row, int side, Sum& sum) const {
    const std::int64_t dim = pool_.head_dim[side];
    const std::int64_t stride = pool_.head_stride[side];
    if (stride == dim) {
      add_plain(row, pool_.num_heads * dim, sum);
      return;
    }
    for (std::int64_t head = 0; head < pool_.num_heads; ++head) {
      add_plain(row.at(head * stride), dim, sum);
    }
  }

  void add_rotated(const Row<Element>& row, std::int32_t shift, Sum& sum) {
    const std::int64_t dim = pool_.head_dim[0];
    const std::int64_t rotary = pool_.rotary_dim;
    const std::int64_t half = rotary / 2;
    const std::int64_t distance = shift < 0 ? -static_cast<std::int64_t>(shift) : shift;
    const float sign = shift < 0 ? -1.0f : 1.0f;
    const float* cosines = pool_.cosines + distance * half;
    const float* sines = pool_.sines + distance * half;
    if (!pool_.is_neox) expand_neighbours(pool_, cosines, sines, sign, factors_.data());
    for (std::int64_t head = 0; head < pool_.num_heads; ++head) {
      const Row<Element> part = row.at(head * pool_.head_stride[0]);
      if (pool_.is_neox) {
        add_rotated_halves(part, half, cosines, sines, sign, sum);
      } else {
        add_rotated_neighbours(part, rotary, factors_.data(), sum);
      }
      if (rotary < dim) add_plain(part.at(rotary), dim - rotary, sum);
    }
  }

  const Task& task_;
  const Pool& pool_;
  std::vector<float> factors_;
};

template <class Element>
std::int32_t run(const Task& task, std::int64_t threads) {
  const Pool& pool = task.pool;
  const std::int64_t units = task.units();
  const std::int64_t unit_bytes = std::max<std::int64_t>(
      1, task.block * pool.num_heads * (pool.head_dim[0] + pool.head_dim[1]) *
             static_cast<std::int64_t>(sizeof(Element)));
  const std::int64_t piece = std::max<std::int64_t>(1, kPieceBytes / unit_bytes);
  const std::int64_t pieces = (units + piece - 1) / piece;
  threads = units * unit_bytes < kInlineBytes ? 1 : std::min(threads, pieces);
  std::atomic<std::int64_t> next{0};
  const bool done = on_threads(threads, [&] {
    Worker<Element> worker(task);
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      worker.run(i * piece, std::min(units, (i + 1) * piece));
    }
  });
  return done ? REASONCACHE_OK : REASONCACHE_NO_MEMORY;
}

}  // namespace
}  // namespace distance
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_distance(const reasoncache_pool* pool, const std::int64_t* dst,
                                             const std::int64_t* src, const std::int32_t* shift,
                                             std::int64_t pairs, std::int64_t block,
                                             std::int64_t threads, double* out) noexcept {
  using namespace reasoncache;
  using namespace reasoncache::distance;
  const Task task{*pool, dst, src, shift, pairs, block, out};
  if (!in_pool(*pool, dst, task.entries())) return REASONCACHE_BAD_DST;
  if (!in_pool(*pool, src, task.entries())) return REASONCACHE_BAD_SRC;
  if (!in_table(*pool, shift, task.entries())) return REASONCACHE_BAD_SHIFT;
  return with_element(pool->element, [&](auto type) {
    return distance::run<typename decltype(type)::type>(task, threads);
  });
}
