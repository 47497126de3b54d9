// SPDX-License-Identifier: Apache-2.0
// Splits one request's tokens into steps at blank lines; twin of policy/segment.py
// and policy/span.py, whose docstrings say what counts.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "filter/vocabulary.h"

namespace reasoncache {

// Tokens that open and close the reasoning part of a response; empty: all of it counts.
struct Markers {
  std::vector<int32_t> start;
  std::vector<int32_t> end;
};

struct Span {
  int64_t start;
  int64_t end;
};

// A finished step's place and tokens.
struct RawStep {
  int64_t start = 0;
  std::vector<int32_t> tokens;
};

// Owned by the thread that feeds; O(1) a token.
class Segmenter {
 public:
  Segmenter(const Vocabulary& vocabulary, const Markers& markers, uint32_t max_step_tokens,
            int64_t start_position, bool inside)
      : vocabulary_(vocabulary),
        markers_(markers),
        max_step_tokens_(max_step_tokens),
        position_(start_position),
        inside_(inside) {}

  // Takes the next token; true when `step` was filled with a step it finished.
  bool push(int32_t token, RawStep& step);

 private:
  std::optional<Span> advance(int32_t token);
  bool finish_open(RawStep& step);
  std::optional<Span> finish(int64_t end);

  const Vocabulary& vocabulary_;
  const Markers& markers_;
  const uint32_t max_step_tokens_;
  int64_t position_;  // of the next token
  bool inside_;       // reasoning, where markers are known
  bool open_ = false;
  bool pending_newline_ = false;  // the open step ends in a newline and nothing visible since
  int64_t start_ = 0;             // of the open step
  std::vector<int32_t> tokens_;   // of the open step
};

}  // namespace reasoncache
