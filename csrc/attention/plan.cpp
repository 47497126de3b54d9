// SPDX-License-Identifier: Apache-2.0
// Rows of req_to_token to FlashInfer's kv_indptr and kv_indices, one pass.

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

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

struct Entry {
  std::int32_t window;
  std::int32_t shift;
  std::int32_t slot;
};

// Entries of one request by (cached_at / 64, shift), else as they come; as row_order.py has it.
void put_together(const std::int32_t* cached_at, std::int32_t* indices, std::int32_t* shift,
                  std::int64_t count, std::vector<Entry>& entries) {
  if (shift == nullptr) {
    std::sort(indices, indices + count);
    return;
  }
  entries.resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    entries[i] = {cached_at[indices[i]] >> 6, shift[i], indices[i]};
  }
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.window != b.window ? a.window < b.window : a.shift < b.shift;
  });
  for (std::int64_t i = 0; i < count; ++i) {
    indices[i] = entries[i].slot;
    shift[i] = entries[i].shift;
  }
}

std::int32_t plan(reasoncache_plan_call& call) {
  std::vector<Entry> entries;
  std::int64_t at = 0;
  std::int32_t any = 0;
  call.kv_indptr[0] = 0;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t request = call.requests[b];
    const std::int64_t length = call.lengths[b];
    if (request < 0 || request >= call.num_rows) return REASONCACHE_ATTENTION_BAD_ROW;
    if (length < 0 || length > call.width) return REASONCACHE_ATTENTION_BAD_LEN;
    const std::int64_t first =
        call.window < 0 ? 0 : std::max<std::int64_t>(0, length - call.window);
    const std::int64_t count = length - first;
    if (count > call.capacity - at) return REASONCACHE_ATTENTION_BAD_LEN;
    const std::int32_t* slots = call.rows + request * call.row_stride + first;
    const std::int64_t begin = at;
    std::int32_t* indices = call.kv_indices + begin;
    std::int32_t* shift = call.cached_at == nullptr ? nullptr : call.shift + begin;
    std::int32_t shifted = 0;
    const Bounds found = bounds_of(slots, count);
    if (found.most >= call.num_slots) return REASONCACHE_ATTENTION_BAD_SLOT;
    if (found.least >= 0) {
      if (count > 0) {
        std::memcpy(indices, slots, static_cast<std::size_t>(count) * sizeof *slots);
      }
      if (shift != nullptr) shifted = shift_by(call.cached_at, slots, count, first, shift);
      at += count;
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        if (slots[i] < 0) continue;
        call.kv_indices[at] = slots[i];
        if (shift != nullptr) shifted |= shift_by(call.cached_at, slots + i, 1, first + i, call.shift + at);
        ++at;
      }
    }
    // Rows in which nothing is shifted stay in order of positions.
    if (call.together != 0 && (shift == nullptr || shifted != 0)) {
      put_together(call.cached_at, indices, shift, at - begin, entries);
    }
    any |= shifted;
    call.kv_indptr[b + 1] = static_cast<std::int32_t>(at);
  }
  call.is_shifted = any != 0;
  return REASONCACHE_ATTENTION_OK;
}

}  // namespace
}  // namespace attention
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_plan(reasoncache_plan_call* call) noexcept {
  if (call->capacity > INT32_MAX) return REASONCACHE_ATTENTION_BAD_LEN;
  try {
    return reasoncache::attention::plan(*call);
  } catch (const std::bad_alloc&) {
    return REASONCACHE_ATTENTION_NO_MEMORY;
  }
}
