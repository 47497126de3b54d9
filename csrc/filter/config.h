// SPDX-License-Identifier: Apache-2.0
// Knobs of the step filter; the fields mirror policy/settings.py and, in order
// and type, the ctypes structure in native/engine.py.
#pragma once

#include <cstdint>

namespace reasoncache {

struct FilterConfig {
  double strict;
  double soft;
  double fixed_tau;  // below 0: the dynamic threshold
  uint32_t length_factor;
  uint32_t use_structure;
  uint32_t max_structure_checks;
  uint32_t block;
  uint32_t page_size;
  uint32_t align_tokens;  // 0: block by index
  uint32_t max_step_tokens;
  uint32_t max_history_steps;
  uint32_t max_candidates;
  uint32_t max_blocks_per_step;
  uint32_t max_chars;  // bounds of reading structure
  uint32_t max_depth;
  uint32_t max_nodes;
  uint32_t max_pending;  // steps handed over and not yet taken back
};

}  // namespace reasoncache
