// SPDX-License-Identifier: Apache-2.0
// Entries of a pool as contiguous K and V, heads first, keys rotated to where they are used.

#include <algorithm>
#include <atomic>
#include <exception>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "distance/distance.h"
#include "rotate.h"
#include "workers.h"

namespace reasoncache {
namespace attention {
namespace {

using Call = reasoncache_gather_call;

constexpr std::int64_t kChunk = 256;  // entries
constexpr std::int64_t kInlineBytes = 1 << 18;
constexpr std::int64_t kAhead = 8;  // rows

struct Task {
  const reasoncache_kv& kv;
  const Call& call;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
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
void turn_head(const reasoncache_kv& kv, std::int32_t shift, const Element* from, float* scratch,
               Out* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= kv.k_dim; i += kLanes) store(scratch + i, load(from + i));
  if (i < kv.k_dim) {
    const Floats rest = load_some(from + i, kv.k_dim - i);
    std::memcpy(scratch + i, &rest, static_cast<std::size_t>(kv.k_dim - i) * sizeof(float));
  }
  rotate(kv, shift, false, scratch);
  for (i = 0; i < kv.k_dim; ++i) put(to + i, scratch[i]);
}

template <class Element, class Out>
void work(Task& task) {
  const reasoncache_kv& kv = task.kv;
  const Call& call = task.call;
  std::vector<float> scratch(static_cast<std::size_t>(kv.k_dim));
  const auto* keys = static_cast<const Element*>(kv.keys);
  const auto* values = static_cast<const Element*>(kv.values);
  auto* out_k = static_cast<Out*>(call.out_k);
  auto* out_v = static_cast<Out*>(call.out_v);
  const std::int64_t chunks = (call.count + kChunk - 1) / kChunk;
  for (std::int64_t chunk; (chunk = task.next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
    const std::int64_t end = std::min(call.count, (chunk + 1) * kChunk);
    for (std::int64_t i = chunk * kChunk; i < end; ++i) {
      const std::int64_t later = call.kv_indices[std::min(i + kAhead, call.count - 1)];
      prefetch(reinterpret_cast<std::uintptr_t>(keys + later * kv.k_slot_stride));
      prefetch(reinterpret_cast<std::uintptr_t>(values + later * kv.v_slot_stride));
      const std::int64_t slot = call.kv_indices[i];
      const std::int32_t shift = call.shift == nullptr ? 0 : call.shift[i];
      for (std::int64_t head = 0; head < kv.num_heads; ++head) {
        const Element* key = keys + slot * kv.k_slot_stride + head * kv.k_head_stride;
        Out* to = out_k + (head * call.count + i) * kv.k_dim;
        if (shift == 0) {
          copy_head(key, kv.k_dim, to);
        } else {
          turn_head(kv, shift, key, scratch.data(), to);
        }
        copy_head(values + slot * kv.v_slot_stride + head * kv.v_head_stride, kv.v_dim,
                  out_v + (head * call.count + i) * kv.v_dim);
      }
    }
  }
}

template <class Element, class Out>
std::int32_t run(const reasoncache_kv& kv, const Call& call) {
  Task task{kv, call};
  const auto body = [](void* context) {
    auto& shared = *static_cast<Task*>(context);
    try {
      work<Element, Out>(shared);
    } catch (const std::exception&) {
      shared.failed.store(true);
    }
  };
  const std::int64_t size = call.count * kv.num_heads * (kv.k_dim + kv.v_dim) *
                            static_cast<std::int64_t>(sizeof(Element));
  if (call.threads < 2 || size < kInlineBytes) {
    body(&task);
  } else {
    Workers::get().run(call.threads - 1, body, &task);
  }
  return task.failed ? REASONCACHE_ATTENTION_NO_MEMORY : REASONCACHE_ATTENTION_OK;
}

template <class Element>
std::int32_t run(const reasoncache_kv& kv, const Call& call) {
  switch (call.element) {
    case REASONCACHE_FLOAT32:
      return run<Element, float>(kv, call);
    case REASONCACHE_BFLOAT16:
      return run<Element, Bfloat16>(kv, call);
    case REASONCACHE_FLOAT16:
      return run<Element, Float16>(kv, call);
    default:
      return REASONCACHE_ATTENTION_BAD_CALL;
  }
}

}  // namespace
}  // namespace attention
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_gather(const reasoncache_kv* kv,
                                           const reasoncache_gather_call* call) noexcept {
  using namespace reasoncache::attention;
  if (kv->rotary_dim > kv->k_dim) return REASONCACHE_ATTENTION_BAD_CALL;
  if (!in_pool(*kv, call->kv_indices, call->count)) return REASONCACHE_ATTENTION_BAD_SLOT;
  if (call->shift != nullptr && !in_table(*kv, call->shift, call->count)) {
    return REASONCACHE_ATTENTION_BAD_SHIFT;
  }
  if (call->count == 0) return REASONCACHE_ATTENTION_OK;
  switch (kv->element) {
    case REASONCACHE_FLOAT32:
      return run<float>(*kv, *call);
    case REASONCACHE_BFLOAT16:
      return run<Bfloat16>(*kv, *call);
    case REASONCACHE_FLOAT16:
      return run<Float16>(*kv, *call);
    case REASONCACHE_FLOAT8_E4M3FN:
      return run<reasoncache::distance::Float8E4M3>(*kv, *call);
    case REASONCACHE_FLOAT8_E5M2:
      return run<reasoncache::distance::Float8E5M2>(*kv, *call);
    default:
      return REASONCACHE_ATTENTION_BAD_CALL;
  }
}
