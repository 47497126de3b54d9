// SPDX-License-Identifier: Apache-2.0
// Rotary embedding by whole positions, with rows of the model's own table.
#pragma once

#include "attention.h"
#include "numbers.h"

namespace reasoncache {
namespace attention {

// Turns fp32 `head` [k_dim] in place by `shift` positions, the other way round if `back`.
inline void rotate(const reasoncache_kv& kv, std::int32_t shift, bool back, float* head) {
  const std::int64_t half = kv.rotary_dim / 2;
  const std::int64_t distance = shift < 0 ? -static_cast<std::int64_t>(shift) : shift;
  const float* cosines = kv.cosines + distance * half;
  const float* sines = kv.sines + distance * half;
  const float sign = (shift < 0) != back ? -1.0f : 1.0f;
  const std::int64_t step = kv.is_neox ? 1 : 2;
  const std::int64_t pair = kv.is_neox ? half : 1;
  const auto turn = [&](std::int64_t i) {
    float* x = head + i * step;
    const float s = sines[i] * sign;
    const float x0 = x[0];
    const float x1 = x[pair];
    x[0] = x0 * cosines[i] - x1 * s;
    x[pair] = x1 * cosines[i] + x0 * s;
  };
  std::int64_t i = 0;
  if (kv.is_neox) {
    for (; i + kLanes <= half; i += kLanes) {
      const Floats c = load(cosines + i);
      const Floats s = load(sines + i) * sign;
      const Floats x0 = load(head + i);
      const Floats x1 = load(head + half + i);
      store(head + i, multiply_add(x0, c, -(x1 * s)));
      store(head + half + i, multiply_add(x1, c, x0 * s));
    }
  }
  for (; i < half; ++i) turn(i);
}

// Whether every shift can be looked up.
inline bool in_table(const reasoncache_kv& kv, const std::int32_t* shift, std::int64_t count) {
  std::int32_t least = 0;
  std::int32_t most = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    least = shift[i] < least ? shift[i] : least;
    most = shift[i] > most ? shift[i] : most;
  }
  return (least == 0 && most == 0) ||
         (most < kv.table_rows && -static_cast<std::int64_t>(least) < kv.table_rows);
}

inline bool in_pool(const reasoncache_kv& kv, const std::int32_t* slots, std::int64_t count) {
  std::uint32_t most = 0;  // a negative slot is a huge one
  for (std::int64_t i = 0; i < count; ++i) {
    const auto slot = static_cast<std::uint32_t>(slots[i]);
    most = slot > most ? slot : most;
  }
  return count == 0 || static_cast<std::int64_t>(most) < kv.num_slots;
}

}  // namespace attention
}  // namespace reasoncache
