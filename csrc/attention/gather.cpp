// SPDX-License-Identifier: Apache-2.0
// Copies keys and values of given slots to contiguous memory, heads first, and rotates keys by their shifts.

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "pool/workers.h"
#include "rotate.h"

namespace reasoncache {
namespace attention {
namespace {

struct Call {
  const std::int32_t* kv_indices;
  const std::int32_t* shift;
  std::int64_t count;
  void* out_k;
  void* out_v;
};

constexpr std::int64_t kChunk = 256;  // entries that a thread takes at a time
constexpr std::int64_t kInlineBytes = 1 << 18;  // fewer bytes than this are copied by one thread
constexpr std::int64_t kAhead = 8;  // how many entries ahead keys and values are prefetched

struct Task {
  const Pool& pool;
  const Call& call;
  std::atomic<std::int64_t> next{0};
};

template <class Element, class Out>
void copy_head(const Element* from, std::int64_t dim, Out* to) {
  if constexpr (std::is_same_v<Element, Out>) {
    std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(dim) * sizeof *to);
  } else {
    alignas(64) float lanes[kLanes];
    for (std::int64_t i = 0; i < dim; i += kLanes) {
      const std::int64_t here = std::min<std::int64_t>(kLanes, dim - i);
      store(lanes, here < kLanes ? load_some(from + i, here) : load(from + i));
      for (std::int64_t j = 0; j < here; ++j) put(to + i + j, lanes[j]);
    }
  }
}

template <class Element, class Out>
void rotate_head(const Pool& pool, std::int32_t shift, const Element* from, float* scratch,
               Out* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= pool.head_dim[0]; i += kLanes) store(scratch + i, load(from + i));
  if (i < pool.head_dim[0]) {
    const Floats rest = load_some(from + i, pool.head_dim[0] - i);
    std::memcpy(scratch + i, &rest, static_cast<std::size_t>(pool.head_dim[0] - i) * sizeof(float));
  }
  rotate(pool, shift, false, scratch, scratch);
  for (i = 0; i < pool.head_dim[0]; ++i) put(to + i, scratch[i]);
}

template <class Element, class Out>
void work(Task& task) {
  const Pool& pool = task.pool;
  const Call& call = task.call;
  std::vector<float> scratch(static_cast<std::size_t>(pool.head_dim[0]));
  const auto* keys = static_cast<const Element*>(pool.bases[0]);
  const auto* values = static_cast<const Element*>(pool.bases[1]);
  auto* out_k = static_cast<Out*>(call.out_k);
  auto* out_v = static_cast<Out*>(call.out_v);
  const std::int64_t chunks = (call.count + kChunk - 1) / kChunk;
  for (std::int64_t chunk; (chunk = task.next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
    const std::int64_t end = std::min(call.count, (chunk + 1) * kChunk);
    for (std::int64_t i = chunk * kChunk; i < end; ++i) {
      const std::int64_t later = call.kv_indices[std::min(i + kAhead, call.count - 1)];
      prefetch(reinterpret_cast<std::uintptr_t>(keys + later * pool.slot_stride[0]));
      prefetch(reinterpret_cast<std::uintptr_t>(values + later * pool.slot_stride[1]));
      const std::int64_t slot = call.kv_indices[i];
      const std::int32_t shift = call.shift == nullptr ? 0 : call.shift[i];
      for (std::int64_t head = 0; head < pool.num_heads; ++head) {
        const Element* key = keys + slot * pool.slot_stride[0] + head * pool.head_stride[0];
        Out* to = out_k + (head * call.count + i) * pool.head_dim[0];
        if (shift == 0) {
          copy_head(key, pool.head_dim[0], to);
        } else {
          rotate_head(pool, shift, key, scratch.data(), to);
        }
        copy_head(values + slot * pool.slot_stride[1] + head * pool.head_stride[1], pool.head_dim[1],
                  out_v + (head * call.count + i) * pool.head_dim[1]);
      }
    }
  }
}

template <class Element, class Out>
std::int32_t run(const Pool& pool, const Call& call, std::int64_t threads) {
  Task task{pool, call};
  const std::int64_t size = call.count * pool.num_heads * (pool.head_dim[0] + pool.head_dim[1]) *
                            static_cast<std::int64_t>(sizeof(Element));
  const bool done =
      on_threads(size < kInlineBytes ? 1 : threads, [&task] { work<Element, Out>(task); });
  return done ? REASONCACHE_OK : REASONCACHE_NO_MEMORY;
}

}  // namespace
}  // namespace attention
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_gather(const reasoncache_pool* pool,
                                           const std::int32_t* kv_indices,
                                           const std::int32_t* shift, std::int64_t count,
                                           void* out_k, void* out_v, std::int64_t element,
                                           std::int64_t threads) noexcept {
  using namespace reasoncache;
  if (pool->rotary_dim > pool->head_dim[0]) return REASONCACHE_BAD_CALL;
  if (!in_pool(*pool, kv_indices, count)) return REASONCACHE_BAD_SLOT;
  if (!in_table(*pool, shift, count)) return REASONCACHE_BAD_SHIFT;
  if (count == 0) return REASONCACHE_OK;
  const attention::Call call{kv_indices, shift, count, out_k, out_v};
  return with_element(pool->element, [&](auto type) {
    return with_query_element(element, [&](auto out) {
      using Element = typename decltype(type)::type;
      return attention::run<Element, typename decltype(out)::type>(*pool, call, threads);
    });
  });
}
