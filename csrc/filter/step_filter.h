// SPDX-License-Identifier: Apache-2.0
// Stage 1 for one request: finished steps in, block pairs out; twin of policy/filter.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "filter/align.h"
#include "filter/config.h"
#include "filter/lexical.h"
#include "filter/segmenter.h"
#include "filter/vocabulary.h"

namespace reasoncache {

// Counts of policy/proposal.py's FilterCounters for one step, in its order.
struct Counters {
  uint32_t steps = 1;
  uint32_t steps_compared = 0;
  uint32_t steps_with_candidates = 0;
  uint32_t steps_with_pairs = 0;
  uint32_t candidates = 0;
  uint32_t dropped_structure = 0;
  uint32_t dropped_over_bound = 0;
  uint32_t dropped_excess = 0;
  uint32_t over_bound = 0;
  uint32_t pairs = 0;
};

struct Pair {
  int64_t dst_start;
  int64_t src_start;
  double similarity;
};

struct Proposal {
  int64_t start = 0;  // of the step
  int64_t end = 0;
  std::vector<Pair> pairs;  // ascending, not overlapping in dst_start
  Counters counters;
};

// Owned by the filter's thread.
class StepFilter {
 public:
  StepFilter(const FilterConfig& config, const Vocabulary& vocabulary)
      : config_(config),
        vocabulary_(vocabulary),
        history_(config.max_history_steps, config.length_factor != 0) {}

  // Compares the step with all earlier ones, then makes it one of them.
  Proposal propose(RawStep&& raw);

  // From now on no step is compared, nor remembered.
  void give_up() { gave_up_ = true; }

  // Steps that were shed held an odd number of code fences.
  void flip_fence() { in_code_ = !in_code_; }

 private:
  Step build(RawStep&& raw, Bag& bag);
  void align(Step& step, const std::vector<Candidate>& candidates, Proposal& proposal);
  bool passes(Step& step, Step& earlier, Counters& counters);
  const Signature& signature(Step& step, Counters& counters);
  void decode(const std::vector<int32_t>& tokens);

  const FilterConfig& config_;
  const Vocabulary& vocabulary_;
  LexicalIndex history_;
  bool in_code_ = false;
  bool gave_up_ = false;
  // Scratch, kept for its capacity.
  std::string bytes_;
  std::u32string text_;
};

}  // namespace reasoncache
