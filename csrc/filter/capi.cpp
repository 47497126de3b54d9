// SPDX-License-Identifier: Apache-2.0
// The engine's C interface; sglang_reasoncache/native/engine.py calls it. An exception
// never leaves a function: out of memory, a request is not followed and nothing shared.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

#include "filter/config.h"
#include "filter/engine.h"

using reasoncache::Engine;
using reasoncache::FilterConfig;
using reasoncache::Markers;
using reasoncache::Result;
using reasoncache::Vocabulary;

#define REASONCACHE_API extern "C" __attribute__((visibility("default")))

namespace {

std::vector<int32_t> ids(const int32_t* values, size_t count) { return {values, values + count}; }

// What `reasoncache_engine_take` writes for each step, in int64 units: request, start, end,
// filter CPU time in ns, number of pairs, then the counters.
constexpr size_t kHeader = 5;
constexpr size_t kCounters = sizeof(reasoncache::Counters) / sizeof(uint32_t);

}  // namespace

// nullptr when the engine could not be made.
REASONCACHE_API Engine* reasoncache_engine_create(const FilterConfig* config, const uint8_t* blob,
                                                  const uint64_t* offsets, const uint8_t* classes,
                                                  size_t vocabulary_size, const int32_t* start_ids,
                                                  size_t num_start_ids, const int32_t* end_ids,
                                                  size_t num_end_ids) {
  try {
    return new Engine(*config, Vocabulary(blob, offsets, classes, vocabulary_size),
                      Markers{ids(start_ids, num_start_ids), ids(end_ids, num_end_ids)});
  } catch (const std::exception&) {
    return nullptr;
  }
}

REASONCACHE_API void reasoncache_engine_destroy(Engine* engine) { delete engine; }

REASONCACHE_API int32_t reasoncache_engine_open(Engine* engine, int64_t request,
                                                int64_t start_position, int32_t inside) {
  try {
    engine->open(request, start_position, inside != 0);
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

REASONCACHE_API void reasoncache_engine_close(Engine* engine, int64_t request) {
  try {
    engine->close(request);
    engine->flush();
  } catch (const std::exception&) {
  }
}

// Tokens of `num_requests` requests one after the other, `counts[i]` of request `requests[i]`.
REASONCACHE_API int32_t reasoncache_engine_feed(Engine* engine, const int64_t* requests,
                                                const int64_t* counts, size_t num_requests,
                                                const int64_t* tokens) {
  try {
    for (size_t i = 0; i < num_requests; ++i) {
      engine->feed(requests[i], tokens, static_cast<size_t>(counts[i]));
      tokens += counts[i];
    }
    engine->flush();
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

REASONCACHE_API size_t reasoncache_engine_ready(Engine* engine) { return engine->ready(); }

REASONCACHE_API size_t reasoncache_engine_outstanding(Engine* engine) {
  return engine->outstanding();
}

REASONCACHE_API uint64_t reasoncache_engine_shed(Engine* engine) { return engine->shed(); }

REASONCACHE_API void reasoncache_engine_wait(Engine* engine) {
  try {
    engine->wait();
  } catch (const std::exception&) {
  }
}

// Takes up to `limit` steps, stopping behind the one with which they have `max_pairs` pairs.
// Writes (kHeader + kCounters) numbers for each to `steps`, and for each pair its destination
// and source to `positions` and its similarity to `similarities`; both have room for
// `max_pairs + max_blocks_per_step` pairs. Returns the number of steps.
REASONCACHE_API size_t reasoncache_engine_take(Engine* engine, size_t limit, size_t max_pairs,
                                               int64_t* steps, int64_t* positions,
                                               double* similarities) {
  std::vector<Result> results;
  try {
    limit = std::min(limit, engine->ready());
    results.reserve(limit);
    engine->take(limit, max_pairs, results);
  } catch (const std::exception&) {
    return 0;
  }
  for (const Result& result : results) {
    const reasoncache::Proposal& proposal = result.proposal;
    *steps++ = result.request;
    *steps++ = proposal.start;
    *steps++ = proposal.end;
    *steps++ = result.cpu_ns;
    *steps++ = static_cast<int64_t>(proposal.pairs.size());
    const auto* counters = reinterpret_cast<const uint32_t*>(&proposal.counters);
    steps = std::copy(counters, counters + kCounters, steps);
    for (const reasoncache::Pair& pair : proposal.pairs) {
      *positions++ = pair.dst_start;
      *positions++ = pair.src_start;
      *similarities++ = pair.similarity;
    }
  }
  return results.size();
}
