// SPDX-License-Identifier: Apache-2.0

#include "pool/workers.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

namespace reasoncache {
namespace {

// How long a helper thread spins while it waits for the next call, before it sleeps. The layers of a forward
// follow each other within this time. Without a forward the helpers sleep, so an idle server uses no CPU time.
constexpr std::chrono::microseconds kSpin{50};

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Workers& Workers::get() {
  static std::mutex mutex;
  static Workers* workers = nullptr;
  static pid_t owner = -1;
  const std::lock_guard<std::mutex> lock(mutex);
  if (workers == nullptr || owner != getpid()) {
    // This object is never deleted, because its helpers may use it until the process ends. A forked
    // child does not inherit the helper threads, so it makes an object of its own.
    workers = new Workers;
    owner = getpid();
  }
  return *workers;
}

bool Workers::grow(int helpers) {
  try {
    for (; threads_ < helpers; ++threads_) std::thread([this] { help(); }).detach();
  } catch (const std::exception&) {
    // The system gives no more threads, so the existing threads do the work.
  }
  return threads_ > 0;
}

void Workers::run(int helpers, void (*body)(void*), void* context) {
  const std::unique_lock<std::mutex> mine(one_call_, std::try_to_lock);
  if (!mine.owns_lock() || helpers < 1 || !grow(helpers)) {
    body(context);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    body_ = body;
    context_ = context;
    wanted_ = helpers;
    calls_.fetch_add(1, std::memory_order_relaxed);
  }
  begin_.notify_all();
  body(context);
  std::unique_lock<std::mutex> lock(mutex_);
  // From here on no helper joins, so this call does not wait for a helper that still sleeps.
  body_ = nullptr;
  end_.wait(lock, [this] { return active_ == 0; });
}

void Workers::help() {
  std::uint64_t seen = 0;
  for (;;) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (calls_.load(std::memory_order_relaxed) == seen &&
           std::chrono::steady_clock::now() < until) {
      for (int i = 0; i < 32; ++i) relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    begin_.wait(lock, [&] { return calls_.load(std::memory_order_relaxed) != seen; });
    seen = calls_.load(std::memory_order_relaxed);
    if (body_ == nullptr || wanted_ == 0) continue;
    --wanted_;
    ++active_;
    void (*const body)(void*) = body_;
    void* const context = context_;
    lock.unlock();
    body(context);
    lock.lock();
    if (--active_ == 0) end_.notify_one();
  }
}

}  // namespace reasoncache
