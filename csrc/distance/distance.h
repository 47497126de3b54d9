// SPDX-License-Identifier: Apache-2.0
// C interface of the KV distance; `NativePool` in sglang_reasoncache/native/pool.py calls it.
#pragma once

#include <cstdint>

#include "pool/pool.h"

// Compares pairs of blocks. The slots of the destination blocks are `dst` [pairs][block], the slots of
// the source blocks `src` [pairs][block]. Source keys are rotated by `shift` [pairs][block] positions, or
// used as cached if `shift` is null. Writes the sums of (x - y)^2 for K and for V to out
// [pairs][num_layers][2]. Returns a reasoncache_status. No slot is read if the status is one of
// REASONCACHE_BAD_*. Uses one thread if there is little to read, else up to `threads`. Thread-safe.
extern "C" __attribute__((visibility("default"))) std::int32_t reasoncache_distance(
    const reasoncache_pool* pool, const std::int64_t* dst, const std::int64_t* src,
    const std::int32_t* shift, std::int64_t pairs, std::int64_t block, std::int64_t threads,
    double* out) noexcept;
