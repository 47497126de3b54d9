// SPDX-License-Identifier: Apache-2.0
// A tile of entries under a few query heads: dot products, softmax weights, weighted values.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace reasoncache {
namespace attention {

// Entries. Their rows of K and V may lie on a page each: a few are as many as the first level of
// address translation holds, and as the caches have places for at one distance.
constexpr int kTile = 16;
constexpr int kMostHeads = kLanes < 8 ? kLanes : 8;     // query heads at once
constexpr std::int64_t kLine = 64;

// As load_some. Not inlined: it serves the last few dims of odd head sizes only.
template <class Element>
__attribute__((noinline)) Floats load_last(const Element* from, std::int64_t count) {
  return load_some(from, count);
}

// Rows to be read next, fetched one by one while others are worked on.
template <class Element>
struct Ahead {
  const Element* const* rows;
  int count;  // 0: nothing to fetch
  std::int64_t bytes;

  RC_INLINE void fetch(int index) const {
    if (index >= count) return;
    const auto address = reinterpret_cast<std::uintptr_t>(rows[index]);
    for (std::int64_t at = 0; at < bytes; at += kLine) {
      prefetch(address + static_cast<std::uintptr_t>(at));
    }
  }
};

// Scores of kLanes / kHeads keys: out[key][head], `query` is [kHeads][padded]. The keys in fp32 go
// to `kept` [kLanes / kHeads][padded], where it is not null.
template <class Element, int kHeads>
RC_INLINE Floats some_scores(const Element* const* rows, const float* query, std::int64_t dim,
                             std::int64_t padded, float* kept) {
  constexpr int kKeys = kLanes / kHeads;
  Floats sums[kLanes] = {};
  const auto step = [&](std::int64_t i, const auto& read) {
    Floats keys[kKeys];
    for (int key = 0; key < kKeys; ++key) keys[key] = read(rows[key] + i);
    if (kept != nullptr) {
      for (int key = 0; key < kKeys; ++key) store(kept + key * padded + i, keys[key]);
    }
    for (int head = 0; head < kHeads; ++head) {
      const Floats q = load(query + head * padded + i);
      for (int key = 0; key < kKeys; ++key) {
        sums[key * kHeads + head] = multiply_add(keys[key], q, sums[key * kHeads + head]);
      }
    }
  };
  std::int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    step(i, [](const Element* from) __attribute__((always_inline)) { return load(from); });
  }
  if (i < dim) {
    step(i, [&](const Element* from) { return load_last(from, dim - i); });
  }
  return sums_of(sums);
}

// Scores [count][kHeads] of keys under one query; `ahead` is fetched meanwhile, from `first` on.
template <class Element, int kHeads>
void scores_of(const Element* const* rows, int count, const Ahead<Element>& ahead, int first,
               const float* query, std::int64_t dim, std::int64_t padded, float* kept,
               float* scores) {
  constexpr int kKeys = kLanes / kHeads;
  for (int at = 0; at < count; at += kKeys) {
    const int here = std::min(kKeys, count - at);
    for (int key = 0; key < here; ++key) ahead.fetch(first + at + key);
    // The last key once more in place of those that are not there.
    const Element* filled[kKeys];
    for (int key = 0; key < kKeys; ++key) filled[key] = rows[at + std::min(key, here - 1)];
    const Floats found = some_scores<Element, kHeads>(
        filled, query, dim, padded, kept == nullptr ? nullptr : kept + at * padded);
    // May write beyond the last score, where there is room and nothing yet.
    store(scores + at * kHeads, found);
  }
}

// Lanes of the keys whose bits are set, kHeads each; -inf in the others.
template <int kHeads>
RC_INLINE Floats only(std::uint64_t bits, Floats scores) {
  Ints key;
  for (int lane = 0; lane < kLanes; ++lane) key[lane] = lane / kHeads;
  const Ints is_set = (((Ints{} + static_cast<std::int32_t>(bits)) >> key) & 1) != 0;
  return select(is_set, scores, all_of(-kInfinity));
}

// Running maximum and sum of weights of kHeads heads, and by what to scale what was summed.
template <int kHeads>
struct Softmax {
  float most[kHeads];
  float total[kHeads];
  float decay[kHeads];

  // So many vectors of scores, lanes of the heads in turn, become weights.
  __attribute__((noinline)) void weigh(float* scores, int vectors) {
    const int size = vectors * kLanes;
    Floats top = all_of(-kInfinity);
    for (int i = 0; i < size; i += kLanes) {
      const Floats x = load(scores + i);
      top = select(x > top, x, top);
    }
    float new_most[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) new_most[lane] = most[lane % kHeads];
    for (int lane = 0; lane < kLanes; ++lane) {
      new_most[lane % kHeads] = std::max(new_most[lane % kHeads], top[lane]);
    }
    for (int lane = kHeads; lane < kLanes; ++lane) new_most[lane] = new_most[lane % kHeads];
    const Floats shared = unaligned<Floats>(new_most);
    Floats sum{};
    for (int i = 0; i < size; i += kLanes) {
      const Floats weight = exp_of(load(scores + i) - shared);
      store(scores + i, weight);
      sum += weight;
    }
    for (int head = 0; head < kHeads; ++head) {
      decay[head] = most[head] == new_most[head] ? 1.0f : std::exp(most[head] - new_most[head]);
      most[head] = new_most[head];
      total[head] *= decay[head];
    }
    for (int lane = 0; lane < kLanes; ++lane) total[lane % kHeads] += sum[lane];
  }
};

// sums [kHeads][padded] = decay * sums + weights [count][kHeads] . rows, kVectors from `at` on.
template <class Element, int kHeads, int kVectors>
RC_INLINE void add_some(const Element* const* rows, int count, const Ahead<Element>& ahead,
                        const float* weights, const float* decay, std::int64_t at,
                        std::int64_t rest, std::int64_t padded, float* sums) {
  Floats held[kHeads][kVectors];
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < kVectors; ++i) {
      held[head][i] = load(sums + head * padded + at + i * kLanes) * decay[head];
    }
  }
  for (int key = 0; key < count; ++key) {
    if (at == 0) ahead.fetch(key);
    Floats values[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      values[i] = rest < kLanes ? load_last(rows[key] + at, rest)
                                : load(rows[key] + at + i * kLanes);
    }
    for (int head = 0; head < kHeads; ++head) {
      const Floats weight = all_of(weights[key * kHeads + head]);
      for (int i = 0; i < kVectors; ++i) {
        held[head][i] = multiply_add(values[i], weight, held[head][i]);
      }
    }
  }
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < kVectors; ++i) {
      store(sums + head * padded + at + i * kLanes, held[head][i]);
    }
  }
}

template <class Element, int kHeads>
void add_values(const Element* const* rows, int count, const Ahead<Element>& ahead,
                const float* weights, const float* decay, std::int64_t dim, std::int64_t padded,
                float* sums) {
  constexpr int kMost = kLanes / kHeads < 8 ? kLanes / kHeads : 8;
  std::int64_t at = 0;
  if constexpr (kMost >= 8) {
    for (; at + 8 * kLanes <= dim; at += 8 * kLanes) {
      add_some<Element, kHeads, 8>(rows, count, ahead, weights, decay, at, kLanes,
                                   padded, sums);
    }
  }
  if constexpr (kMost >= 4) {
    for (; at + 4 * kLanes <= dim; at += 4 * kLanes) {
      add_some<Element, kHeads, 4>(rows, count, ahead, weights, decay, at, kLanes,
                                   padded, sums);
    }
  }
  if constexpr (kMost >= 2) {
    for (; at + 2 * kLanes <= dim; at += 2 * kLanes) {
      add_some<Element, kHeads, 2>(rows, count, ahead, weights, decay, at, kLanes,
                                   padded, sums);
    }
  }
  for (; at < dim; at += kLanes) {
    add_some<Element, kHeads, 1>(rows, count, ahead, weights, decay, at, dim - at,
                                 padded, sums);
  }
}

}  // namespace attention
}  // namespace reasoncache
