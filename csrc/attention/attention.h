// SPDX-License-Identifier: Apache-2.0
// C interface of paged attention; `NativePool` in sglang_reasoncache/native/pool.py calls it.
#pragma once

#include <cstdint>

#include "pool/pool.h"

namespace reasoncache {
namespace attention {

// Entries of a request that share a list of rotations, a bit for each.
constexpr std::int64_t kRotationTile = 64;

// One query per row, each over its own range of entries.
struct DecodeCall {
  const void* query;  // row 0, head 0
  void* out;          // [batch][num_heads][v_dim]
  std::int64_t batch;
  std::int64_t num_heads;     // a multiple of the KV heads
  std::int64_t q_row_stride;  // elements
  std::int64_t q_head_stride;
  const std::int32_t* begin;       // [batch], first entry of each query
  const std::int32_t* end;         // [batch], one past its last
  const std::int32_t* kv_indices;  // [total]
  const std::int32_t* shift;       // [total], null: nothing is shifted
  std::int64_t total;
  // The first tile of row b has the number begin[b] / 64 + b. A tile's rotations are tile_ptr[tile]
  // to tile_ptr[tile + 1]. Each has a number of positions `by`, and `bits`: a bit is set where the
  // key of that entry is used rotated by this number. A tile's first rotation is by 0. A tile
  // without rotations uses each key once, as cached.
  const std::int32_t* tile_ptr;  // [total / 64 + batch + 1], null: no rotations
  const std::int32_t* by;        // [rotations]
  const std::uint64_t* bits;     // [rotations]
  std::int64_t rotations;
  const float* sinks;  // [num_heads], logits without a value; null: none
  float scale;
  float logit_cap;  // 0: none
  std::int64_t element;  // of query and out: fp32, bf16 or fp16
  std::int64_t threads;
};

}  // namespace attention
}  // namespace reasoncache

#define RC_EXPORT __attribute__((visibility("default")))

extern "C" {

// All calls return a reasoncache_status, may be made concurrently, and take a pool of one layer.

// Makes the plan of a forward from rows of req_to_token, in one pass. `rows` [num_rows][row_stride]
// have the slot of each of `width` positions; below 0: evicted. `requests` [batch] are indices of
// rows, `lengths` [batch] the positions in use. The newest `reach` positions of a row are read; 0:
// all. `cached_at` is [num_slots]; null: no slot is shifted.
//
// Writes kv_indptr [batch + 1], kv_indices [capacity], shift [capacity]
// (null exactly if cached_at is), and is_shifted: whether any shift is not 0. With tile_ptr
// [capacity / 64 + batch + 1], a position has no entry if the positions read include its slot's
// cached position, naming that slot. Rotations take the place of such entries (see DecodeCall): by
// and bits [capacity + capacity / 64 + batch], and their number. What is then in `shift` means
// nothing. If the status is not OK, the plan is unspecified.
RC_EXPORT std::int32_t reasoncache_plan(
    const std::int32_t* rows, std::int64_t num_rows, std::int64_t row_stride, std::int64_t width,
    const std::int64_t* requests, const std::int64_t* lengths, std::int64_t batch,
    std::int64_t reach, const std::int32_t* cached_at, std::int64_t num_slots,
    std::int32_t* kv_indptr, std::int32_t* kv_indices, std::int32_t* shift,
    std::int64_t capacity, std::int32_t* tile_ptr, std::int32_t* by, std::uint64_t* bits,
    std::int32_t* is_shifted, std::int32_t* rotations) noexcept;

// out[b] = softmax(scale * q[b] . k) v over entries [begin[b], end[b]), keys rotated by their
// shift. A query without entries gets zeros. No slot is read if the status is one of
// REASONCACHE_BAD_*. The result does not depend on the number of threads. Arguments: see
// DecodeCall.
RC_EXPORT std::int32_t reasoncache_decode(
    const reasoncache_pool* pool, const void* query, void* out, std::int64_t batch,
    std::int64_t num_heads, std::int64_t q_row_stride, std::int64_t q_head_stride,
    const std::int32_t* begin, const std::int32_t* end, const std::int32_t* kv_indices,
    const std::int32_t* shift, std::int64_t total, const std::int32_t* tile_ptr,
    const std::int32_t* by, const std::uint64_t* bits, std::int64_t rotations, const float* sinks,
    float scale, float logit_cap, std::int64_t element, std::int64_t threads) noexcept;

// Copies `count` entries out, heads first: out_k [num_heads][count][k_dim], out_v
// [num_heads][count][v_dim], of type `element`: fp32, bf16 or fp16. Each key is rotated by its
// shift; `shift` null: keys are copied as they are.
RC_EXPORT std::int32_t reasoncache_gather(const reasoncache_pool* pool,
                                          const std::int32_t* kv_indices,
                                          const std::int32_t* shift, std::int64_t count,
                                          void* out_k, void* out_v, std::int64_t element,
                                          std::int64_t threads) noexcept;
}
