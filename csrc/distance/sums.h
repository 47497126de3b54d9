// SPDX-License-Identifier: Apache-2.0
// The sum of squared differences of two blocks: computed in fp32 within a token, in double over the tokens.
#pragma once

#include "pool/vector.h"

namespace reasoncache {
namespace distance {

constexpr int kChains = 4;  // independent sums, so that additions need not wait for each other

// The sum of (x - y)^2 over the elements of two blocks.
class Sum {
 public:
  RC_INLINE void add(int chain, Floats x, Floats y) {
    const Floats difference = x - y;
    chains_[chain] = multiply_add(difference, difference, chains_[chain]);
  }

  // Adds the chains to the sum over tokens, lane by lane, and sets the chains to 0.
  RC_INLINE void end_token() {
    const Floats sum = (chains_[0] + chains_[1]) + (chains_[2] + chains_[3]);
    total_ += __builtin_convertvector(sum, Doubles);
    for (Floats& chain : chains_) chain = Floats{};
  }

  // Returns the sum over tokens and sets it to 0.
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
