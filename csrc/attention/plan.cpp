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

std::int32_t plan(reasoncache_plan_call& call) {
  std::int64_t at = 0;
  std::int32_t any = 0;
  call.kv_indptr[0] = 0;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t request = call.requests[b];
    const std::int64_t length = call.lengths[b];
    if (request < 0 || request >= call.num_rows) return REASONCACHE_BAD_ROW;
    if (length < 0 || length > call.width) return REASONCACHE_BAD_LEN;
    if (length > call.capacity - at) return REASONCACHE_BAD_LEN;
    const std::int32_t* slots = call.rows + request * call.row_stride;
    const Bounds found = bounds_of(slots, length);
    if (found.most >= call.num_slots) return REASONCACHE_BAD_SLOT;
    const bool has_evicted = found.least < 0;
    if (!has_evicted && length > 0) {
      std::memcpy(call.kv_indices + at, slots, static_cast<std::size_t>(length) * sizeof *slots);
      if (call.shift != nullptr) {
        any |= shift_by(call.cached_at, slots, length, 0, call.shift + at);
      }
      at += length;
    }
    for (std::int64_t i = 0; has_evicted && i < length; ++i) {
      if (slots[i] < 0) continue;
      call.kv_indices[at] = slots[i];
      if (call.shift != nullptr) any |= shift_by(call.cached_at, slots + i, 1, i, call.shift + at);
      ++at;
    }
    call.kv_indptr[b + 1] = static_cast<std::int32_t>(at);
  }
  call.is_shifted = any != 0;
  return REASONCACHE_OK;
}

}  // namespace
}  // namespace attention
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_plan(reasoncache_plan_call* call) noexcept {
  if (call->capacity > INT32_MAX) return REASONCACHE_BAD_LEN;
  return reasoncache::attention::plan(*call);
}
