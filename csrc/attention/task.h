// SPDX-License-Identifier: Apache-2.0
// Cuts a decode call into units of work.
//
// A query's entries are cut into chunks of fixed size. Each chunk has a softmax of its own, and the
// results are merged in the order of the chunks. Neither the cut nor the order depends on the number
// of threads or on other queries, so every bit of the result is always the same.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"

namespace reasoncache {
namespace attention {

constexpr std::int64_t kChunk = 512;  // entries in a chunk

// The work on chunk number `chunk` of queries [first_query, last_query), for KV heads [first_head,
// last_head). Queries that have no such chunk are skipped.
struct Unit {
  std::int64_t first_query;
  std::int64_t last_query;
  std::int64_t chunk;
  std::int64_t first_head;
  std::int64_t last_head;
};

class Task {
 public:
  Task(const Pool& pool, const DecodeCall& call);

  // Cuts the call into `units` for `threads` threads. Returns the number of entries of all queries together.
  std::int64_t divide(std::int64_t threads);

  std::int64_t chunks(std::int64_t query) const {
    return std::max<std::int64_t>(1, (call.end[query] - call.begin[query] + kChunk - 1) / kChunk);
  }

  // Returns where to store the result of one chunk for one query head: the largest logit, the sum of
  // weights, the weighted sum of values. Returns null if the query has only one chunk.
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
  const std::int64_t latent_padded;  // query dims for the latent value, rounded up; 0 if not latent
  std::vector<Unit> units{};
  std::int64_t most_queries = 1;                        // largest number of queries in a unit
  std::unique_ptr<std::atomic<std::int64_t>[]> left{};  // [batch], unfinished units of each query
  std::atomic<std::int64_t> next{0};                    // index of the next unit to compute

 private:
  std::vector<std::int64_t> first_partial_{};  // [batch], a query's first chunk in partials_ or -1
  std::unique_ptr<float[]> partials_{};        // [chunks][num_heads][2 + v_padded]
};

}  // namespace attention
}  // namespace reasoncache
