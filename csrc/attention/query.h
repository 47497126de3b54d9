// SPDX-License-Identifier: Apache-2.0
// Reads queries and writes the output of attention.
#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "task.h"

namespace reasoncache {
namespace attention {

template <class Q>
void read_query_as(const Task& task, std::int64_t offset, std::int64_t dim, float* to) {
  const Q* from = static_cast<const Q*>(task.call.query) + offset;
  for (std::int64_t i = 0; i < dim; ++i) to[i] = get(from + i) * task.call.scale;
}

// Writes elements [first, first + dim) of a query head, times the scale, to `to`. Appends zeros up to `padded`.
inline void read_query(const Task& task, std::int64_t row, std::int64_t head, std::int64_t first,
                       std::int64_t dim, std::int64_t padded, float* to) {
  const std::int64_t offset = row * task.call.q_row_stride + head * task.call.q_head_stride + first;
  with_query_element(task.call.element, [&](auto element) {
    read_query_as<typename decltype(element)::type>(task, offset, dim, to);
    return REASONCACHE_OK;
  });
  std::fill(to + dim, to + padded, 0.0f);
}

template <class Q>
void write_sums_as(const Task& task, std::int64_t offset, const float* sums, float factor) {
  Q* to = static_cast<Q*>(task.call.out) + offset;
  for (std::int64_t i = 0; i < task.pool.head_dim[1]; ++i) put(to + i, sums[i] * factor);
}

// Writes sum(weight * value) / sum(weight) to the output. A sink adds to the weights, but has no value.
inline void write_out(const Task& task, std::int64_t row, std::int64_t head, float most,
                      float total, const float* sums) {
  float weight = 1.0f;
  if (task.call.sinks != nullptr) {
    const float sink = task.call.sinks[head];
    const float top = std::max(most, sink);
    weight = most == top ? 1.0f : std::exp(most - top);
    total = total * weight + std::exp(sink - top);
  }
  const float factor = total == 0 ? 0.0f : weight / total;
  const std::int64_t offset = (row * task.call.num_heads + head) * task.pool.head_dim[1];
  with_query_element(task.call.element, [&](auto element) {
    write_sums_as<typename decltype(element)::type>(task, offset, sums, factor);
    return REASONCACHE_OK;
  });
}

}  // namespace attention
}  // namespace reasoncache
