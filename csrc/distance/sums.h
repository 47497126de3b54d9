// SPDX-License-Identifier: Apache-2.0
// What is summed over a pair of blocks. fp32 within a token, double over tokens.
#pragma once

#include "vector.h"

namespace reasoncache {
namespace distance {

constexpr int kChains = 4;  // independent sums, so that additions need not wait for each other

RC_INLINE double drain(Floats (&chains)[kChains]) {
  const double total = sum_of((chains[0] + chains[1]) + (chains[2] + chains[3]));
  for (Floats& chain : chains) chain = Floats{};
  return total;
}

// sum (x - y)^2
class SquaredDifference {
 public:
  static constexpr int kOutputs = 1;

  RC_INLINE void add(int chain, Floats x, Floats y) {
    const Floats difference = x - y;
    chains_[chain] = multiply_add(difference, difference, chains_[chain]);
  }

  RC_INLINE void end_token() { total_ += drain(chains_); }

  RC_INLINE void end_block(double* out) {
    out[0] = total_;
    total_ = 0;
  }

 private:
  Floats chains_[kChains] = {};
  double total_ = 0;
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
    total_[0] += drain(xx_);
    total_[1] += drain(yy_);
    total_[2] += drain(xy_);
  }

  RC_INLINE void end_block(double* out) {
    for (int i = 0; i < kOutputs; ++i) {
      out[i] = total_[i];
      total_[i] = 0;
    }
  }

 private:
  Floats xx_[kChains] = {};
  Floats yy_[kChains] = {};
  Floats xy_[kChains] = {};
  double total_[kOutputs] = {};
};

}  // namespace distance
}  // namespace reasoncache
