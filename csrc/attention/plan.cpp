// SPDX-License-Identifier: Apache-2.0
// Rows of req_to_token to FlashInfer's kv_indptr and kv_indices, one pass.

#include <algorithm>
#include <exception>
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

// Shifts of the positions of a row, of evicted ones anything; returns the or of them all.
std::int32_t shift_by(const std::int32_t* cached_at, const std::int32_t* slots, std::int64_t length,
                      std::int32_t* shift) {
  std::int32_t any = 0;
  for (std::int64_t i = 0; i < length; ++i) {
    // Unsigned: cached positions of slots that nobody uses may hold anything.
    const auto home = static_cast<std::uint32_t>(cached_at[std::max(slots[i], 0)]);
    shift[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(i) - home);
    any |= shift[i];
  }
  return any;
}

// Rotations of a batch, request after request.
class Merge {
 public:
  Merge(std::int32_t* tile_ptr, std::int32_t* by, std::uint64_t* bits)
      : tile_ptr_(tile_ptr), by_(by), bits_(bits) {}

  // Writes the entries of a row, with the rotations of their tiles, the first of which is `tile`;
  // returns how many entries. `shift` holds those of its positions, and then of its entries.
  std::int64_t row(const std::int32_t* slots, std::int64_t length, std::int64_t tile,
                   std::int32_t* kv_indices, std::int32_t* shift, std::int32_t* any) {
    place_.resize(static_cast<std::size_t>(length));
    aliases_.clear();
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < length; ++i) {
      const std::int32_t by = shift[i];
      if (slots[i] < 0) continue;
      const std::int64_t home = i - by;
      if (by != 0 && home >= 0 && home < length && slots[home] == slots[i]) {
        aliases_.push_back({i, home});
        continue;
      }
      place_[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(count);
      kv_indices[count] = slots[i];
      shift[count++] = by;
      *any |= by;
    }
    find_runs();
    group(tile, (count + kRotationTile - 1) / kRotationTile);
    return count;
  }

  // There are no rotations up to `tile`; returns how many there are.
  std::int32_t fill(std::int64_t tile) {
    for (; tiles_ <= tile; ++tiles_) tile_ptr_[tiles_] = rotations_;
    return rotations_;
  }

 private:
  struct Alias {
    std::int64_t at;
    std::int64_t home;
  };
  struct Run {
    std::int64_t tile;  // of the row
    std::int32_t by;
    std::uint64_t bits;
  };

  // Neighbouring positions with one rotation whose entries are in one tile.
  void find_runs() {
    runs_.clear();
    std::int64_t before = -1;
    for (const Alias& alias : aliases_) {
      const std::int64_t entry = place_[static_cast<std::size_t>(alias.home)];
      const std::int64_t tile = entry / kRotationTile;
      const auto by = static_cast<std::int32_t>(alias.at - alias.home);
      if (alias.at != before + 1 || runs_.empty() || runs_.back().tile != tile ||
          runs_.back().by != by) {
        runs_.push_back({tile, by, 0});
      }
      runs_.back().bits |= std::uint64_t{1} << (entry % kRotationTile);
      before = alias.at;
    }
  }

  void group(std::int64_t first, std::int64_t tiles) {
    fill(first);
    next_.assign(static_cast<std::size_t>(tiles) + 1, 0);
    for (const Run& run : runs_) ++next_[static_cast<std::size_t>(run.tile) + 1];
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      auto& end = next_[static_cast<std::size_t>(tile) + 1];
      end += next_[static_cast<std::size_t>(tile)];
      tile_ptr_[tiles_++] = rotations_ + end;
    }
    for (const Run& run : runs_) {
      const std::int32_t at = rotations_ + next_[static_cast<std::size_t>(run.tile)]++;
      by_[at] = run.by;
      bits_[at] = run.bits;
    }
    rotations_ += static_cast<std::int32_t>(runs_.size());
  }

  std::int32_t* tile_ptr_;
  std::int32_t* by_;
  std::uint64_t* bits_;
  std::int32_t rotations_ = 0;
  std::int64_t tiles_ = 0;  // of tile_ptr, written
  std::vector<std::int32_t> place_{};  // [length], entries of the positions that have one
  std::vector<Alias> aliases_{};
  std::vector<Run> runs_{};
  std::vector<std::int32_t> next_{};  // [tiles + 1]
};

std::int32_t plan(const std::int32_t* rows, std::int64_t num_rows, std::int64_t row_stride,
                  std::int64_t width, const std::int64_t* requests, const std::int64_t* lengths,
                  std::int64_t batch, const std::int32_t* cached_at, std::int64_t num_slots,
                  std::int32_t* kv_indptr, std::int32_t* kv_indices, std::int32_t* shift,
                  std::int64_t capacity, Merge* merge, std::int32_t* is_shifted) {
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
    std::int32_t here = 0;
    if (shift != nullptr) here = shift_by(cached_at, slots, length, shift + at);
    if (merge != nullptr && (has_evicted || here != 0)) {
      const std::int64_t tile = at / kRotationTile + b;
      at += merge->row(slots, length, tile, kv_indices + at, shift + at, &any);
    } else if (!has_evicted) {
      std::copy_n(slots, length, kv_indices + at);
      any |= here;
      at += length;
    } else {
      const std::int32_t* by = shift == nullptr ? nullptr : shift + at;
      for (std::int64_t i = 0; i < length; ++i) {
        if (slots[i] < 0) continue;
        kv_indices[at] = slots[i];
        if (by != nullptr) any |= shift[at] = by[i];
        ++at;
      }
    }
    kv_indptr[b + 1] = static_cast<std::int32_t>(at);
  }
  *is_shifted = any != 0;
  return REASONCACHE_OK;
}

}  // namespace
}  // namespace attention
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_plan(
    const std::int32_t* rows, std::int64_t num_rows, std::int64_t row_stride, std::int64_t width,
    const std::int64_t* requests, const std::int64_t* lengths, std::int64_t batch,
    const std::int32_t* cached_at, std::int64_t num_slots, std::int32_t* kv_indptr,
    std::int32_t* kv_indices, std::int32_t* shift, std::int64_t capacity, std::int32_t* tile_ptr,
    std::int32_t* by, std::uint64_t* bits, std::int32_t* is_shifted,
    std::int32_t* rotations) noexcept {
  using namespace reasoncache::attention;
  if (capacity > INT32_MAX) return REASONCACHE_BAD_LEN;
  try {
    Merge merge(tile_ptr, by, bits);
    const std::int32_t status =
        plan(rows, num_rows, row_stride, width, requests, lengths, batch, cached_at, num_slots,
             kv_indptr, kv_indices, shift, capacity, tile_ptr == nullptr ? nullptr : &merge,
             is_shifted);
    if (status != REASONCACHE_OK || tile_ptr == nullptr) return status;
    *rotations = merge.fill(kv_indptr[batch] / kRotationTile + batch);
    return status;
  } catch (const std::exception&) {
    return REASONCACHE_NO_MEMORY;
  }
}
