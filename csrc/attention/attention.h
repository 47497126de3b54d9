// SPDX-License-Identifier: Apache-2.0
// C interface of paged attention; sglang_reasoncache/native/attention.py is its other side.
#pragma once

#include <cstdint>

#include "pool/pool.h"

extern "C" {

// Rows of req_to_token to be read by one forward, and where the plan goes.
struct reasoncache_plan_call {
  const std::int32_t* rows;  // [num_rows][row_stride], slot of each position, below 0: evicted
  std::int64_t num_rows;
  std::int64_t row_stride;
  std::int64_t width;             // positions of a row
  const std::int64_t* requests;   // [batch], index of a row
  const std::int64_t* lengths;    // [batch], positions in use
  std::int64_t batch;
  const std::int32_t* cached_at;  // [num_slots], null: no slot is shifted
  std::int64_t num_slots;
  std::int32_t* kv_indptr;   // [batch + 1]
  std::int32_t* kv_indices;  // [capacity]
  std::int32_t* shift;       // [capacity], null exactly if cached_at is
  std::int64_t capacity;
  std::int32_t is_shifted;  // written: whether any shift is not 0
};

// One query per row, each over its own range of entries.
struct reasoncache_decode_call {
  const void* query;  // row 0, head 0
  void* out;
  std::int64_t batch;
  std::int64_t num_heads;     // a multiple of the KV heads
  std::int64_t q_row_stride;  // elements
  std::int64_t q_head_stride;
  std::int64_t out_row_stride;
  std::int64_t out_head_stride;
  const std::int32_t* begin;       // [batch], first entry of each query
  const std::int32_t* end;         // [batch], one past its last
  const std::int32_t* kv_indices;  // [total]
  const std::int32_t* shift;       // [total], null: nothing is shifted
  std::int64_t total;
  const float* sinks;  // [num_heads], logits without a value; null: none
  float scale;
  float logit_cap;       // 0: none
  std::int32_t element;  // of query and out: fp32, bf16 or fp16
  std::int32_t threads;
  // Added to, null if not wanted: softmax weights, summed over the query heads, of the entries
  // of query 0, then of those of query 1, and so on.
  float* weights;
};

// Entries copied out, heads first: out_k [num_heads][count][k_dim], out_v likewise.
struct reasoncache_gather_call {
  const std::int32_t* kv_indices;  // [count]
  const std::int32_t* shift;       // [count], null: nothing is shifted
  std::int64_t count;
  void* out_k;
  void* out_v;
  std::int32_t element;  // of the outputs: fp32, bf16 or fp16
  std::int32_t threads;
};

#define RC_EXPORT __attribute__((visibility("default")))

// All calls return a reasoncache_status, may be made concurrently, and take a pool of one layer.

// One pass over the rows. On a status other than OK the plan is unspecified.
RC_EXPORT std::int32_t reasoncache_plan(reasoncache_plan_call* call) noexcept;

// out[b] = softmax(scale * q[b] . k) v over entries [begin[b], end[b]), keys rotated by their
// shift. No entries: zeros. Reads no slot when a status is BAD. The result does not depend on the
// number of threads.
RC_EXPORT std::int32_t reasoncache_decode(const reasoncache_pool* pool,
                                          const reasoncache_decode_call* call) noexcept;

// Shared entries as contiguous K and V, keys rotated by their shift.
RC_EXPORT std::int32_t reasoncache_gather(const reasoncache_pool* pool,
                                          const reasoncache_gather_call* call) noexcept;
}
