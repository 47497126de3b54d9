// SPDX-License-Identifier: Apache-2.0
// C interface of paged attention, used through sglang_reasoncache/native/pool.py.
#pragma once

#include <cstdint>

#include "pool/pool.h"

namespace reasoncache {
namespace attention {

// Each tile of this many entries (slots to read) has a list of rotations. A rotation has a bit for each entry.
constexpr std::int64_t kRotationTile = 64;

// The arguments of a decode call. A query reads a range of entries. Several queries may read the same entries.
struct DecodeCall {
  const void* query;  // query 0, head 0
  void* out;          // [batch][num_heads][v_dim]
  std::int64_t batch;         // number of queries
  std::int64_t num_heads;     // query heads, a multiple of the number of KV heads
  std::int64_t q_row_stride;  // in elements
  std::int64_t q_head_stride;
  const std::int32_t* begin;       // [batch], first entry of each query
  const std::int32_t* end;         // [batch], one past the last entry of each query
  const std::int32_t* kv_indices;  // [total], slots
  const std::int32_t* shift;       // [total], by how many positions to rotate each key; null: by 0
  std::int64_t total;
  // The first tile of query b has the number begin[b] / 64 + b. The rotations of a tile
  // have the indices tile_ptr[tile] up to, but not including, tile_ptr[tile + 1]. If bit i of bits[r] is
  // set, the key of the tile's entry i is used after a rotation by by[r] positions. The first rotation of
  // a tile is by 0 positions. If a tile has no rotations, each of its keys is used once, as cached.
  const std::int32_t* tile_ptr;  // [total / 64 + batch + 1], null if there are no rotations
  const std::int32_t* by;        // [rotations]
  const std::uint64_t* bits;     // [rotations]
  std::int64_t rotations;
  const float* sinks;  // [num_heads], extra logits without a value; null without sinks
  float scale;
  float logit_cap;  // 0 for no cap
  std::int64_t element;  // type of query and out: fp32, bf16 or fp16
  std::int64_t threads;
};

}  // namespace attention
}  // namespace reasoncache

#define RC_EXPORT __attribute__((visibility("default")))

extern "C" {

// All functions below return a reasoncache_status and may be called concurrently. A `pool` must have
// exactly one layer.

// Plans which slots each request of a forward reads. `rows` [num_rows][row_stride] is req_to_token. A
// row has the slots of `width` positions; a number below 0 means that the position was evicted. `requests`
// [batch] has the index of each request's row, `lengths` [batch] the number of positions in use. Only the
// newest `reach` positions of a row are read, or all if `reach` is 0. `cached_at` [num_slots] has the
// position for which each slot's key was rotated. If `cached_at` is null, no key is shifted.
//
// Writes kv_indptr [batch + 1], kv_indices [capacity], shift [capacity], and is_shifted: whether any shift
// is not 0. `shift` is null if and only if cached_at is. If tile_ptr [capacity / 64 + batch + 1] is not null
// (which requires cached_at), entries are merged: if a row names a slot at the slot's cached position and
// also at other positions, the other positions get rotations (see DecodeCall) instead of entries. Rotations
// go to `by` and `bits` [capacity + capacity / 64 + batch], their number to `rotations`. In a merged plan
// `is_shifted` is 0, and `shift` means nothing. If the status is not OK, all outputs are unspecified.
RC_EXPORT std::int32_t reasoncache_plan(
    const std::int32_t* rows, std::int64_t num_rows, std::int64_t row_stride, std::int64_t width,
    const std::int64_t* requests, const std::int64_t* lengths, std::int64_t batch,
    std::int64_t reach, const std::int32_t* cached_at, std::int64_t num_slots,
    std::int32_t* kv_indptr, std::int32_t* kv_indices, std::int32_t* shift,
    std::int64_t capacity, std::int32_t* tile_ptr, std::int32_t* by, std::uint64_t* bits,
    std::int32_t* is_shifted, std::int32_t* rotations) noexcept;

// Computes out[b] = softmax(scale * q[b] . k) v over entries [begin[b], end[b]). `shift` and
// the rotations say by how many positions keys are rotated. A query without entries gets zeros. No
// slot is read if the status is one of REASONCACHE_BAD_*. The result does not depend on the number of
// threads. DecodeCall describes the arguments.
RC_EXPORT std::int32_t reasoncache_decode(
    const reasoncache_pool* pool, const void* query, void* out, std::int64_t batch,
    std::int64_t num_heads, std::int64_t q_row_stride, std::int64_t q_head_stride,
    const std::int32_t* begin, const std::int32_t* end, const std::int32_t* kv_indices,
    const std::int32_t* shift, std::int64_t total, const std::int32_t* tile_ptr,
    const std::int32_t* by, const std::uint64_t* bits, std::int64_t rotations, const float* sinks,
    float scale, float logit_cap, std::int64_t element, std::int64_t threads) noexcept;

// Copies the keys and values of slots `kv_indices` [count] to out_k [num_heads][count][k_dim] and out_v
// [num_heads][count][v_dim], whose type is `element`: fp32, bf16 or fp16. Key i is rotated by shift[i]
// positions. If `shift` is null, keys are copied as they are.
RC_EXPORT std::int32_t reasoncache_gather(const reasoncache_pool* pool,
                                          const std::int32_t* kv_indices,
                                          const std::int32_t* shift, std::int64_t count,
                                          void* out_k, void* out_v, std::int64_t element,
                                          std::int64_t threads) noexcept;
}
