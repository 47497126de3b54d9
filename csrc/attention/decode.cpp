// SPDX-License-Identifier: Apache-2.0
// Paged decode attention: every key and value is read once for all query heads that share it.
//
// A query's entries are cut into chunks of fixed size, each with a softmax of its own; partial
// results are merged by their maxima in the order of the chunks. Neither the cut nor the order
// depends on the threads, so neither do the bits.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <memory>
#include <vector>

#include "attention.h"
#include "distance/distance.h"
#include "rotate.h"
#include "tile.h"
#include "weights.h"
#include "workers.h"

namespace reasoncache {
namespace attention {
namespace {

using Call = reasoncache_decode_call;

constexpr std::int64_t kChunk = 512;  // entries
// Below this, waking a thread costs more than it saves.
constexpr std::int64_t kInlineBytes = 1 << 18;
constexpr std::int64_t kUnitsPerThread = 4;

// One chunk of one query under some of the KV heads.
struct Unit {
  std::int64_t query;
  std::int64_t begin;  // entries
  std::int64_t end;
  std::int64_t first_head;  // KV heads
  std::int64_t last_head;
  std::int64_t partial;  // where the result goes, below 0: straight out
};

struct Task {
  const reasoncache_kv& kv;
  const Call& call;
  std::int64_t group;     // query heads of a KV head
  std::int64_t k_padded;  // dims rounded up to whole vectors
  std::int64_t v_padded;
  Weights weights;
  std::vector<Unit> units{};
  std::vector<std::int64_t> first_partial{};  // [batch + 1]
  std::vector<float> partials{};              // [num_partials][num_heads][2 + v_padded]
  std::unique_ptr<std::atomic<std::int64_t>[]> left{};  // [batch], units not done yet
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};

  float* partial(std::int64_t index, std::int64_t head) {
    return partials.data() + (index * call.num_heads + head) * (2 + v_padded);
  }
};

template <class Q>
void read_query_as(const Task& task, std::int64_t offset, float* to) {
  const Q* from = static_cast<const Q*>(task.call.query) + offset;
  for (std::int64_t i = 0; i < task.kv.k_dim; ++i) to[i] = get(from + i) * task.call.scale;
}

void read_query(const Task& task, std::int64_t row, std::int64_t head, float* to) {
  const std::int64_t offset = row * task.call.q_row_stride + head * task.call.q_head_stride;
  switch (task.call.element) {
    case REASONCACHE_FLOAT32:
      read_query_as<float>(task, offset, to);
      break;
    case REASONCACHE_BFLOAT16:
      read_query_as<Bfloat16>(task, offset, to);
      break;
    default:
      read_query_as<Float16>(task, offset, to);
  }
  std::fill(to + task.kv.k_dim, to + task.k_padded, 0.0f);
}

template <class Q>
void write_sums_as(const Task& task, std::int64_t offset, const float* sums, float factor) {
  Q* to = static_cast<Q*>(task.call.out) + offset;
  for (std::int64_t i = 0; i < task.kv.v_dim; ++i) put(to + i, sums[i] * factor);
}

// Weighted sum of values to output: the sink only takes weight away.
void write_out(Task& task, std::int64_t row, std::int64_t head, float most, float total,
               const float* sums) {
  float weight = 1.0f;
  if (task.call.sinks != nullptr) {
    const float sink = task.call.sinks[head];
    const float top = std::max(most, sink);
    weight = most == top ? 1.0f : std::exp(most - top);
    total = total * weight + std::exp(sink - top);
    most = top;
  }
  const float factor = total == 0 ? 0.0f : weight / total;
  const std::int64_t offset = row * task.call.out_row_stride + head * task.call.out_head_stride;
  switch (task.call.element) {
    case REASONCACHE_FLOAT32:
      write_sums_as<float>(task, offset, sums, factor);
      break;
    case REASONCACHE_BFLOAT16:
      write_sums_as<Bfloat16>(task, offset, sums, factor);
      break;
    default:
      write_sums_as<Float16>(task, offset, sums, factor);
  }
  if (task.call.lse != nullptr) {
    task.call.lse[row * task.call.num_heads + head] = most + std::log(total);
  }
  if (task.weights.wanted()) task.weights.set_lse(row, head, most + std::log(total));
}

template <class Element>
class Worker {
 public:
  explicit Worker(Task& task)
      : task_(task),
        kv_(task.kv),
        query_(static_cast<std::size_t>(task.call.num_heads * task.k_padded)),
        turned_(static_cast<std::size_t>(kMostHeads * task.k_padded)),
        sums_(static_cast<std::size_t>(task.call.num_heads * task.v_padded)),
        most_(static_cast<std::size_t>(task.call.num_heads)),
        total_(most_.size()) {}

  void work() {
    const auto size = static_cast<std::int64_t>(task_.units.size());
    for (std::int64_t i; (i = task_.next.fetch_add(1, std::memory_order_relaxed)) < size;) {
      run(task_.units[static_cast<std::size_t>(i)]);
    }
  }

 private:
  void run(const Unit& unit) {
    const std::int64_t first = unit.first_head * task_.group;
    const std::int64_t last = unit.last_head * task_.group;
    for (std::int64_t head = first; head < last; ++head) {
      read_query(task_, unit.query, head, query(head));
      std::fill(sums(head), sums(head) + task_.v_padded, 0.0f);
      most_[static_cast<std::size_t>(head)] = -kInfinity;
      total_[static_cast<std::size_t>(head)] = 0;
    }
    for (std::int64_t at = unit.begin; at < unit.end; at += kTile) {
      const std::int64_t end = std::min<std::int64_t>(at + kTile, unit.end);
      for (std::int64_t head = unit.first_head; head < unit.last_head; ++head) {
        // What comes after: the same entries under the next head, or the next entries.
        const bool same = head + 1 < unit.last_head;
        const std::int64_t next = same ? at : end;
        const std::int64_t next_end = same ? end : std::min<std::int64_t>(end + kTile, unit.end);
        tile(unit.query, at, end, head, next, next_end, same ? head + 1 : unit.first_head);
      }
    }
    finish(unit, first, last);
  }

  void tile(std::int64_t query, std::int64_t at, std::int64_t end, std::int64_t kv_head,
            std::int64_t next, std::int64_t next_end, std::int64_t next_head) {
    const int count = static_cast<int>(end - at);
    rows(kv_.keys, kv_.k_slot_stride, kv_head * kv_.k_head_stride, at, end, keys_);
    rows(kv_.values, kv_.v_slot_stride, kv_head * kv_.v_head_stride, at, end, values_);
    rows(kv_.keys, kv_.k_slot_stride, next_head * kv_.k_head_stride, next, next_end, next_);
    Ahead<Element> values{values_, count, bytes(kv_.v_dim)};
    Ahead<Element> keys{next_, static_cast<int>(next_end - next), bytes(kv_.k_dim)};
    std::int64_t head = kv_head * task_.group;
    const std::int64_t last = head + task_.group;
    const auto heads = [&](auto number) {
      constexpr int kHeads = decltype(number)::value;
      if constexpr (kHeads <= kMostHeads) {
        for (; head + kHeads <= last; head += kHeads) {
          under<kHeads>(query, at, count, head, values, keys);
          values.count = keys.count = 0;
        }
      }
    };
    heads(std::integral_constant<int, 8>{});
    heads(std::integral_constant<int, 4>{});
    heads(std::integral_constant<int, 2>{});
    heads(std::integral_constant<int, 1>{});
  }

  // One tile under kHeads query heads from `head` on.
  template <int kHeads>
  void under(std::int64_t row, std::int64_t at, int count, std::int64_t head,
             const Ahead<Element>& values, const Ahead<Element>& keys) {
    const std::int32_t* shift = task_.call.shift == nullptr ? nullptr : task_.call.shift + at;
    for (int begin = 0, end; begin < count; begin = end) {
      end = shift == nullptr ? count : begin + 1;
      while (end < count && shift[end] == shift[begin]) ++end;
      const float* query = this->query(head);
      if (shift != nullptr && shift[begin] != 0) {
        query = turned<kHeads>(head, shift[begin]);
      }
      scores_of<Element, kHeads>(keys_ + begin, end - begin, values, begin, query, kv_.k_dim,
                                 task_.k_padded, scores_ + begin * kHeads);
    }
    if (task_.weights.wanted()) task_.weights.template keep<kHeads>(row, at, count, head, scores_);
    Softmax<kHeads> softmax;
    std::copy_n(&most_[static_cast<std::size_t>(head)], kHeads, softmax.most);
    std::copy_n(&total_[static_cast<std::size_t>(head)], kHeads, softmax.total);
    softmax.weigh(scores_, count, task_.call.logit_cap);
    add_values<Element, kHeads>(values_, count, keys, scores_, softmax.decay, kv_.v_dim,
                                task_.v_padded, sums(head));
    std::copy_n(softmax.most, kHeads, &most_[static_cast<std::size_t>(head)]);
    std::copy_n(softmax.total, kHeads, &total_[static_cast<std::size_t>(head)]);
  }

  // A key turned by the shift under the query is the key under the query turned back.
  template <int kHeads>
  const float* turned(std::int64_t head, std::int32_t shift) {
    std::copy_n(query(head), kHeads * task_.k_padded, turned_.data());
    for (int i = 0; i < kHeads; ++i) rotate(kv_, shift, true, turned_.data() + i * task_.k_padded);
    return turned_.data();
  }

  void finish(const Unit& unit, std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) {
      const float most = most_[static_cast<std::size_t>(head)];
      const float total = total_[static_cast<std::size_t>(head)];
      if (unit.partial < 0) {
        write_out(task_, unit.query, head, most, total, sums(head));
        continue;
      }
      float* to = task_.partial(unit.partial, head);
      to[0] = most;
      to[1] = total;
      std::copy_n(sums(head), task_.v_padded, to + 2);
    }
    if (unit.partial < 0 && !task_.weights.wanted()) return;
    auto& left = task_.left[static_cast<std::size_t>(unit.query)];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    if (unit.partial >= 0) merge(unit.query);
    if (task_.weights.wanted()) task_.weights.add_up(unit.query);
  }

  void merge(std::int64_t row) {
    const std::int64_t begin = task_.first_partial[static_cast<std::size_t>(row)];
    const std::int64_t end = task_.first_partial[static_cast<std::size_t>(row) + 1];
    for (std::int64_t head = 0; head < task_.call.num_heads; ++head) {
      float* into = task_.partial(begin, head);
      for (std::int64_t i = begin + 1; i < end; ++i) {
        const float* from = task_.partial(i, head);
        const float top = std::max(into[0], from[0]);
        const float own = into[0] == top ? 1.0f : std::exp(into[0] - top);
        const float other = from[0] == top ? 1.0f : std::exp(from[0] - top);
        into[0] = top;
        for (std::int64_t j = 1; j < 2 + task_.v_padded; ++j) {
          into[j] = into[j] * own + from[j] * other;
        }
      }
      write_out(task_, row, head, into[0], into[1], into + 2);
    }
  }

  void rows(const void* base, std::int64_t slot_stride, std::int64_t offset, std::int64_t begin,
            std::int64_t end, const Element** to) const {
    const Element* from = static_cast<const Element*>(base) + offset;
    for (std::int64_t i = begin; i < end; ++i) {
      to[i - begin] = from + task_.call.kv_indices[i] * slot_stride;
    }
  }

  static std::int64_t bytes(std::int64_t dim) {
    return dim * static_cast<std::int64_t>(sizeof(Element));
  }

  float* query(std::int64_t head) { return query_.data() + head * task_.k_padded; }
  float* sums(std::int64_t head) { return sums_.data() + head * task_.v_padded; }

  Task& task_;
  const reasoncache_kv& kv_;
  std::vector<float> query_;   // [num_heads][k_padded], scaled
  std::vector<float> turned_;  // [kMostHeads][k_padded]
  std::vector<float> sums_;    // [num_heads][v_padded]
  std::vector<float> most_;    // [num_heads]
  std::vector<float> total_;   // [num_heads]
  const Element* keys_[kTile];
  const Element* values_[kTile];
  const Element* next_[kTile];
  float scores_[kTile * kMostHeads + kLanes];
};

std::int32_t check(const reasoncache_kv& kv, const Call& call) {
  const bool fits = kv.num_heads > 0 && call.num_heads > 0 && call.num_heads % kv.num_heads == 0 &&
                    kv.k_dim > 0 && kv.v_dim > 0 && kv.rotary_dim <= kv.k_dim &&
                    call.element >= REASONCACHE_FLOAT32 && call.element <= REASONCACHE_FLOAT16;
  if (!fits) return REASONCACHE_ATTENTION_BAD_CALL;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    if (call.begin[b] < 0 || call.end[b] < call.begin[b] || call.end[b] > call.total) {
      return REASONCACHE_ATTENTION_BAD_RANGE;
    }
  }
  if (!in_pool(kv, call.kv_indices, call.total)) return REASONCACHE_ATTENTION_BAD_SLOT;
  if (call.shift != nullptr && !in_table(kv, call.shift, call.total)) {
    return REASONCACHE_ATTENTION_BAD_SHIFT;
  }
  return REASONCACHE_ATTENTION_OK;
}

std::int64_t whole_vectors(std::int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// Fills in the units; returns how many entries they read.
std::int64_t divide(Task& task, std::int64_t threads) {
  const Call& call = task.call;
  task.first_partial.resize(static_cast<std::size_t>(call.batch) + 1);
  task.left = std::make_unique<std::atomic<std::int64_t>[]>(static_cast<std::size_t>(call.batch));
  std::int64_t entries = 0;
  std::int64_t chunks = 0;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t count = call.end[b] - call.begin[b];
    entries += count;
    chunks += std::max<std::int64_t>(1, (count + kChunk - 1) / kChunk);
  }
  std::int64_t parts = 1;
  if (threads > 1 && chunks < threads * kUnitsPerThread) {
    parts = std::min(task.kv.num_heads, (threads * kUnitsPerThread + chunks - 1) / chunks);
  }
  task.units.reserve(static_cast<std::size_t>(chunks * parts));
  std::int64_t partials = 0;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t count = call.end[b] - call.begin[b];
    const std::int64_t here = std::max<std::int64_t>(1, (count + kChunk - 1) / kChunk);
    task.first_partial[static_cast<std::size_t>(b)] = partials;
    for (std::int64_t chunk = 0; chunk < here; ++chunk) {
      const std::int64_t begin = call.begin[b] + chunk * kChunk;
      const std::int64_t end = std::min<std::int64_t>(begin + kChunk, call.end[b]);
      for (std::int64_t part = 0; part < parts; ++part) {
        task.units.push_back({b, begin, end, part * task.kv.num_heads / parts,
                              (part + 1) * task.kv.num_heads / parts,
                              here > 1 ? partials + chunk : -1});
      }
    }
    task.left[static_cast<std::size_t>(b)].store(here * parts, std::memory_order_relaxed);
    if (here > 1) partials += here;
  }
  task.first_partial[static_cast<std::size_t>(call.batch)] = partials;
  task.partials.resize(static_cast<std::size_t>(partials * call.num_heads * (2 + task.v_padded)));
  return entries;
}

template <class Element>
std::int32_t run(Task& task) {
  const reasoncache_kv& kv = task.kv;
  const std::int64_t threads = std::max(1, task.call.threads);
  const std::int64_t entries = divide(task, threads);
  const std::int64_t size =
      entries * kv.num_heads * (kv.k_dim + kv.v_dim) * static_cast<std::int64_t>(sizeof(Element));
  const auto work = [](void* context) {
    auto& shared = *static_cast<Task*>(context);
    try {
      Worker<Element>(shared).work();
    } catch (const std::exception&) {
      shared.failed.store(true);
    }
  };
  if (threads < 2 || size < kInlineBytes || task.units.size() < 2) {
    work(&task);
  } else {
    Workers::get().run(static_cast<int>(threads - 1), work, &task);
  }
  return task.failed ? REASONCACHE_ATTENTION_NO_MEMORY : REASONCACHE_ATTENTION_OK;
}

}  // namespace
}  // namespace attention
}  // namespace reasoncache

extern "C" std::int32_t reasoncache_decode(const reasoncache_kv* kv,
                                           const reasoncache_decode_call* call) noexcept {
  using namespace reasoncache::attention;
  const std::int32_t status = check(*kv, *call);
  if (status != REASONCACHE_ATTENTION_OK || call->batch == 0) return status;
  try {
    Task task{*kv, *call, call->num_heads / kv->num_heads, whole_vectors(kv->k_dim),
              whole_vectors(kv->v_dim),
              Weights{call->weights, call->begin, call->end, call->batch, call->num_heads,
                      call->logit_cap}};
    switch (kv->element) {
      case REASONCACHE_FLOAT32:
        return run<float>(task);
      case REASONCACHE_BFLOAT16:
        return run<Bfloat16>(task);
      case REASONCACHE_FLOAT16:
        return run<Float16>(task);
      case REASONCACHE_FLOAT8_E4M3FN:
        return run<reasoncache::distance::Float8E4M3>(task);
      case REASONCACHE_FLOAT8_E5M2:
        return run<reasoncache::distance::Float8E5M2>(task);
      default:
        return REASONCACHE_ATTENTION_BAD_CALL;
    }
  } catch (const std::exception&) {
    return REASONCACHE_ATTENTION_NO_MEMORY;
  }
}
