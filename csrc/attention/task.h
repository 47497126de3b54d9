// SPDX-License-Identifier: Apache-2.0
// Cuts a decode call into units of work.
//
// A query's entries are cut into chunks of fixed size. Each chunk has a softmax of its own, and the
// results of the chunks are merged in their order. Neither the cut nor the order depends on the
// threads or on the other queries, so every bit of the result is always the same.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"

namespace reasoncache {
namespace attention {

constexpr std::int64_t kChunk = 512;  // entries

// Chunk number `chunk` of each of several consecutive queries, for some of the KV heads. Queries
// that have no such chunk are skipped.
struct Unit {
  std::int64_t first_query;
  std::int64_t last_query;
  std::int64_t chunk;
  std::int64_t first_head;  // KV heads
  std::int64_t last_head;
};

class Task {
 public:
  Task(const Pool& pool, const DecodeCall& call);

  // Fills `units` with enough work for `threads` threads. Returns how many entries the units read.
  std::int64_t divide(std::int64_t threads);

  std::int64_t chunks(std::int64_t query) const {
    return std::max<std::int64_t>(1, (call.end[query] - call.begin[query] + kChunk - 1) / kChunk);
  }

  // Returns the memory for the result of a chunk under a query head: largest logit, sum of weights,
  // weighted sum of values. Returns null if the query has one chunk only.
  float* partial(std::int64_t query, std::int64_t chunk, std::int64_t head) const {
    const std::int64_t first = first_partial_[static_cast<std::size_t>(query)];
    if (first < 0) return nullptr;
    return partials_.get() + ((first + chunk) * call.num_heads + head) * (2 + v_padded);
  }

  const Pool& pool;
  const DecodeCall& call;
  const std::int64_t group;     // query heads per KV head
  const std::int64_t k_padded;  // dims of a key, rounded up to whole vectors
  const std::int64_t v_padded;
  const std::int64_t latent_padded;  // dims of a query for a latent value, rounded up, or 0
  std::vector<Unit> units{};
  std::int64_t most_queries = 1;                        // largest number of queries in a unit
  std::unique_ptr<std::atomic<std::int64_t>[]> left{};  // [batch], units not computed yet
  std::atomic<std::int64_t> next{0};                    // index of the next unit to compute

 private:
  std::vector<std::int64_t> first_partial_{};  // [batch]
  std::unique_ptr<float[]> partials_{};        // [chunks][num_heads][2 + v_padded]
};

}  // namespace attention
}  // namespace reasoncache
