// SPDX-License-Identifier: Apache-2.0
// Attention of a few query heads over a tile: dot products, softmax weights, weighted values.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace reasoncache {
namespace attention {

// Number of entries in a tile. It is small for two reasons. First, each row of K or V may be on a memory
// page of its own, and the first-level TLB holds few pages. Second, the addresses of the rows may differ
// by multiples of a large power of two, and a cache can hold only a few such lines.
constexpr int kTile = 16;
constexpr int kMostHeads = kLanes < 8 ? kLanes : 8;     // most query heads computed together
constexpr std::int64_t kLine = 64;

// Calls load_some. Is not inlined, because only head sizes that are not multiples of kLanes need it.
template <class Element>
__attribute__((noinline)) Floats load_last(const Element* from, std::int64_t count) {
  return load_some(from, count);
}

// Rows of K or V that are read next. They are prefetched one at a time, while other rows are processed.
template <class Element>
struct Ahead {
  const Element* const* rows;
  int count;  // 0 if there is nothing to prefetch
  std::int64_t bytes;

  RC_INLINE void fetch(int index) const {
    if (index >= count) return;
    const auto address = reinterpret_cast<std::uintptr_t>(rows[index]);
    for (std::int64_t at = 0; at < bytes; at += kLine) {
      prefetch(address + static_cast<std::uintptr_t>(at));
    }
  }
};

// Returns scores [kLanes / kHeads][kHeads]: the dot products of kLanes / kHeads keys with kHeads query
// heads. `query` is [kHeads][padded]. If `kept` is not null, the keys are also written to `kept`, as
// fp32 [kLanes / kHeads][padded].
template <class Element, int kHeads>
RC_INLINE Floats some_scores(const Element* const* rows, const float* query, std::int64_t dim,
                             std::int64_t padded, float* kept) {
  constexpr int kKeys = kLanes / kHeads;
  Floats sums[kLanes] = {};
  const auto step = [&](std::int64_t i, const auto& read) {
    Floats keys[kKeys];
    for (int key = 0; key < kKeys; ++key) keys[key] = held(read(rows[key] + i));
    if (kept != nullptr) {
      for (int key = 0; key < kKeys; ++key) store(kept + key * padded + i, keys[key]);
    }
    for (int head = 0; head < kHeads; ++head) {
      const Floats q = held(load(query + head * padded + i));
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

// Writes the dot products of `count` keys with kHeads query heads to `scores` [count][kHeads].
// Meanwhile prefetches up to `count` rows of `ahead`, from row `first` on.
template <class Element, int kHeads>
void scores_of(const Element* const* rows, int count, const Ahead<Element>& ahead, int first,
               const float* query, std::int64_t dim, std::int64_t padded, float* kept,
               float* scores) {
  constexpr int kKeys = kLanes / kHeads;
  for (int at = 0; at < count; at += kKeys) {
    const int here = std::min(kKeys, count - at);
    for (int key = 0; key < here; ++key) ahead.fetch(first + at + key);
    // If fewer than kKeys keys are left, the last key stands in for the missing keys.
    const Element* filled[kKeys];
    for (int key = 0; key < kKeys; ++key) filled[key] = rows[at + std::min(key, here - 1)];
    const Floats found = some_scores<Element, kHeads>(
        filled, query, dim, padded, kept == nullptr ? nullptr : kept + at * padded);
    // This may write behind the last of the `count` scores. There is room, and no score was written there yet.
    store(scores + at * kHeads, found);
  }
}

// Returns `scores`, but with -inf for each key whose bit is not set. Each key has kHeads neighbouring lanes.
template <int kHeads>
RC_INLINE Floats only(std::uint64_t bits, Floats scores) {
  Ints key;
  for (int lane = 0; lane < kLanes; ++lane) key[lane] = lane / kHeads;
  const Ints is_set = (((Ints{} + static_cast<std::int32_t>(bits)) >> key) & 1) != 0;
  return select(is_set, scores, all_of(-kInfinity));
}

// Combines all lanes of the same head with the function `two`. Every lane of a head gets the head's result.
template <int kHeads, class Two>
RC_INLINE Floats over_keys(Floats v, const Two& two) {
  if constexpr (kLanes >= 16) v = two(v, turned<8>(v));
  if constexpr (kLanes >= 8 && kHeads <= 4) v = two(v, turned<4>(v));
  if constexpr (kHeads <= 2) v = two(v, turned<2>(v));
  if constexpr (kHeads <= 1) v = two(v, turned<1>(v));
  return v;
}

// Replaces the scores in `vectors` vectors by their softmax weights. Lane i of a vector belongs to head
// i % kHeads. Updates `most` and `total` [kHeads], the largest score and the sum of weights so far. Writes
// to `decay` the factor by which each head's earlier sums must be multiplied. `most`, `total` and `decay`
// need room for a whole vector.
template <int kHeads>
__attribute__((noinline)) void weigh(float* scores, int vectors, float* most, float* total,
                                     float* decay) {
  const int size = vectors * kLanes;
  const Floats before = turned<0, kHeads>(load(most));
  Floats top = before;
  for (int i = 0; i < size; i += kLanes) {
    const Floats x = load(scores + i);
    top = select(x > top, x, top);
  }
  top = over_keys<kHeads>(top, [](Floats a, Floats b) { return select(a > b, a, b); });
  // If there was no key so far, 0 is subtracted, because -inf - -inf would be NaN.
  const Floats base = select(top == -kInfinity, Floats{}, top);
  Floats sum{};
  for (int i = 0; i < size; i += kLanes) {
    const Floats weight = exp_of(load(scores + i) - base);
    store(scores + i, weight);
    sum += weight;
  }
  sum = over_keys<kHeads>(sum, [](Floats a, Floats b) { return a + b; });
  const Floats scale = select(before == top, all_of(1.0f), exp_of(before - top));
  store(decay, scale);
  sum = multiply_add(turned<0, kHeads>(load(total)), scale, sum);
  std::memcpy(most, &top, kHeads * sizeof *most);
  std::memcpy(total, &sum, kHeads * sizeof *total);
}

// Computes sums [kHeads][padded] = decay * sums + weights [count][kHeads] . rows. Each call handles
// kVectors vectors of dims, from dim `at` on.
template <class Element, int kHeads, int kVectors>
RC_INLINE void add_some(const Element* const* rows, int count, const Ahead<Element>& ahead,
                        const float* weights, const float* decay, std::int64_t at,
                        std::int64_t rest, std::int64_t padded, float* sums) {
  Floats added[kHeads][kVectors];
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < kVectors; ++i) {
      added[head][i] = load(sums + head * padded + at + i * kLanes) * decay[head];
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
        added[head][i] = multiply_add(values[i], weight, added[head][i]);
      }
    }
  }
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < kVectors; ++i) {
      store(sums + head * padded + at + i * kLanes, added[head][i]);
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
