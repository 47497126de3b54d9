// SPDX-License-Identifier: Apache-2.0
// Rows of req_to_token to FlashInfer's kv_indptr and kv_indices, one pass.

#include <algorithm>
#include <cstring>

#include "attention.h"

namespace reasoncache {
namespace attention {
namespace {

struct Bounds {
  std::int32_t least = 0;
  std::int32_t most = -1;
};

Bounds bounds_of(const std::int32_t* slots, std::int64_t count) {
  Bounds found;
  for (std::int64_t i = 0; i < count; ++i) {
    found.least = std::min(found.least, slots[i]);
    found.most = std::max(found.most, slots[i]);
  }
  return found;
}

// Shifts of `count` entries at positions first, first + 1, ...; returns the or of them all.
std::int32_t shift_by(const std::int32_t* cached_at, const std::int32_t* slots, std::int64_t count,
                      std::int64_t first, std::int32_t* shift) {
  std::int32_t any = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    // Unsigned: cached positions of slots that nobody uses may hold anything.
    const auto position = static_cast<std::uint32_t>(first + i);
    shift[i] = static_cast<std::int32_t>(position - static_cast<std::uint32_t>(cached_at[slots[i]]));
    any |= shift[i];
  }
  return any;
}

}  // namespace
}  // namespace attention
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_plan(
    const std::int32_t* rows, std::int64_t num_rows, std::int64_t row_stride, std::int64_t width,
    const std::int64_t* requests, const std::int64_t* lengths, std::int64_t batch,
    const std::int32_t* cached_at, std::int64_t num_slots, std::int32_t* kv_indptr,
    std::int32_t* kv_indices, std::int32_t* shift, std::int64_t capacity,
    std::int32_t* is_shifted) noexcept {
  using namespace reasoncache::attention;
  if (capacity > INT32_MAX) return REASONCACHE_BAD_LEN;
  std::int64_t at = 0;
  std::int32_t any = 0;
  kv_indptr[0] = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = lengths[b];
    if (requests[b] < 0 || requests[b] >= num_rows) return REASONCACHE_BAD_ROW;
    if (length < 0 || length > width) return REASONCACHE_BAD_LEN;
    if (length > capacity - at) return REASONCACHE_BAD_LEN;
    const std::int32_t* slots = rows + requests[b] * row_stride;
    const Bounds found = bounds_of(slots, length);
    if (found.most >= num_slots) return REASONCACHE_BAD_SLOT;
    const bool has_evicted = found.least < 0;
    if (!has_evicted && length > 0) {
      std::memcpy(kv_indices + at, slots, static_cast<std::size_t>(length) * sizeof *slots);
      if (shift != nullptr) any |= shift_by(cached_at, slots, length, 0, shift + at);
      at += length;
    }
    for (std::int64_t i = 0; has_evicted && i < length; ++i) {
      if (slots[i] < 0) continue;
      kv_indices[at] = slots[i];
      if (shift != nullptr) any |= shift_by(cached_at, slots + i, 1, i, shift + at);
      ++at;
    }
    kv_indptr[b + 1] = static_cast<std::int32_t>(at);
  }
  *is_shifted = any != 0;
  return REASONCACHE_OK;
}
