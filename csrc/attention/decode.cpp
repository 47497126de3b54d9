// SPDX-License-Identifier: Apache-2.0
// Paged decode attention: checks a call, divides it and hands it to the threads.

#include <algorithm>
#include <exception>

#include "attention.h"
#include "decode_worker.h"
#include "distance/distance.h"
#include "rotate.h"
#include "task.h"
#include "workers.h"

namespace reasoncache {
namespace attention {
namespace {

using Call = reasoncache_decode_call;

// Below this, waking a thread costs more than it saves.
constexpr std::int64_t kInlineBytes = 1 << 18;

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

template <class Element>
std::int32_t run(Task& task) {
  const reasoncache_kv& kv = task.kv;
  const std::int64_t threads = std::max(1, task.call.threads);
  const std::int64_t entries = task.divide(threads);
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
    Task task(*kv, *call);
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
