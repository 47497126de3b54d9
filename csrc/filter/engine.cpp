// SPDX-License-Identifier: Apache-2.0
#include "filter/engine.h"

#include <ctime>
#include <exception>
#include <string>

namespace reasoncache {
namespace {

int64_t thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

// Whether a code fence that is open before the tokens is closed after them, or the reverse.
bool flips_fence(const Vocabulary& vocabulary, const std::vector<int32_t>& tokens) {
  std::string text;
  for (const int32_t token : tokens) vocabulary.append_bytes(token, text);
  bool flips = false;
  for (size_t at = text.find("```"); at != std::string::npos; at = text.find("```", at + 3)) {
    flips = !flips;
  }
  return flips;
}

}  // namespace

Engine::Engine(const FilterConfig& config, Vocabulary vocabulary, Markers markers)
    : config_(config),
      vocabulary_(std::move(vocabulary)),
      markers_(std::move(markers)),
      thread_([this] { work(); }) {}

Engine::~Engine() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Engine::open(int64_t request, int64_t start_position, bool inside) {
  requests_.emplace(
      request, Request{Segmenter(vocabulary_, markers_, config_.max_step_tokens, start_position,
                                 inside),
                       std::make_shared<StepFilter>(config_, vocabulary_)});
}

void Engine::close(int64_t request) {
  const auto found = requests_.find(request);
  if (found == requests_.end()) return;
  // Its history may be large: the thread frees it, after its last step.
  fed_.push_back({request, std::move(found->second.filter), {}, false});
  requests_.erase(found);
}

void Engine::feed(int64_t request, const int64_t* tokens, size_t count) {
  const auto found = requests_.find(request);
  if (found == requests_.end()) return;
  try {
    RawStep step;
    for (size_t i = 0; i < count; ++i) {
      const int64_t token = tokens[i];
      const int32_t id = token >= 0 && token <= INT32_MAX ? static_cast<int32_t>(token) : -1;
      if (found->second.segmenter.push(id, step)) {
        hand_over(request, found->second, std::move(step));
        step = RawStep{};
      }
    }
  } catch (const std::exception&) {
    // Tokens were lost, so the positions of later ones would be wrong.
    requests_.erase(found);
  }
}

void Engine::hand_over(int64_t id, Request& request, RawStep&& step) {
  if (outstanding_ >= config_.max_pending) {
    ++shed_;
    request.flip_fence ^= flips_fence(vocabulary_, step.tokens);
    return;
  }
  fed_.push_back({id, request.filter, std::move(step), request.flip_fence});
  ++outstanding_;
  request.flip_fence = false;
}

void Engine::flush() {
  if (fed_.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Work& item : fed_) queue_.push_back(std::move(item));
  }
  fed_.clear();
  wake_.notify_one();
}

size_t Engine::ready() { return num_ready_.load(std::memory_order_acquire); }

void Engine::take(size_t limit, size_t max_pairs, std::vector<Result>& out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t num_pairs = 0;
  while (limit-- > 0 && num_pairs < max_pairs && !results_.empty()) {
    out.push_back(std::move(results_.front()));
    num_pairs += out.back().proposal.pairs.size();
    results_.pop_front();
    --outstanding_;
  }
  num_ready_.store(results_.size(), std::memory_order_release);
}

void Engine::wait() {
  flush();
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

void Engine::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    Work item = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    bool has_result = false;
    Result result;
    if (item.step.tokens.empty()) {
      item.filter.reset();
    } else {
      const int64_t start = thread_cpu_ns();
      has_result = true;
      result.request = item.request;
      result.proposal.start = item.step.start;
      result.proposal.end = item.step.start + static_cast<int64_t>(item.step.tokens.size());
      try {
        if (item.flip_fence) item.filter->flip_fence();
        result.proposal = item.filter->propose(std::move(item.step));
      } catch (const std::exception&) {
        // Out of memory, with the history half changed: this request proposes no more.
        item.filter->give_up();
      }
      result.cpu_ns = thread_cpu_ns() - start;
    }
    lock.lock();
    busy_ = false;
    if (has_result) {
      results_.push_back(std::move(result));
      num_ready_.store(results_.size(), std::memory_order_release);
    }
    if (queue_.empty()) done_.notify_all();
  }
}

}  // namespace reasoncache
