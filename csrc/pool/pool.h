// SPDX-License-Identifier: Apache-2.0
// The struct that describes a KV pool in host memory to the kernels.
// sglang_reasoncache/native/pool.py fills in the struct.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "pool/element.h"

extern "C" {

// Element types, in the order of DTYPES in sglang_reasoncache/native/pool.py.
enum reasoncache_element : std::int32_t {
  REASONCACHE_FLOAT32 = 0,
  REASONCACHE_BFLOAT16 = 1,
  REASONCACHE_FLOAT16 = 2,
  REASONCACHE_FLOAT8_E4M3FN = 3,
  REASONCACHE_FLOAT8_E5M2 = 4,
};

enum reasoncache_status : std::int32_t {
  REASONCACHE_OK = 0,
  REASONCACHE_BAD_ROW = 1,    // a row index outside req_to_token
  REASONCACHE_BAD_LEN = 2,    // a length outside [0, width], or a plan with too many entries
  REASONCACHE_BAD_SLOT = 3,   // a slot outside the pool
  REASONCACHE_BAD_DST = 4,    // a destination slot outside the pool, in a distance call
  REASONCACHE_BAD_SRC = 5,    // a source slot outside the pool, in a distance call
  REASONCACHE_BAD_RANGE = 6,  // begin, end or tile_ptr of a decode call is out of order or bounds
  REASONCACHE_BAD_SHIFT = 7,  // a rotation by table_rows or more positions, in either direction
  REASONCACHE_BAD_CALL = 8,   // an unknown element type, or sizes that do not fit together
  REASONCACHE_NO_MEMORY = 9,  // not enough memory; the outputs are unspecified
};

// The KV buffers of layers with the same layout, and the model's rotary table. In arrays of two, the
// first element is for keys, the second for values.
struct reasoncache_pool {
  const void* const* bases;  // [num_layers][2], address of slot 0, head 0
  std::int64_t num_layers;
  std::int64_t num_slots;
  std::int64_t num_heads;
  std::int64_t head_dim[2];     // in elements
  std::int64_t slot_stride[2];  // in elements
  std::int64_t head_stride[2];  // in elements
  const float* cosines;         // [table_rows][rotary_dim / 2], null without rotation
  const float* sines;           // like cosines
  std::int64_t table_rows;
  std::int64_t rotary_dim;  // at most head_dim[0], even
  std::int32_t is_neox;     // 1: dims i, i + rotary_dim / 2 rotate together; 0: dims 2i, 2i + 1
  std::int32_t element;     // reasoncache_element
  // 1 if the pool has latent rows (MLA). Then the first head_dim[1] dims of a query are multiplied
  // with the value and never rotated; the other head_dim[0] dims are multiplied with the key.
  std::int32_t is_latent;
};
}

namespace reasoncache {

using Pool = reasoncache_pool;

template <class T>
struct Type {
  using type = T;
};

// Calls body(Type<Q>{}) with the C++ type Q of `element`, which may be fp32, bf16 or fp16.
template <class Body>
std::int32_t with_query_element(std::int64_t element, Body&& body) {
  switch (element) {
    case REASONCACHE_FLOAT32:
      return body(Type<float>{});
    case REASONCACHE_BFLOAT16:
      return body(Type<Bfloat16>{});
    case REASONCACHE_FLOAT16:
      return body(Type<Float16>{});
    default:
      return REASONCACHE_BAD_CALL;
  }
}

// Calls body(Type<Element>{}) with the C++ type of `element`, which may be any reasoncache_element.
template <class Body>
std::int32_t with_element(std::int64_t element, Body&& body) {
  switch (element) {
    case REASONCACHE_FLOAT8_E4M3FN:
      return body(Type<Float8E4M3>{});
    case REASONCACHE_FLOAT8_E5M2:
      return body(Type<Float8E5M2>{});
    default:
      return with_query_element(element, body);
  }
}

template <class Slot>
bool in_pool(const Pool& pool, const Slot* slots, std::int64_t count) {
  std::make_unsigned_t<Slot> most = 0;  // as unsigned, a negative slot is a huge number
  for (std::int64_t i = 0; i < count; ++i) {
    most = std::max(most, static_cast<std::make_unsigned_t<Slot>>(slots[i]));
  }
  return count == 0 || most < static_cast<std::uint64_t>(pool.num_slots);
}

// Whether the rotary table has a row for every shift that is not 0. True if `shift` is null.
inline bool in_table(const Pool& pool, const std::int32_t* shift, std::int64_t count) {
  std::int32_t least = 0;
  std::int32_t most = 0;
  for (std::int64_t i = 0; shift != nullptr && i < count; ++i) {
    least = std::min(least, shift[i]);
    most = std::max(most, shift[i]);
  }
  return (least == 0 && most == 0) ||
         (most < pool.table_rows && -static_cast<std::int64_t>(least) < pool.table_rows);
}

}  // namespace reasoncache
