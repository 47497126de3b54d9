// SPDX-License-Identifier: Apache-2.0
// All requests of a scheduler. The scheduler's thread feeds tokens and takes
// proposals; one thread of ours compares steps in between.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "filter/config.h"
#include "filter/segmenter.h"
#include "filter/step_filter.h"
#include "filter/vocabulary.h"

namespace reasoncache {

struct Result {
  int64_t request = 0;
  Proposal proposal;
  int64_t cpu_ns = 0;  // time of the filter's thread for this step
};

// Every member but `work` belongs to the caller's thread; the queues are locked.
class Engine {
 public:
  Engine(const FilterConfig& config, Vocabulary vocabulary, Markers markers);
  ~Engine();

  // Ids are the caller's, each used once.
  void open(int64_t request, int64_t start_position, bool inside);
  void close(int64_t request);

  // Takes a request's next tokens; finished steps go to the thread, or are shed where
  // `max_pending` of them are waiting. Unknown requests are ignored. Out of memory, the
  // request is closed: it shares no more.
  void feed(int64_t request, const int64_t* tokens, size_t count);
  // Starts the thread on what was fed since the last call.
  void flush();

  // Steps handed over and not taken back yet; depends on the calls made, not on time.
  size_t outstanding() const { return outstanding_; }
  uint64_t shed() const { return shed_; }
  // Results that `take` would return now.
  size_t ready();
  // Moves up to `limit` results, in the order of their steps, to `out`; stops behind the one
  // with which they have `max_pairs` pairs or more.
  void take(size_t limit, size_t max_pairs, std::vector<Result>& out);
  // Waits until every step handed over has its result.
  void wait();

 private:
  struct Request {
    Segmenter segmenter;
    std::shared_ptr<StepFilter> filter;
    bool flip_fence = false;  // shed steps held an odd number of fences
  };
  struct Work {
    int64_t request;
    std::shared_ptr<StepFilter> filter;
    RawStep step;  // no tokens: the request is closed, drop its filter
    bool flip_fence;
  };

  void hand_over(int64_t id, Request& request, RawStep&& step);
  void work();

  const FilterConfig config_;
  const Vocabulary vocabulary_;
  const Markers markers_;
  std::unordered_map<int64_t, Request> requests_;
  std::vector<Work> fed_;  // since the last flush
  size_t outstanding_ = 0;
  uint64_t shed_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;  // the thread: work or the end
  std::condition_variable done_;  // a waiting caller: nothing left
  std::deque<Work> queue_;
  std::deque<Result> results_;
  std::atomic<size_t> num_ready_{0};
  bool busy_ = false;
  bool stop_ = false;
  std::thread thread_;  // last: starts when everything else is there
};

}  // namespace reasoncache
