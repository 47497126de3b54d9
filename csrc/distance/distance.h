// SPDX-License-Identifier: Apache-2.0
// C interface of the KV distance; `NativePool` in sglang_reasoncache/native/pool.py calls it.
#pragma once

#include <cstdint>

#include "pool/pool.h"

// Sums over blocks of `block` slots: destination `dst` [pairs][block] and source `src`
// [pairs][block], source keys rotated by `shift` [pairs][block] positions (null: as cached).
// Writes out [pairs][num_layers][2]: sum (x - y)^2. Returns a reasoncache_status; reads no
// slot when it is BAD.
// Uses up to `threads` threads when there is enough to read. Safe to call concurrently.
extern "C" __attribute__((visibility("default"))) std::int32_t reasoncache_distance(
    const reasoncache_pool* pool, const std::int64_t* dst, const std::int64_t* src,
    const std::int32_t* shift, std::int64_t pairs, std::int64_t block, std::int64_t threads,
    double* out) noexcept;
