// SPDX-License-Identifier: Apache-2.0
// C interface of paged attention; `NativePool` in sglang_reasoncache/native/pool.py calls it.
#pragma once

#include <cstdint>

#include "pool/pool.h"

namespace reasoncache {
namespace attention {

// Rotations are listed for tiles of this many entries (slots to read), with a bit for each entry.
constexpr std::int64_t kRotationTile = 64;

// Each query of a call reads a range of entries. Queries of one request may read the same entries.
struct DecodeCall {
  const void* query;  // query 0, head 0
  void* out;          // [batch][num_heads][v_dim]
  std::int64_t batch;         // queries
  std::int64_t num_heads;     // a multiple of the KV heads
  std::int64_t q_row_stride;  // elements
  std::int64_t q_head_stride;
  const std::int32_t* begin;       // [batch], first entry of each query
  const std::int32_t* end;         // [batch], one past the last entry of each query
  const std::int32_t* kv_indices;  // [total]
  const std::int32_t* shift;       // [total], null if no key is shifted
  std::int64_t total;
  // The first tile of query b has the number begin[b] / 64 + b. A tile's rotations are
  // tile_ptr[tile] up to, but not including, tile_ptr[tile + 1]. If bit i of bits[r] is set, the
  // tile uses the key of its entry i after a rotation by by[r] positions. A tile's first rotation
  // is by 0. A tile without rotations uses each key once, as cached.
  const std::int32_t* tile_ptr;  // [total / 64 + batch + 1], null if there are no rotations
  const std::int32_t* by;        // [rotations]
  const std::uint64_t* bits;     // [rotations]
  std::int64_t rotations;
  const float* sinks;  // [num_heads], logits without a value; null if there are none
  float scale;
  float logit_cap;  // 0 for no cap
  std::int64_t element;  // of query and out: fp32, bf16 or fp16
  std::int64_t threads;
};

}  // namespace attention
}  // namespace reasoncache

#define RC_EXPORT __attribute__((visibility("default")))

extern "C" {

// All functions return a reasoncache_status and may be called concurrently. A `pool` that they take
// has one layer.

// Makes the plan of a forward from rows of req_to_token, in one pass. `rows` [num_rows][row_stride]
// has the slot of each of `width` positions; a number below 0 means that the position was evicted.
// `requests` [batch] has the index of each request's row, `lengths` [batch] its positions in use.
// Only the newest `reach` positions of a row are read, or all if `reach` is 0. `cached_at`
// [num_slots] has the position for which each slot's key was rotated; null: no slot is shifted.
//
// Writes kv_indptr [batch + 1], kv_indices [capacity], shift [capacity] (null exactly if cached_at
// is null), and is_shifted: whether any shift is not 0. If tile_ptr [capacity / 64 + batch + 1] is
// not null, entries are merged: if a row names a slot at the position of its cached key and also at
// other positions, the latter get rotations (see DecodeCall) instead of entries. Rotations go to
// `by` and `bits` [capacity + capacity / 64 + batch], their number to `rotations`. `is_shifted` is
// then 0, and `shift` means nothing. If the status is not OK, the plan is unspecified.
RC_EXPORT std::int32_t reasoncache_plan(
    const std::int32_t* rows, std::int64_t num_rows, std::int64_t row_stride, std::int64_t width,
    const std::int64_t* requests, const std::int64_t* lengths, std::int64_t batch,
    std::int64_t reach, const std::int32_t* cached_at, std::int64_t num_slots,
    std::int32_t* kv_indptr, std::int32_t* kv_indices, std::int32_t* shift,
    std::int64_t capacity, std::int32_t* tile_ptr, std::int32_t* by, std::uint64_t* bits,
    std::int32_t* is_shifted, std::int32_t* rotations) noexcept;

// Computes out[b] = softmax(scale * q[b] . k) v over entries [begin[b], end[b]). `shift` and
// the rotations say how far keys are rotated. A query without entries gets zeros. No slot is read if
// the status is one of REASONCACHE_BAD_*. The result does not depend on the number of threads.
// DecodeCall describes the arguments.
RC_EXPORT std::int32_t reasoncache_decode(
    const reasoncache_pool* pool, const void* query, void* out, std::int64_t batch,
    std::int64_t num_heads, std::int64_t q_row_stride, std::int64_t q_head_stride,
    const std::int32_t* begin, const std::int32_t* end, const std::int32_t* kv_indices,
    const std::int32_t* shift, std::int64_t total, const std::int32_t* tile_ptr,
    const std::int32_t* by, const std::uint64_t* bits, std::int64_t rotations, const float* sinks,
    float scale, float logit_cap, std::int64_t element, std::int64_t threads) noexcept;

// Copies `count` entries, heads first, to out_k [num_heads][count][k_dim] and out_v
// [num_heads][count][v_dim], of type `element`: fp32, bf16 or fp16. Each key is rotated by its
// shift. If `shift` is null, keys are copied as they are.
RC_EXPORT std::int32_t reasoncache_gather(const reasoncache_pool* pool,
                                          const std::int32_t* kv_indices,
                                          const std::int32_t* shift, std::int64_t count,
                                          void* out_k, void* out_v, std::int64_t element,
                                          std::int64_t threads) noexcept;
}
