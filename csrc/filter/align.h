// SPDX-License-Identifier: Apache-2.0
// Pairing the blocks of a step with blocks of an earlier one; twin of policy/align.py.
#pragma once

#include <cstdint>
#include <vector>

#include "filter/config.h"
#include "filter/step.h"

namespace reasoncache {

struct BlockPair {
  int64_t dst_start;
  int64_t src_start;
};

// Appends at most `room` pairs, ascending in dst_start, that touch no token with a 1
// in `covered` (one byte for each token of `dst`). Does not change `covered`.
void align_blocks(const Step& dst, const Step& src, const FilterConfig& config,
                  const std::vector<uint8_t>& covered, size_t room, std::vector<BlockPair>& out);

}  // namespace reasoncache
