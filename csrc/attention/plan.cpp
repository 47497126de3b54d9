// SPDX-License-Identifier: Apache-2.0
// Converts rows of req_to_token to kv_indptr and kv_indices, as FlashInfer has them, with shifts or rotations.

#include <algorithm>
#include <exception>
#include <numeric>
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

// Writes the shifts (position - cached position) of `length` positions of a row, from position `first` on.
// The shift of an evicted position means nothing. Returns the bitwise or of all shifts.
std::int32_t shift_by(const std::int32_t* cached_at, const std::int32_t* slots, std::int64_t first,
                      std::int64_t length, std::int32_t* shift) {
  std::int32_t any = 0;
  for (std::int64_t i = 0; i < length; ++i) {
    // The subtraction is unsigned, because it may overflow: an unused slot may have any cached position.
    const auto home = static_cast<std::uint32_t>(cached_at[std::max(slots[i], 0)]);
    shift[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(first + i) - home);
    any |= shift[i];
  }
  return any;
}

// Returns the first position in [begin, end) at which `differs` is not 0, or `end` if there is
// no such position. Tests groups of positions at once, so that the compiler can use vectors.
template <class Differs>
std::int64_t first_that(std::int64_t begin, std::int64_t end, const Differs& differs) {
  constexpr std::int64_t kTogether = 16;
  for (const std::int64_t few = std::min(begin + 4, end); begin < few; ++begin) {
    if (differs(begin) != 0) return begin;
  }
  for (; begin + kTogether <= end; begin += kTogether) {
    std::int32_t any = 0;
    for (std::int64_t i = begin; i < begin + kTogether; ++i) any |= differs(i);
    if (any != 0) break;
  }
  while (begin < end && differs(begin) == 0) ++begin;
  return begin;
}

// Merges the entries of a request that name the same slot (see reasoncache_plan), and writes the rotations.
class Merge {
 public:
  Merge(std::int32_t* tile_ptr, std::int32_t* by, std::uint64_t* bits)
      : tile_ptr_(tile_ptr), by_(by), bits_(bits) {}

  // Writes the entries of a row and the rotations of its tiles. The row's first tile has the number
  // `tile`. `shift` [length] has the shifts of the row's positions. Returns the number of entries.
  std::int64_t row(const std::int32_t* slots, std::int64_t length, std::int64_t tile,
                   std::int32_t* kv_indices, const std::int32_t* shift) {
    place_.resize(static_cast<std::size_t>(length));
    moved_.clear();
    std::int64_t count = 0;
    for (std::int64_t i = 0, end; i < length; i = end) {
      end = first_that(i, length, [&](std::int64_t at) { return shift[at] | (slots[at] >> 31); });
      std::copy_n(slots + i, end - i, kv_indices + count);
      std::iota(place_.begin() + i, place_.begin() + end, static_cast<std::int32_t>(count));
      count += end - i;
      if (end == length) break;
      i = end++;
      if (slots[i] < 0) continue;
      const std::int32_t by = shift[i];
      const std::int64_t home = i - by;
      if (home >= 0 && home < length && slots[home] == slots[i]) {
        end = first_that(end, std::min(length, length + by), [&](std::int64_t at) {
          return (shift[at] ^ by) | (slots[at] ^ slots[at - by]) | (slots[at] >> 31);
        });
        moved_.push_back({home, end - i, by, 0, false});
        continue;
      }
      const bool goes_on = !moved_.empty() && moved_.back().shifted && moved_.back().by == by &&
                           moved_.back().end == i;
      if (goes_on) {
        ++moved_.back().length;
        moved_.back().end = end;
      } else {
        moved_.push_back({count, 1, by, end, true});
      }
      kv_indices[count++] = slots[i];
    }
    find_runs();
    group(tile, (count + kRotationTile - 1) / kRotationTile);
    return count;
  }

  // Writes tile_ptr up to element `tile`. Tiles whose element was not written before get no rotations.
  // Returns the number of rotations so far.
  std::int32_t fill(std::int64_t tile) {
    for (; tiles_ <= tile; ++tiles_) tile_ptr_[tiles_] = rotations_;
    return rotations_;
  }

 private:
  // Neighbouring positions with the same shift. If `shifted`, these positions have entries of their own.
  // If not, they use the entries of other positions.
  struct Moved {
    std::int64_t first;  // if shifted: first entry, else: the position whose entry is used first
    std::int64_t length;
    std::int32_t by;
    std::int64_t end;  // if shifted: the position after the last one, else 0
    bool shifted;
  };
  struct Run {
    std::int64_t tile;  // counted from the row's first tile
    std::int32_t by;
    std::uint64_t bits;
    bool shifted;
  };

  // Cuts each element of moved_ at the borders of tiles. Neighbouring positions whose shift is 0 have
  // neighbouring entries, so the first entry of a run determines the run's other entries.
  void find_runs() {
    runs_.clear();
    for (const Moved& moved : moved_) {
      std::int64_t entry =
          moved.shifted ? moved.first : place_[static_cast<std::size_t>(moved.first)];
      for (std::int64_t left = moved.length, here; left > 0; left -= here, entry += here) {
        const std::int64_t first = entry % kRotationTile;
        here = std::min(left, kRotationTile - first);
        const std::uint64_t bits = ~std::uint64_t{0} >> (kRotationTile - here) << first;
        runs_.push_back({entry / kRotationTile, moved.by, bits, moved.shifted});
      }
    }
  }

  // Writes a list of rotations for each tile that has runs. A list begins with the rotation by 0, whose
  // bits mark the keys that are used as cached.
  void group(std::int64_t first, std::int64_t tiles) {
    fill(first);
    next_.assign(static_cast<std::size_t>(tiles) + 1, 0);
    for (const Run& run : runs_) ++next_[static_cast<std::size_t>(run.tile)];
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      std::int32_t& next = next_[static_cast<std::size_t>(tile)];
      const std::int32_t count = next;
      next = rotations_ + 1;
      if (count > 0) {
        by_[rotations_] = 0;
        bits_[rotations_] = ~std::uint64_t{0};
        rotations_ += 1 + count;
      }
      tile_ptr_[tiles_++] = rotations_;
    }
    for (const Run& run : runs_) {
      const std::int32_t at = next_[static_cast<std::size_t>(run.tile)]++;
      by_[at] = run.by;
      bits_[at] = run.bits;
      if (run.shifted) bits_[tile_ptr_[first + run.tile]] &= ~run.bits;
    }
  }

  std::int32_t* tile_ptr_;
  std::int32_t* by_;
  std::uint64_t* bits_;
  std::int32_t rotations_ = 0;
  std::int64_t tiles_ = 0;  // elements of tile_ptr written so far
  std::vector<std::int32_t> place_{};  // [length], entry of each position whose shift is 0
  std::vector<Moved> moved_{};
  std::vector<Run> runs_{};
  std::vector<std::int32_t> next_{};  // [tiles + 1], where the next rotation of each tile goes
};

std::int32_t plan(const std::int32_t* rows, std::int64_t num_rows, std::int64_t row_stride,
                  std::int64_t width, const std::int64_t* requests, const std::int64_t* lengths,
                  std::int64_t batch, std::int64_t reach, const std::int32_t* cached_at,
                  std::int64_t num_slots, std::int32_t* kv_indptr, std::int32_t* kv_indices,
                  std::int32_t* shift, std::int64_t capacity, Merge* merge,
                  std::int32_t* is_shifted) {
  std::int64_t at = 0;
  std::int32_t any = 0;
  kv_indptr[0] = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    if (requests[b] < 0 || requests[b] >= num_rows) return REASONCACHE_BAD_ROW;
    if (lengths[b] < 0 || lengths[b] > width) return REASONCACHE_BAD_LEN;
    const std::int64_t length = reach > 0 ? std::min(lengths[b], reach) : lengths[b];
    if (length > capacity - at) return REASONCACHE_BAD_LEN;
    // From here on, positions are counted from the first position that is read.
    const std::int64_t first = lengths[b] - length;
    const std::int32_t* slots = rows + requests[b] * row_stride + first;
    const Bounds found = bounds_of(slots, length);
    if (found.most >= num_slots) return REASONCACHE_BAD_SLOT;
    const bool has_evicted = found.least < 0;
    std::int32_t here = 0;
    if (shift != nullptr) here = shift_by(cached_at, slots, first, length, shift + at);
    if (merge != nullptr && (has_evicted || here != 0)) {
      const std::int64_t tile = at / kRotationTile + b;
      at += merge->row(slots, length, tile, kv_indices + at, shift + at);
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
    std::int64_t reach, const std::int32_t* cached_at, std::int64_t num_slots,
    std::int32_t* kv_indptr, std::int32_t* kv_indices, std::int32_t* shift,
    std::int64_t capacity, std::int32_t* tile_ptr, std::int32_t* by, std::uint64_t* bits,
    std::int32_t* is_shifted, std::int32_t* rotations) noexcept {
  using namespace reasoncache::attention;
  if (capacity > INT32_MAX) return REASONCACHE_BAD_LEN;
  try {
    Merge merge(tile_ptr, by, bits);
    const std::int32_t status =
        plan(rows, num_rows, row_stride, width, requests, lengths, batch, reach, cached_at, num_slots,
             kv_indptr, kv_indices, shift, capacity, tile_ptr == nullptr ? nullptr : &merge,
             is_shifted);
    if (status != REASONCACHE_OK || tile_ptr == nullptr) return status;
    *rotations = merge.fill(kv_indptr[batch] / kRotationTile + batch);
    return status;
  } catch (const std::exception&) {
    return REASONCACHE_NO_MEMORY;
  }
}
