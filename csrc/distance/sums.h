// SPDX-License-Identifier: Apache-2.0
// What is summed over a pair of blocks. fp32 within a token, double over tokens.
#pragma once

#include "pool/vector.h"

namespace reasoncache {
namespace distance {

constexpr int kChains = 4;  // independent sums, so that additions need not wait for each other

// Empties the chains of a token into the sum over tokens, lane by lane.
RC_INLINE void drain(Floats (&chains)[kChains], Doubles& total) {
  total += __builtin_convertvector((chains[0] + chains[1]) + (chains[2] + chains[3]), Doubles);
  for (Floats& chain : chains) chain = Floats{};
}

RC_INLINE double take(Doubles& total) {
  const double sum = sum_of(total);
  total = Doubles{};
  return sum;
}

// sum (x - y)^2
class SquaredDifference {
 public:
  static constexpr int kOutputs = 1;

  RC_INLINE void add(int chain, Floats x, Floats y) {
    const Floats difference = x - y;
    chains_[chain] = multiply_add(difference, difference, chains_[chain]);
  }

  RC_INLINE void end_token() { drain(chains_, total_); }

  RC_INLINE void end_block(double* out) { out[0] = take(total_); }

 private:
  Floats chains_[kChains] = {};
  Doubles total_ = {};
};

// sum x^2, sum y^2, sum x y
class Moments {
 public:
  static constexpr int kOutputs = 3;

  RC_INLINE void add(int chain, Floats x, Floats y) {
    xx_[chain] = multiply_add(x, x, xx_[chain]);
    yy_[chain] = multiply_add(y, y, yy_[chain]);
    xy_[chain] = multiply_add(x, y, xy_[chain]);
  }

  RC_INLINE void end_token() {
    drain(xx_, total_[0]);
    drain(yy_, total_[1]);
    drain(xy_, total_[2]);
  }

  RC_INLINE void end_block(double* out) {
    for (int i = 0; i < kOutputs; ++i) out[i] = take(total_[i]);
  }

 private:
  Floats xx_[kChains] = {};
  Floats yy_[kChains] = {};
  Floats xy_[kChains] = {};
  Doubles total_[kOutputs] = {};
};

}  // namespace distance
}  // namespace reasoncache
