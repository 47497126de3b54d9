// SPDX-License-Identifier: Apache-2.0
// What is summed over a pair of blocks. fp32 within a token, double over tokens.
#pragma once

#include "pool/vector.h"

namespace reasoncache {
namespace distance {

constexpr int kChains = 4;  // independent sums, so that additions need not wait for each other

// sum (x - y)^2
class Sum {
 public:
  RC_INLINE void add(int chain, Floats x, Floats y) {
    const Floats difference = x - y;
    chains_[chain] = multiply_add(difference, difference, chains_[chain]);
  }

  // Empties the chains of a token into the sum over tokens, lane by lane.
  RC_INLINE void end_token() {
    const Floats sum = (chains_[0] + chains_[1]) + (chains_[2] + chains_[3]);
    total_ += __builtin_convertvector(sum, Doubles);
    for (Floats& chain : chains_) chain = Floats{};
  }

  // The sum over tokens; begins another.
  RC_INLINE double end_block() {
    const double sum = sum_of(total_);
    total_ = Doubles{};
    return sum;
  }

 private:
  Floats chains_[kChains] = {};
  Doubles total_ = {};
};

}  // namespace distance
}  // namespace reasoncache
