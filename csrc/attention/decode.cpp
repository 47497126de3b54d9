// SPDX-License-Identifier: Apache-2.0
// Paged decode attention: checks a call, cuts the call into units (task.h), and computes the units on threads.

#include <algorithm>
#include <exception>

#include "attention.h"
#include "decode_worker.h"
#include "pool/workers.h"
#include "task.h"

namespace reasoncache {
namespace attention {
namespace {

// If a call reads fewer bytes than this, waking a second thread costs more time than it saves.
constexpr std::int64_t kInlineBytes = 1 << 18;

std::int32_t check(const Pool& pool, const DecodeCall& call) {
  const bool fits = pool.num_heads > 0 && call.num_heads > 0 &&
                    call.num_heads % pool.num_heads == 0 && pool.head_dim[0] > 0 &&
                    pool.head_dim[1] > 0 && pool.rotary_dim <= pool.head_dim[0] &&
                    call.element >= REASONCACHE_FLOAT32 && call.element <= REASONCACHE_FLOAT16;
  if (!fits) return REASONCACHE_BAD_CALL;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    if (call.begin[b] < 0 || call.end[b] < call.begin[b] || call.end[b] > call.total) {
      return REASONCACHE_BAD_RANGE;
    }
  }
  const std::int64_t tiles = call.tile_ptr == nullptr ? -1 : call.total / kRotationTile + call.batch;
  for (std::int64_t tile = 0; tile <= tiles; ++tile) {
    const std::int64_t least = tile == 0 ? 0 : call.tile_ptr[tile - 1];
    if (call.tile_ptr[tile] < least || call.tile_ptr[tile] > call.rotations) {
      return REASONCACHE_BAD_RANGE;
    }
  }
  if (!in_pool(pool, call.kv_indices, call.total)) return REASONCACHE_BAD_SLOT;
  return in_table(pool, call.shift, call.total) && in_table(pool, call.by, call.rotations)
             ? REASONCACHE_OK
             : REASONCACHE_BAD_SHIFT;
}

template <class Element>
std::int32_t run(Task& task) {
  const Pool& pool = task.pool;
  std::int64_t threads = std::max<std::int64_t>(1, task.call.threads);
  const std::int64_t entries = task.divide(threads);
  const std::int64_t size = entries * pool.num_heads * (pool.head_dim[0] + pool.head_dim[1]) *
                            static_cast<std::int64_t>(sizeof(Element));
  if (size < kInlineBytes || task.units.size() < 2) threads = 1;
  const bool done = on_threads(threads, [&task] { Worker<Element>(task).work(); });
  return done ? REASONCACHE_OK : REASONCACHE_NO_MEMORY;
}

}  // namespace
}  // namespace attention
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_decode(
    const reasoncache_pool* pool, const void* query, void* out, std::int64_t batch,
    std::int64_t num_heads, std::int64_t q_row_stride, std::int64_t q_head_stride,
    const std::int32_t* begin, const std::int32_t* end, const std::int32_t* kv_indices,
    const std::int32_t* shift, std::int64_t total, const std::int32_t* tile_ptr,
    const std::int32_t* by, const std::uint64_t* bits, std::int64_t rotations, const float* sinks,
    float scale, float logit_cap, std::int64_t element, std::int64_t threads) noexcept {
  using namespace reasoncache;
  const attention::DecodeCall call{query, out,  batch, num_heads,  q_row_stride, q_head_stride,
                                   begin, end,  kv_indices, shift, total,        tile_ptr,
                                   by,    bits, rotations,  sinks, scale,        logit_cap,
                                   element, threads};
  const std::int32_t status = attention::check(*pool, call);
  if (status != REASONCACHE_OK || batch == 0) return status;
  try {
    attention::Task task(*pool, call);
    return with_element(pool->element, [&](auto type) {
      return attention::run<typename decltype(type)::type>(task);
    });
  } catch (const std::exception&) {
    return REASONCACHE_NO_MEMORY;
  }
}
