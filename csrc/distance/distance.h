// SPDX-License-Identifier: Apache-2.0
// C interface of the KV distance; sglang_reasoncache/native/distance.py is its other side.
#pragma once

#include <cstdint>

extern "C" {

// Element types; the order is known to Python.
enum reasoncache_element : std::int32_t {
  REASONCACHE_FLOAT32 = 0,
  REASONCACHE_BFLOAT16 = 1,
  REASONCACHE_FLOAT16 = 2,
  REASONCACHE_FLOAT8_E4M3FN = 3,
  REASONCACHE_FLOAT8_E5M2 = 4,
};

enum reasoncache_distance_sum : std::int32_t {
  REASONCACHE_SQUARES = 0,  // one number: sum (x - y)^2
  REASONCACHE_MOMENTS = 1,  // three numbers: sum x^2, sum y^2, sum x y
};

enum reasoncache_distance_status : std::int32_t {
  REASONCACHE_DISTANCE_OK = 0,
  REASONCACHE_DISTANCE_BAD_DST = 1,    // a slot outside [0, num_slots)
  REASONCACHE_DISTANCE_BAD_SRC = 2,    // likewise
  REASONCACHE_DISTANCE_BAD_SHIFT = 3,  // |shift| not below table_rows
  REASONCACHE_DISTANCE_BAD_CALL = 4,   // an unknown enumerator
  REASONCACHE_DISTANCE_NO_MEMORY = 5,  // out is unspecified
};

// A KV pool and the model's rotary table. Index 0 is the key side, 1 the value side.
struct reasoncache_distance_pool {
  const void* const* bases;     // [num_layers][2], address of slot 0, head 0
  std::int64_t num_layers;
  std::int64_t num_slots;
  std::int64_t num_heads;
  std::int64_t head_dim[2];     // elements
  std::int64_t slot_stride[2];  // elements
  std::int64_t head_stride[2];  // elements
  const float* cosines;         // [table_rows][rotary_dim / 2], null without rotation
  const float* sines;           // likewise
  std::int64_t table_rows;
  std::int64_t rotary_dim;      // at most head_dim[0], even
  std::int32_t is_neox;         // halves are paired, otherwise neighbours
  std::int32_t element;         // reasoncache_element
};

// Sums over blocks of `block` slots: destination `dst` [pairs][block] and source `src`
// likewise, source keys rotated by `shift` [pairs][block] positions (null: as cached).
// Writes out [pairs][num_layers][2][1 or 3]. Reads no slot when a status is BAD.
// Uses up to `threads` threads when there is enough to read. Safe to call concurrently.
__attribute__((visibility("default"))) std::int32_t reasoncache_distance(
    const reasoncache_distance_pool* pool, const std::int64_t* dst, const std::int64_t* src,
    const std::int32_t* shift, std::int64_t pairs, std::int64_t block, std::int32_t sum,
    std::int32_t threads, double* out) noexcept;
}
