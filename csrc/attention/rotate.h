// SPDX-License-Identifier: Apache-2.0
// Rotary embedding by whole positions, with rows of the model's own table.
#pragma once

#include "attention.h"
#include "numbers.h"

namespace reasoncache {
namespace attention {

// Rotates fp32 `head` [k_dim] in place by `shift` positions, or back by them.
inline void rotate(const Pool& pool, std::int32_t shift, bool back, float* head) {
  const std::int64_t half = pool.rotary_dim / 2;
  const std::int64_t distance = shift < 0 ? -static_cast<std::int64_t>(shift) : shift;
  const float* cosines = pool.cosines + distance * half;
  const float* sines = pool.sines + distance * half;
  const float sign = (shift < 0) != back ? -1.0f : 1.0f;
  const std::int64_t step = pool.is_neox ? 1 : 2;
  const std::int64_t pair = pool.is_neox ? half : 1;
  const auto rotate_pair = [&](std::int64_t i) {
    float* x = head + i * step;
    const float s = sines[i] * sign;
    const float x0 = x[0];
    const float x1 = x[pair];
    x[0] = x0 * cosines[i] - x1 * s;
    x[pair] = x1 * cosines[i] + x0 * s;
  };
  std::int64_t i = 0;
  if (pool.is_neox) {
    for (; i + kLanes <= half; i += kLanes) {
      const Floats c = load(cosines + i);
      const Floats s = load(sines + i) * sign;
      const Floats x0 = load(head + i);
      const Floats x1 = load(head + half + i);
      store(head + i, multiply_add(x0, c, -(x1 * s)));
      store(head + half + i, multiply_add(x1, c, x0 * s));
    }
  }
  for (; i < half; ++i) rotate_pair(i);
}

}  // namespace attention
}  // namespace reasoncache
