// SPDX-License-Identifier: Apache-2.0
// A finished step as the filter keeps it; twin of policy/step.py.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "structure/structure.h"

namespace reasoncache {

struct Step {
  int64_t start = 0;
  std::vector<int32_t> tokens;
  uint64_t num_chars = 1;  // of the text without surrounding white space, at least 1
  uint64_t norm_sq = 0;    // of the bag, an exact integer
  bool in_code = false;    // begins inside a code fence
  std::optional<Signature> signature;  // read when a candidate first needs it
};

// Distinct tokens and how often each occurs, in ascending order of tokens.
using Bag = std::vector<std::pair<int32_t, uint32_t>>;

}  // namespace reasoncache
