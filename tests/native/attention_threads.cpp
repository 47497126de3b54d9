// SPDX-License-Identifier: Apache-2.0
// Calls attention from several threads at once, for ThreadSanitizer; see tools/sanitize.sh.

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "attention/attention.h"

namespace {

constexpr std::int64_t kSlots = 4000;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kDim = 32;
constexpr std::int64_t kBatch = 3;
constexpr int kCalls = 60;

std::vector<float> numbers(std::int64_t count) {
  std::vector<float> made(static_cast<std::size_t>(count));
  std::uint32_t state = 1;
  for (float& value : made) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return made;
}

}  // namespace

int main() {
  const std::vector<float> keys = numbers(kSlots * kKvHeads * kDim);
  const std::vector<float> values = numbers(kSlots * kKvHeads * kDim);
  const std::vector<float> query = numbers(kBatch * kHeads * kDim);
  std::vector<std::int32_t> indices(kSlots);
  for (std::int64_t i = 0; i < kSlots; ++i) {
    indices[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i * 7 % kSlots);
  }
  const std::int32_t bounds[kBatch + 1] = {0, 1500, 1501, kSlots};
  // Each tile of kRotationTile entries has one rotation, by 1 position.
  constexpr std::int64_t kTiles = kSlots / reasoncache::attention::kRotationTile + kBatch;
  std::vector<std::int32_t> tile_ptr(kTiles + 1);
  for (std::int64_t i = 0; i <= kTiles; ++i) {
    tile_ptr[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
  }
  const std::vector<std::int32_t> by(kTiles, 1);
  const std::vector<std::uint64_t> bits(kTiles, 0x0ff0ull);
  const std::vector<float> table = numbers(kDim);

  const void* const bases[2] = {keys.data(), values.data()};
  reasoncache_pool pool{};
  pool.bases = bases;
  pool.num_layers = 1;
  pool.num_slots = kSlots;
  pool.num_heads = kKvHeads;
  pool.cosines = pool.sines = table.data();
  pool.table_rows = 2;
  pool.rotary_dim = kDim;
  pool.is_neox = 1;
  for (int side = 0; side < 2; ++side) {
    pool.head_dim[side] = pool.head_stride[side] = kDim;
    pool.slot_stride[side] = kKvHeads * kDim;
  }

  const auto decode = [&](int threads) {
    std::vector<float> out(query.size());
    const std::int32_t status = reasoncache_decode(
        &pool, query.data(), out.data(), kBatch, kHeads, kHeads * kDim, kDim, bounds, bounds + 1,
        indices.data(), nullptr, kSlots, tile_ptr.data(), by.data(), bits.data(), kTiles, nullptr,
        0.2f, 0.0f, REASONCACHE_FLOAT32, threads);
    if (status != REASONCACHE_OK) out.clear();
    return out;
  };
  const auto gather = [&](int threads) {
    std::vector<float> out(keys.size() * 2);
    const std::int32_t status =
        reasoncache_gather(&pool, indices.data(), nullptr, kSlots, out.data(),
                           out.data() + keys.size(), REASONCACHE_FLOAT32, threads);
    if (status != REASONCACHE_OK) out.clear();
    return out;
  };

  const std::vector<float> expected = decode(1);
  const std::vector<float> gathered = gather(1);
  if (expected.empty() || gathered.empty()) return 1;
  bool same[3] = {true, true, true};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < kCalls; ++i) {
        same[caller] = same[caller] && decode(1 + (i + caller) % 4) == expected;
        if (i % 8 == 0) same[caller] = same[caller] && gather(2 + caller) == gathered;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  if (!same[0] || !same[1] || !same[2]) {
    std::fprintf(stderr, "results differ between threads\n");
    return 1;
  }
  return 0;
}
