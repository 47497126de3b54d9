// SPDX-License-Identifier: Apache-2.0
// Softmax weights as a side output of attention: logits are kept while they are at hand, and
// become weights once a query's log-sum-exp is known.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "numbers.h"

namespace reasoncache {
namespace attention {

// Of all queries of a call. Threads keep logits of different heads or entries of a query at
// the same time; adding up comes after all of them.
class Weights {
 public:
  explicit Weights(const DecodeCall& call)
      : out_(call.weights), heads_(call.num_heads), cap_(call.logit_cap) {
    if (!wanted()) return;
    queries_.reserve(static_cast<std::size_t>(call.batch));
    std::int64_t entries = 0;
    std::int64_t size = 0;
    for (std::int64_t b = 0; b < call.batch; ++b) {
      const std::int64_t count = call.end[b] - call.begin[b];
      const std::int64_t stride = (count + kLanes - 1) / kLanes * kLanes;
      queries_.push_back({call.begin[b], count, stride, entries, size});
      entries += count;
      size += stride * heads_;
    }
    logits_.reset(new float[static_cast<std::size_t>(size)]);
    lse_.resize(static_cast<std::size_t>(call.batch * heads_));
  }

  bool wanted() const { return out_ != nullptr; }

  // Logits [count][kHeads] before soft caps, of the entries from `at` on.
  template <int kHeads>
  void keep(std::int64_t query, std::int64_t at, int count, std::int64_t head,
            const float* logits) {
    const Query& row = queries_[static_cast<std::size_t>(query)];
    for (int i = 0; i < kHeads; ++i) {
      float* to = logits_.get() + row.logits + (head + i) * row.stride + (at - row.begin);
      for (int entry = 0; entry < count; ++entry) to[entry] = logits[entry * kHeads + i];
    }
  }

  void set_lse(std::int64_t query, std::int64_t head, float lse) {
    lse_[static_cast<std::size_t>(query * heads_ + head)] = lse;
  }

  // All of the query's logits and log-sum-exps are there.
  void add_up(std::int64_t query) {
    const Query& row = queries_[static_cast<std::size_t>(query)];
    float* out = out_ + row.entries;
    for (std::int64_t at = 0; at < row.count; at += kLanes) {
      Floats sum{};
      for (std::int64_t head = 0; head < heads_; ++head) {
        Floats x = load(logits_.get() + row.logits + head * row.stride + at);
        if (cap_ > 0) x = soft_cap(x, cap_);
        sum += exp_of(x - lse_[static_cast<std::size_t>(query * heads_ + head)]);
      }
      float found[kLanes];
      store(found, sum);
      const std::int64_t here = row.count - at < kLanes ? row.count - at : kLanes;
      for (std::int64_t i = 0; i < here; ++i) out[at + i] += found[i];
    }
  }

 private:
  struct Query {
    std::int64_t begin;
    std::int64_t count;
    std::int64_t stride;   // whole vectors
    std::int64_t entries;  // of the queries before
    std::int64_t logits;   // where its logits [heads][stride] begin
  };

  float* out_;
  std::int64_t heads_;
  float cap_;
  std::vector<Query> queries_{};
  std::unique_ptr<float[]> logits_{};
  std::vector<float> lse_{};  // [batch][heads], sinks included
};

}  // namespace attention
}  // namespace reasoncache
