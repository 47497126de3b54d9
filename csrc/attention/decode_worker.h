// SPDX-License-Identifier: Apache-2.0
// The part of a decode call that one thread computes. A key or value is fetched from memory once for
// all query heads that belong to its KV head.
//
// A worker alternates between the queries of a unit (task.h), one tile of entries at a time, roughly
// in slot order. Requests that decode together get neighbouring slots, so the next query reads the
// same memory pages. If queries were computed one by one, every page would cost each query a TLB miss.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "query.h"
#include "rotate.h"
#include "task.h"
#include "tile.h"

namespace reasoncache {
namespace attention {

// Uninitialised fp32 memory, aligned to a cache line, because a vector that spans two cache
// lines takes two reads.
class Lines {
 public:
  explicit Lines(std::size_t size) : memory_(new float[size + 15]) {}
  float* data() const {
    return reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(memory_.get()) + 63) & ~63ull);
  }

 private:
  std::unique_ptr<float[]> memory_;
};

template <class Element>
class Worker {
 public:
  explicit Worker(Task& task)
      : task_(task),
        pool_(task.pool),
        call_(task.call),
        query_(query_size()),
        latent_query_(queries() * static_cast<std::size_t>(task.latent_padded)),
        sums_(queries() * static_cast<std::size_t>(task.v_padded)),
        most_(queries() + kLanes),
        total_(most_.size()),
        rotated_by_(most_.size()),
        rotated_(rotates() ? query_size() : 0),
        kept_(2 * kTile * static_cast<std::size_t>(task.k_padded)),
        offset_(static_cast<std::size_t>(task.most_queries)),
        next_slot_(offset_.size()) {
    for (int i = 0; i < kTile; ++i) kept_rows_[i] = kept_.data() + i * task.k_padded;
  }

  void work() {
    const auto size = static_cast<std::int64_t>(task_.units.size());
    for (std::int64_t i; (i = task_.next.fetch_add(1, std::memory_order_relaxed)) < size;) {
      run(task_.units[static_cast<std::size_t>(i)]);
    }
  }

 private:
  // The rotations of a tile of kTile entries, which is a part of a tile of kRotationTile entries. The
  // rotations other than the rotation by 0 have the indices [begin, end) in the call's `by` and `bits`.
  struct Turns {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    int first = 0;           // which bit in the call's `bits` belongs to the tile's first entry
    std::uint64_t mask = 0;  // one bit set for each entry of the tile
    std::uint64_t own = ~std::uint64_t{0};  // bits of the entries whose keys are used as cached
  };

  // A tile of one query's entries, for one KV head. A step without entries (begin == end) means
  // that no step is left.
  struct Step {
    std::int64_t query;
    std::int64_t head;
    std::int64_t begin;  // entries
    std::int64_t end;
    Turns turns;
  };

  // A step, and the addresses of its keys and values.
  struct Reads {
    Step step;
    const Element* keys[kTile];
    const Element* values[kTile];
  };

  void run(const Unit& unit) {
    const std::int64_t first = unit.first_head * task_.group;
    const std::int64_t last = unit.last_head * task_.group;
    for (std::int64_t row = unit.first_query; row < unit.last_query; ++row) {
      if (unit.chunk >= task_.chunks(row)) continue;
      for (std::int64_t head = first; head < last; ++head) {
        const std::int64_t at = place(unit, row, head);
        const std::int64_t latent = pool_.is_latent ? pool_.head_dim[1] : 0;
        read_query(task_, row, head, 0, latent, task_.latent_padded, latent_query(at));
        read_query(task_, row, head, latent, pool_.head_dim[0], task_.k_padded, query(at));
        std::fill(sums(at), sums(at) + task_.v_padded, 0.0f);
        rotated_by_[static_cast<std::size_t>(at)] = 0;
        most_[static_cast<std::size_t>(at)] = -kInfinity;
        total_[static_cast<std::size_t>(at)] = 0;
      }
    }
    static_assert(kChunk % kTile == 0, "a tile lies in one chunk");
    for (std::int64_t row = unit.first_query; row < unit.last_query; ++row) wait(unit, row, 0);
    horizon_ = 0;
    step_ = {};
    for (int i = 0; i < kAhead; ++i) plan_next(unit, steps_[i]);
    for (int i = 0; steps_[i].step.begin < steps_[i].step.end; i = (i + 1) % (kAhead + 1)) {
      Reads& later = steps_[(i + kAhead) % (kAhead + 1)];
      plan_next(unit, later);
      tile(unit, steps_[i], later);
    }
    for (std::int64_t row = unit.first_query; row < unit.last_query; ++row) {
      if (unit.chunk < task_.chunks(row)) finish(unit, row, first, last);
    }
  }

  // Records that the next tile of query `row` begins at entry `offset` of the chunk. If the chunk has no
  // such entry, records that the query is done.
  void wait(const Unit& unit, std::int64_t row, std::int64_t offset) {
    const auto at = static_cast<std::size_t>(row - unit.first_query);
    const std::int64_t entry = call_.begin[row] + unit.chunk * kChunk + offset;
    offset_[at] = offset;
    next_slot_[at] = kDone;
    if (offset >= kChunk || entry >= call_.end[row]) return;
    next_slot_[at] = call_.kv_indices[entry];
    prefetch(reinterpret_cast<std::uintptr_t>(call_.kv_indices + entry + kTile));
  }

  // Returns a step for the next tile. Each round takes one tile of every query, but skips the queries
  // whose next tile begins at a much higher slot than the next tile of some other query. Without the skips,
  // a query that uses slots at several positions would get ahead of the others, because it has fewer tiles.
  Step take(const Unit& unit) {
    const auto queries = static_cast<std::size_t>(unit.last_query - unit.first_query);
    for (;;) {
      while (turn_ < queries && next_slot_[turn_] >= horizon_) ++turn_;
      if (turn_ < queries) break;
      const auto begin = next_slot_.begin();
      const std::int32_t least = *std::min_element(begin, begin + unit.last_query - unit.first_query);
      if (least == kDone) return {unit.first_query, unit.first_head, 0, 0, {}};
      horizon_ = std::min<std::int64_t>(kDone, least + kRound * static_cast<std::int64_t>(queries));
      turn_ = 0;
    }
    const std::int64_t row = unit.first_query + static_cast<std::int64_t>(turn_);
    const std::int64_t offset = offset_[turn_++];
    const std::int64_t first = call_.begin[row] + unit.chunk * kChunk + offset;
    wait(unit, row, offset + kTile);
    const std::int64_t end = std::min<std::int64_t>(first + kTile, call_.end[row]);
    return {row, unit.first_head, first, end, turns_of(row, first, end)};
  }

  // Returns the rotations of entries [begin, end), which belong to query `row`. Prefetches the rows
  // of the rotary table that these rotations read.
  Turns turns_of(std::int64_t row, std::int64_t begin, std::int64_t end) const {
    if (call_.tile_ptr == nullptr) return {};
    const std::int64_t first = call_.begin[row];
    const std::int64_t at = begin - first;
    const std::int32_t* tile = call_.tile_ptr + first / kRotationTile + row + at / kRotationTile;
    Turns turns{tile[0], tile[1], static_cast<int>(at % kRotationTile),
                (std::uint64_t{1} << (end - begin)) - 1};
    const auto bits = [&](std::int64_t i) { return (call_.bits[i] >> turns.first) & turns.mask; };
    if (turns.begin < turns.end) turns.own = call_.by[turns.begin] == 0 ? bits(turns.begin++) : 0;
    while (turns.begin < turns.end && bits(turns.begin) == 0) ++turns.begin;
    while (turns.begin < turns.end && bits(turns.end - 1) == 0) --turns.end;
    for (std::int64_t i = turns.begin; i < turns.end; ++i) fetch_rotation(pool_, call_.by[i]);
    return turns;
  }

  // Writes the next step, with the addresses of its keys and values, to `reads`.
  void plan_next(const Unit& unit, Reads& reads) {
    if (step_.begin == step_.end || ++step_.head == unit.last_head) step_ = take(unit);
    reads.step = step_;
    rows(pool_.bases[0], pool_.slot_stride[0], pool_.head_stride[0], step_, reads.keys);
    rows(pool_.bases[1], pool_.slot_stride[1], pool_.head_stride[1], step_, reads.values);
  }

  void tile(const Unit& unit, const Reads& reads, const Reads& later) {
    const Step& step = reads.step;
    const int count = static_cast<int>(step.end - step.begin);
    const int later_count = static_cast<int>(later.step.end - later.step.begin);
    keys_ = reads.keys;
    values_ = reads.values;
    Ahead<Element> keys{later.keys, later_count, bytes(pool_.head_dim[0])};
    Ahead<Element> values{later.values, later_count, bytes(pool_.head_dim[1])};
    std::int64_t head = place(unit, step.query, step.head * task_.group);
    const std::int64_t last = head + task_.group;
    const auto heads = [&](auto number) {
      constexpr int kHeads = decltype(number)::value;
      if constexpr (kHeads <= kMostHeads) {
        for (; head + kHeads <= last; head += kHeads) {
          own_scores<kHeads>(step, count, head, keys);
          under<kHeads>(step, count, head, values);
          values.count = keys.count = 0;
        }
      }
    };
    heads(std::integral_constant<int, 8>{});
    heads(std::integral_constant<int, 4>{});
    heads(std::integral_constant<int, 2>{});
    heads(std::integral_constant<int, 1>{});
  }

  // Adds a tile to the results of kHeads query heads, from index `head` on (see `place`). The caller must
  // call own_scores first. An entry has a weight for its own score and one for each of its rotations. Each
  // pass of the loop takes as many rotations as fit into scores_, adds up the weights of each entry, and
  // multiplies the sum with the entry's value.
  template <int kHeads>
  void under(const Step& step, int count, std::int64_t head, const Ahead<Element>& values) {
    Turns turns = step.turns;
    const int size = count * kHeads;
    const int own = (size + kLanes - 1) / kLanes;
    if (call_.logit_cap > 0) {
      for (int i = 0; i < own * kLanes; i += kLanes) {
        store(scores_ + i, soft_cap(load(scores_ + i), call_.logit_cap));
      }
    }
    std::fill(scores_ + size, scores_ + own * kLanes, -kInfinity);
    for (int i = 0; turns.own != ~std::uint64_t{0} && i < count; ++i) {
      if ((turns.own >> i & 1) == 0) std::fill_n(scores_ + i * kHeads, kHeads, -kInfinity);
    }
    for (;;) {
      const int vectors = rotated_scores<kHeads>(turns, own, head);
      weigh<kHeads>(scores_, vectors, most_.data() + head, total_.data() + head, decay_);
      for (int i = own; i < vectors; ++i) {
        float* to = scores_ + of_[i] * kHeads;
        store(to, load(to) + load(scores_ + i * kLanes));
      }
      add_values<Element, kHeads>(values_, count, values, scores_, decay_, pool_.head_dim[1],
                                  task_.v_padded, sums(head));
      if (turns.begin == turns.end) return;
      std::fill_n(scores_, own * kLanes, -kInfinity);
    }
  }

  // Writes each entry's own score to scores_: the score of the entry's key, rotated by the entry's `shift`
  // if the call has shifts, but not by the rotations in `turns`. Meanwhile prefetches `keys`.
  template <int kHeads>
  void own_scores(const Step& step, int count, std::int64_t head, const Ahead<Element>& keys) {
    if (pool_.is_latent) {
      const Ahead<Element> none{nullptr, 0, 0};
      scores_of<Element, kHeads>(values_, count, none, 0, latent_query(head), pool_.head_dim[1],
                                 task_.latent_padded, nullptr, latent_);
    }
    const bool keep = step.turns.begin < step.turns.end;
    const std::int32_t* shift = call_.shift == nullptr ? nullptr : call_.shift + step.begin;
    for (int begin = 0, end; begin < count; begin = end) {
      end = shift == nullptr ? count : begin + 1;
      while (end < count && shift[end] == shift[begin]) ++end;
      const float* query =
          shift == nullptr ? this->query(head) : rotated<kHeads>(head, shift[begin]);
      float* kept = keep ? kept_.data() + begin * task_.k_padded : nullptr;
      scores_of<Element, kHeads>(keys_ + begin, end - begin, keys, begin, query, pool_.head_dim[0],
                                 task_.k_padded, kept, scores_ + begin * kHeads);
    }
    for (int i = 0; pool_.is_latent && i < count * kHeads; i += kLanes) {
      store(scores_ + i, load(scores_ + i) + load(latent_ + i));
    }
  }

  // Removes as many rotations from `turns` as fit into scores_, and writes their scores after the first
  // `vectors` vectors, which are for the entries' own scores. Returns the number of vectors in use. Each
  // vector has the scores of neighbouring keys for one rotation, which at least one of these keys uses.
  template <int kHeads>
  int rotated_scores(Turns& turns, int vectors, std::int64_t head) {
    constexpr int kKeys = kLanes / kHeads;
    static_assert(kTile % kKeys == 0, "a vector's keys lie in one tile");
    constexpr std::uint64_t kAll = (std::uint64_t{1} << kKeys) - 1;
    for (; turns.begin < turns.end && vectors + kTile / kKeys <= kVectors; ++turns.begin) {
      std::uint64_t bits = (call_.bits[turns.begin] >> turns.first) & turns.mask;
      if (bits == 0) continue;
      const float* query = rotated<kHeads>(head, call_.by[turns.begin]);
      for (int at = 0; bits != 0; at += kKeys, bits >>= kKeys) {
        if ((bits & kAll) == 0) continue;
        Floats found = some_scores<float, kHeads>(kept_rows_ + at, query, task_.k_padded,
                                                  task_.k_padded, nullptr);
        if (pool_.is_latent) found += load(latent_ + at * kHeads);
        if (call_.logit_cap > 0) found = soft_cap(found, call_.logit_cap);
        if ((bits & kAll) != kAll) found = only<kHeads>(bits, found);
        of_[vectors] = at;
        store(scores_ + vectors++ * kLanes, found);
      }
    }
    return vectors;
  }

  // Returns kHeads query heads, from index `head` on, rotated back by `shift`. The product of such a
  // head and a key equals the product of the original head and the key rotated by `shift`.
  // The result is kept, because later tiles may have entries with the same shift.
  template <int kHeads>
  const float* rotated(std::int64_t head, std::int32_t shift) {
    if (shift == 0) return query(head);
    float* to = rotated_.data() + head * task_.k_padded;
    std::int32_t& by = rotated_by_[static_cast<std::size_t>(head)];
    if (by == shift) return to;
    by = shift;
    if (pool_.rotary_dim < task_.k_padded) std::copy_n(query(head), kHeads * task_.k_padded, to);
    rotate(pool_, shift, true, query(head), to, kHeads, task_.k_padded);
    return to;
  }

  void finish(const Unit& unit, std::int64_t row, std::int64_t first, std::int64_t last) {
    const bool is_whole = task_.partial(row, 0, 0) == nullptr;
    for (std::int64_t head = first; head < last; ++head) {
      const std::int64_t at = place(unit, row, head);
      const float most = most_[static_cast<std::size_t>(at)];
      const float total = total_[static_cast<std::size_t>(at)];
      if (is_whole) {
        write_out(task_, row, head, most, total, sums(at));
        continue;
      }
      float* to = task_.partial(row, unit.chunk, head);
      to[0] = most;
      to[1] = total;
      std::copy_n(sums(at), task_.v_padded, to + 2);
    }
    if (is_whole) return;
    auto& left = task_.left[static_cast<std::size_t>(row)];
    if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) merge(row);
  }

  void merge(std::int64_t row) {
    const std::int64_t chunks = task_.chunks(row);
    for (std::int64_t head = 0; head < call_.num_heads; ++head) {
      float* into = task_.partial(row, 0, head);
      for (std::int64_t i = 1; i < chunks; ++i) {
        const float* from = task_.partial(row, i, head);
        const float top = std::max(into[0], from[0]);
        const float own = into[0] == top ? 1.0f : std::exp(into[0] - top);
        const float other = from[0] == top ? 1.0f : std::exp(from[0] - top);
        into[0] = top;
        for (std::int64_t j = 1; j < 2 + task_.v_padded; ++j) {
          into[j] = into[j] * own + from[j] * other;
        }
      }
      write_out(task_, row, head, into[0], into[1], into + 2);
    }
  }

  void rows(const void* base, std::int64_t slot_stride, std::int64_t head_stride, const Step& step,
            const Element** to) const {
    const Element* from = static_cast<const Element*>(base) + step.head * head_stride;
    for (std::int64_t i = step.begin; i < step.end; ++i) {
      to[i - step.begin] = from + call_.kv_indices[i] * slot_stride;
    }
  }

  static std::int64_t bytes(std::int64_t dim) {
    return dim * static_cast<std::int64_t>(sizeof(Element));
  }

  std::size_t queries() const {
    return static_cast<std::size_t>(task_.most_queries * call_.num_heads);
  }
  std::size_t query_size() const { return queries() * static_cast<std::size_t>(task_.k_padded); }
  bool rotates() const { return call_.shift != nullptr || call_.tile_ptr != nullptr; }

  // Index of a query head in the buffers that hold the queries and results of a unit.
  std::int64_t place(const Unit& unit, std::int64_t row, std::int64_t head) const {
    return (row - unit.first_query) * call_.num_heads + head;
  }
  float* query(std::int64_t place) { return query_.data() + place * task_.k_padded; }
  float* latent_query(std::int64_t place) {
    return latent_query_.data() + place * task_.latent_padded;
  }
  float* sums(std::int64_t place) { return sums_.data() + place * task_.v_padded; }

  static constexpr std::int64_t kRound = 4;  // a round's tiles begin within kRound * queries slots
  static constexpr std::int32_t kDone = std::numeric_limits<std::int32_t>::max();

  Task& task_;
  const Pool& pool_;
  const DecodeCall& call_;
  Lines query_;                // [most_queries][num_heads][k_padded], scaled
  Lines latent_query_;         // [most_queries][num_heads][latent_padded], scaled
  Lines sums_;                 // [most_queries][num_heads][v_padded]
  std::vector<float> most_;    // largest scores [most_queries][num_heads], then room for a vector
  std::vector<float> total_;   // sums of weights [most_queries][num_heads], then room for a vector
  std::vector<std::int32_t> rotated_by_;  // [most_queries][num_heads], shift of rotated_, 0: none
  Lines rotated_;                         // [most_queries][num_heads][k_padded]
  Lines kept_;  // [2 * kTile][k_padded], fp32 keys of a tile, and room for stores beyond the tile
  std::vector<std::int64_t> offset_;      // [most_queries], where in the chunk the next tile begins
  std::vector<std::int32_t> next_slot_;   // [most_queries], first slot of the next tile, or kDone
  std::size_t turn_ = 0;
  std::int64_t horizon_ = 0;  // the current round takes tiles whose first slot is below this slot
  static constexpr int kAhead = 2;  // how many steps ahead keys and values are prefetched
  Reads steps_[kAhead + 1];
  Step step_{};
  const float* kept_rows_[kTile];
  const Element* const* keys_ = nullptr;  // of the current step
  const Element* const* values_ = nullptr;
  static constexpr int kVectors = 16 * kTile * kMostHeads / kLanes;  // size of scores_ in vectors
  alignas(64) float scores_[(kVectors + 1) * kLanes];
  alignas(64) float latent_[kTile * kMostHeads + kLanes];  // scores of a tile's latent values
  alignas(64) float decay_[kLanes];
  int of_[kVectors];  // index in the tile of the entry whose score is first in vector i of scores_
};

}  // namespace attention
}  // namespace reasoncache
