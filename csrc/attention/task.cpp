// SPDX-License-Identifier: Apache-2.0

#include "task.h"

#include "numbers.h"

namespace reasoncache {
namespace attention {
namespace {

constexpr std::int64_t kUnitsPerThread = 4;
// If a unit has several queries, the queries and their sums take at most this many bytes, so that they
// stay in the second-level cache together with the prefetched keys and values.
constexpr std::int64_t kStateBytes = 1 << 18;

std::int64_t whole_vectors(std::int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

}  // namespace

Task::Task(const Pool& pool, const DecodeCall& call)
    : pool(pool),
      call(call),
      group(call.num_heads / pool.num_heads),
      k_padded(whole_vectors(pool.head_dim[0])),
      v_padded(whole_vectors(pool.head_dim[1])),
      latent_padded(pool.is_latent ? v_padded : 0) {}

std::int64_t Task::divide(std::int64_t threads) {
  const auto batch = static_cast<std::size_t>(call.batch);
  first_partial_.resize(batch);
  left = std::make_unique<std::atomic<std::int64_t>[]>(batch);
  std::int64_t entries = 0;
  std::int64_t all = 0;
  std::int64_t partials = 0;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t here = chunks(b);
    entries += call.end[b] - call.begin[b];
    all += here;
    first_partial_[static_cast<std::size_t>(b)] = here > 1 ? partials : -1;
    if (here > 1) partials += here;
  }
  // This memory is not zeroed, because all of it is written before it is read.
  partials_.reset(new float[static_cast<std::size_t>(partials * call.num_heads * (2 + v_padded))]);

  // A unit takes several queries if the call then still has about kUnitsPerThread units for each thread. If the
  // call has fewer units even with one query in each, the KV heads are divided among several units.
  const std::int64_t wanted = threads > 1 ? threads * kUnitsPerThread : 1;
  const std::int64_t state =
      call.num_heads * (k_padded + latent_padded + v_padded) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t parts =
      all < wanted ? std::min(pool.num_heads, (wanted + all - 1) / all) : 1;
  most_queries = std::max<std::int64_t>(1, std::min({all / wanted, kStateBytes / state, call.batch}));
  for (std::int64_t first = 0; first < call.batch; first += most_queries) {
    const std::int64_t last = std::min(first + most_queries, call.batch);
    std::int64_t longest = 0;
    for (std::int64_t b = first; b < last; ++b) {
      longest = std::max(longest, chunks(b));
      left[static_cast<std::size_t>(b)].store(chunks(b) * parts, std::memory_order_relaxed);
    }
    for (std::int64_t chunk = 0; chunk < longest; ++chunk) {
      for (std::int64_t part = 0; part < parts; ++part) {
        units.push_back({first, last, chunk, part * pool.num_heads / parts,
                         (part + 1) * pool.num_heads / parts});
      }
    }
  }
  return entries;
}

}  // namespace attention
}  // namespace reasoncache
