// SPDX-License-Identifier: Apache-2.0
#include "filter/align.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace reasoncache {
namespace {

// Rolling hash of `block` tokens modulo the prime 2^61 - 1 with a base drawn for
// each process: nobody outside can choose tokens that collide.
constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

uint64_t multiply(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = Wide{a} * b;
  const uint64_t folded = static_cast<uint64_t>(product & kPrime) + static_cast<uint64_t>(product >> 61);
  return folded >= kPrime ? folded - kPrime : folded;
}

uint64_t base() {
  static const uint64_t drawn = [] {
    std::random_device device;
    return ((uint64_t{device()} << 32 | device()) % (kPrime - 65536)) + 32768;
  }();
  return drawn;
}

struct Gram {
  uint64_t hash;
  int64_t offset;
  bool operator<(const Gram& other) const {
    return hash != other.hash ? hash < other.hash : offset < other.offset;
  }
};

// Hash of every block that starts at `first`, `first + 1`, ... in `tokens`.
std::vector<uint64_t> hashes(const std::vector<int32_t>& tokens, size_t block) {
  std::vector<uint64_t> found;
  if (tokens.size() < block) return found;
  found.reserve(tokens.size() - block + 1);
  uint64_t top = 1;
  for (size_t i = 1; i < block; ++i) top = multiply(top, base());
  uint64_t hash = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const uint64_t value = static_cast<uint32_t>(tokens[i]) + uint64_t{1};
    if (i >= block) {
      const uint64_t oldest = static_cast<uint32_t>(tokens[i - block]) + uint64_t{1};
      hash += kPrime - multiply(oldest, top);
      if (hash >= kPrime) hash -= kPrime;
    }
    hash = multiply(hash, base()) + value;
    if (hash >= kPrime) hash -= kPrime;
    if (i + 1 >= block) found.push_back(hash);
  }
  return found;
}

int64_t first_offset(const Step& step, int64_t page_size) {
  const int64_t over = step.start % page_size;
  return over == 0 ? 0 : page_size - over;
}

// Last covered token in [from, to), or -1.
int64_t last_covered(const std::vector<uint8_t>& covered, int64_t from, int64_t to) {
  for (int64_t i = to - 1; i >= from; --i) {
    if (covered[i]) return i;
  }
  return -1;
}

void by_index(const Step& dst, const Step& src, const FilterConfig& config,
              const std::vector<uint8_t>& covered, size_t room, std::vector<BlockPair>& out) {
  const int64_t block = config.block;
  const int64_t dst_last = static_cast<int64_t>(dst.tokens.size()) - block;
  const int64_t src_last = static_cast<int64_t>(src.tokens.size()) - block;
  int64_t j = first_offset(src, config.page_size);
  for (int64_t i = first_offset(dst, config.page_size); i <= dst_last && j <= src_last && room;
       i += block, j += block) {
    if (last_covered(covered, i, i + block) >= 0) continue;
    out.push_back({dst.start + i, src.start + j});
    --room;
  }
}

// Offset in `src` of a block equal to the one at `i` in `dst`, or -1: the wanted one,
// else the nearest later one, else the first.
int64_t find_source(const Step& dst, int64_t i, const Step& src, const std::vector<Gram>& grams,
                    uint64_t hash, int64_t wanted, size_t block) {
  const auto equal = [&](int64_t j) {
    return std::memcmp(&dst.tokens[i], &src.tokens[j], block * sizeof(int32_t)) == 0;
  };
  const auto begin = std::lower_bound(grams.begin(), grams.end(), Gram{hash, INT64_MIN});
  if (begin == grams.end() || begin->hash != hash) return -1;
  auto at = std::lower_bound(begin, grams.end(), Gram{hash, wanted});
  if (at == grams.end() || at->hash != hash) at = begin;
  return equal(at->offset) ? at->offset : -1;
}

void by_tokens(const Step& dst, const Step& src, const FilterConfig& config,
               const std::vector<uint8_t>& covered, size_t room, std::vector<BlockPair>& out) {
  const int64_t block = config.block;
  const int64_t page = config.page_size;
  const int64_t first = first_offset(src, page);
  const std::vector<uint64_t> src_hashes = hashes(src.tokens, block);
  std::vector<Gram> grams;
  for (int64_t j = first; j < static_cast<int64_t>(src_hashes.size()); j += page) {
    grams.push_back({src_hashes[j], j});
  }
  if (grams.empty()) return;
  std::sort(grams.begin(), grams.end());
  const std::vector<uint64_t> dst_hashes = hashes(dst.tokens, block);
  int64_t i = first_offset(dst, page);
  int64_t diagonal = first - i;
  const int64_t last = static_cast<int64_t>(dst.tokens.size()) - block;
  while (i <= last && room) {
    const int64_t taken = last_covered(covered, i, i + block);
    if (taken >= 0) {
      // The next offset of the grid that lies behind the covered token.
      i += (taken + 1 - i + page - 1) / page * page;
      continue;
    }
    const int64_t j = find_source(dst, i, src, grams, dst_hashes[i], i + diagonal, block);
    if (j < 0) {
      i += page;
      continue;
    }
    diagonal = j - i;
    out.push_back({dst.start + i, src.start + j});
    --room;
    i += block;
  }
}

}  // namespace

void align_blocks(const Step& dst, const Step& src, const FilterConfig& config,
                  const std::vector<uint8_t>& covered, size_t room, std::vector<BlockPair>& out) {
  (config.align_tokens ? by_tokens : by_index)(dst, src, config, covered, room, out);
}

}  // namespace reasoncache
