// SPDX-License-Identifier: Apache-2.0
// Threads that are kept between calls, because starting a thread can take longer than an attention layer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

namespace reasoncache {

class Workers {
 public:
  // Returns the only Workers object of this process, which the first call makes. A forked child makes its own.
  static Workers& get();

  // Calls body(context) on this thread and on up to `helpers` other threads, and returns when all these
  // calls have returned. The body must divide the work among its calls. If it is called only once, for
  // example because another thread is in run(), that call must do all the work. The body must not throw.
  void run(int helpers, void (*body)(void*), void* context);

 private:
  void help();
  bool grow(int helpers);

  std::mutex one_call_;
  std::mutex mutex_;
  std::condition_variable begin_;
  std::condition_variable end_;
  std::atomic<std::uint64_t> calls_{0};
  void (*body_)(void*) = nullptr;  // null while no helper may call it
  void* context_ = nullptr;
  int wanted_ = 0;  // how many more helpers may join the current call
  int active_ = 0;
  int threads_ = 0;
};

// Calls body() on up to `threads` threads, this one included. Returns false if a call of body() threw.
template <class Body>
bool on_threads(std::int64_t threads, Body&& body) {
  struct Shared {
    Body& body;
    std::atomic<bool> failed{false};
  } shared{body};
  const auto call = [](void* context) {
    auto& mine = *static_cast<Shared*>(context);
    try {
      mine.body();
    } catch (const std::exception&) {
      mine.failed.store(true);
    }
  };
  if (threads < 2) {
    call(&shared);
  } else {
    Workers::get().run(static_cast<int>(threads - 1), call, &shared);
  }
  return !shared.failed;
}

}  // namespace reasoncache
