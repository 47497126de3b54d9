// SPDX-License-Identifier: Apache-2.0
// Feeds, takes and closes while the engine's thread works; for ThreadSanitizer, which
// reports what two threads touch without a lock. See tools/sanitize.sh.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "filter/engine.h"

using namespace reasoncache;

namespace {

// The fields in order; see filter/config.h.
constexpr FilterConfig kConfig{0.9, 0.7, -1.0, 1, 1, 64, 2, 1, 1, 1024, 2048, 4, 256, 8192, 64, 1024, 64};
constexpr int kRequests = 8;

Vocabulary vocabulary() {
  const std::string blob = "So x = 1\n\n";
  const std::vector<uint64_t> offsets{0, 3, 4, 7, 8, 10};
  const std::vector<uint8_t> classes{
      0, 0, 0, 0, kBlank | kStartsNewline | kEndsNewline | kOpensWithBlankLine};
  return Vocabulary(reinterpret_cast<const uint8_t*>(blob.data()), offsets.data(), classes.data(),
                    classes.size());
}

size_t run_once() {
  Engine engine(kConfig, vocabulary(), Markers{});
  for (int request = 0; request < kRequests; ++request) engine.open(request, 0, true);
  const int64_t two_steps[] = {0, 1, 2, 3, 4, 0, 1, 2, 3, 4};
  std::vector<Result> taken;
  for (int i = 0; i < 500; ++i) {
    for (int request = 0; request < kRequests; ++request) engine.feed(request, two_steps, 10);
    engine.flush();
    engine.take(engine.ready(), 1000, taken);
    if (i % 50 == 49) engine.wait();
    if (i == 300) engine.close(3);
  }
  return taken.size();
}

}  // namespace

int main() {
  size_t steps = 0;
  for (int i = 0; i < 20; ++i) steps += run_once();
  std::printf("%zu steps compared, no race\n", steps);
  return steps > 0 ? 0 : 1;
}
