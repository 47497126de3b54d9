// SPDX-License-Identifier: Apache-2.0
// Similarity of a step to all earlier ones; twin of policy/lexical.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "filter/config.h"
#include "filter/step.h"

namespace reasoncache {

struct Candidate {
  double similarity;
  size_t index;  // in the history, oldest 0
};

class LexicalIndex {
 public:
  LexicalIndex(uint32_t max_history_steps, bool length_factor)
      : max_history_steps_(max_history_steps), length_factor_(length_factor) {}

  size_t size() const { return steps_.size(); }
  Step& operator[](size_t index) { return steps_[index]; }

  // Makes a step an earlier one; forgets the oldest if there are too many.
  void add(Step&& step, const Bag& bag);

  // Earlier steps above the threshold, most similar first, the latest of equals first.
  std::vector<Candidate> candidates(const Step& step, const Bag& bag, const FilterConfig& config);

 private:
  struct Posting {
    uint32_t row;
    uint32_t count;
  };
  struct Row {
    uint64_t norm_sq;
    uint64_t num_chars;
  };

  double similarity(const Step& step, const Row& row, uint64_t dot) const;
  void compact();

  const uint32_t max_history_steps_;
  const bool length_factor_;
  std::deque<Step> steps_;
  // The first `dropped_` rows are steps that history has already forgotten.
  std::vector<Row> rows_;
  size_t dropped_ = 0;
  std::unordered_map<int32_t, std::vector<Posting>> postings_;
  // Scratch of a query: dot product by row, all zero between queries, and the rows touched.
  std::vector<uint64_t> dots_;
  std::vector<uint32_t> touched_;
};

}  // namespace reasoncache
