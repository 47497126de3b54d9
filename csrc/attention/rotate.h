// SPDX-License-Identifier: Apache-2.0
// Rotates heads of keys and queries by a number of positions, with the model's own rotary table.
#pragma once

#include "attention.h"
#include "numbers.h"

namespace reasoncache {
namespace attention {

// Prefetches the row of the rotary table that a rotation by `shift` reads.
inline void fetch_rotation(const Pool& pool, std::int32_t shift) {
  const std::int64_t half = pool.rotary_dim / 2;
  const std::int64_t row = (shift < 0 ? -static_cast<std::int64_t>(shift) : shift) * half;
  for (std::int64_t i = 0; i < half; i += 64 / static_cast<std::int64_t>(sizeof(float))) {
    prefetch(reinterpret_cast<std::uintptr_t>(pool.cosines + row + i));
    prefetch(reinterpret_cast<std::uintptr_t>(pool.sines + row + i));
  }
}

// Rotates `heads` fp32 heads, `stride` elements apart, by `shift` positions, or by -`shift` if
// `back`. `to` may be `from`. If `to` is other memory, the caller must copy the dims that are not rotated.
inline void rotate(const Pool& pool, std::int32_t shift, bool back, const float* from, float* to,
                   int heads = 1, std::int64_t stride = 0) {
  const std::int64_t half = pool.rotary_dim / 2;
  const std::int64_t distance = shift < 0 ? -static_cast<std::int64_t>(shift) : shift;
  const float* cosines = pool.cosines + distance * half;
  const float* sines = pool.sines + distance * half;
  const float sign = (shift < 0) != back ? -1.0f : 1.0f;
  const std::int64_t step = pool.is_neox ? 1 : 2;
  const std::int64_t pair = pool.is_neox ? half : 1;
  std::int64_t i = 0;
  if (pool.is_neox) {
    for (; i + kLanes <= half; i += kLanes) {
      const Floats c = load(cosines + i);
      const Floats s = load(sines + i) * sign;
      for (int head = 0; head < heads; ++head) {
        const std::int64_t at = head * stride + i;
        const Floats x0 = load(from + at);
        const Floats x1 = load(from + half + at);
        store(to + at, multiply_add(x0, c, -(x1 * s)));
        store(to + half + at, multiply_add(x1, c, x0 * s));
      }
    }
  }
  for (; i < half; ++i) {
    for (int head = 0; head < heads; ++head) {
      const std::int64_t at = head * stride + i * step;
      const float s = sines[i] * sign;
      const float x0 = from[at];
      const float x1 = from[at + pair];
      to[at] = x0 * cosines[i] - x1 * s;
      to[at + pair] = x1 * cosines[i] + x0 * s;
    }
  }
}

}  // namespace attention
}  // namespace reasoncache
