// SPDX-License-Identifier: Apache-2.0
#include "filter/step_filter.h"

#include <algorithm>

#include "text/characters.h"
#include "text/utf8.h"

namespace reasoncache {

Proposal StepFilter::propose(RawStep&& raw) {
  Proposal proposal;
  proposal.start = raw.start;
  proposal.end = raw.start + static_cast<int64_t>(raw.tokens.size());
  if (gave_up_) return proposal;
  Bag bag;
  Step step = build(std::move(raw), bag);
  if (history_.size() > 0) {
    Counters& counters = proposal.counters;
    counters.steps_compared = 1;
    std::vector<Candidate> found = history_.candidates(step, bag, config_);
    counters.candidates = static_cast<uint32_t>(found.size());
    counters.steps_with_candidates = !found.empty();
    if (found.size() > config_.max_structure_checks) {
      counters.dropped_excess =
          static_cast<uint32_t>(found.size() - config_.max_structure_checks);
      found.resize(config_.max_structure_checks);
    }
    align(step, found, proposal);
    counters.pairs = static_cast<uint32_t>(proposal.pairs.size());
    counters.steps_with_pairs = !proposal.pairs.empty();
  }
  history_.add(std::move(step), bag);
  return proposal;
}

Step StepFilter::build(RawStep&& raw, Bag& bag) {
  Step step;
  step.start = raw.start;
  step.tokens = std::move(raw.tokens);
  step.tokens.shrink_to_fit();
  size_t in_bag = step.tokens.size();
  while (in_bag > 0 && (vocabulary_.classes_of(step.tokens[in_bag - 1]) & kBlank)) --in_bag;
  std::vector<int32_t> sorted(step.tokens.begin(), step.tokens.begin() + in_bag);
  std::sort(sorted.begin(), sorted.end());
  for (const int32_t token : sorted) {
    if (bag.empty() || bag.back().first != token) {
      bag.emplace_back(token, 1);
    } else {
      ++bag.back().second;
    }
  }
  for (const auto& entry : bag) step.norm_sq += uint64_t{entry.second} * entry.second;
  decode(step.tokens);
  step.num_chars = std::max<uint64_t>(1, strip(text_).size());
  step.in_code = in_code_;
  in_code_ = leaves_fence_open(text_, in_code_);
  return step;
}

void StepFilter::align(Step& step, const std::vector<Candidate>& candidates, Proposal& proposal) {
  std::vector<uint8_t> covered(step.tokens.size(), 0);
  size_t uncovered = covered.size();
  uint32_t num_used = 0;
  std::vector<BlockPair> found;
  for (size_t rank = 0; rank < candidates.size(); ++rank) {
    const size_t room = config_.max_blocks_per_step - proposal.pairs.size();
    if (num_used == config_.max_candidates || room == 0 || uncovered < config_.block) {
      proposal.counters.dropped_excess += static_cast<uint32_t>(candidates.size() - rank);
      break;
    }
    Step& earlier = history_[candidates[rank].index];
    if (config_.use_structure && !passes(step, earlier, proposal.counters)) continue;
    ++num_used;
    found.clear();
    align_blocks(step, earlier, config_, covered, room, found);
    for (const BlockPair& pair : found) {
      proposal.pairs.push_back({pair.dst_start, pair.src_start, candidates[rank].similarity});
      const auto at = covered.begin() + (pair.dst_start - step.start);
      std::fill(at, at + config_.block, uint8_t{1});
      uncovered -= config_.block;
    }
  }
  std::sort(proposal.pairs.begin(), proposal.pairs.end(),
            [](const Pair& a, const Pair& b) { return a.dst_start < b.dst_start; });
}

bool StepFilter::passes(Step& step, Step& earlier, Counters& counters) {
  const Signature& a = signature(step, counters);
  const Signature& b = signature(earlier, counters);
  if (a.kind == SignatureKind::kOverBound || b.kind == SignatureKind::kOverBound) {
    ++counters.dropped_over_bound;
    return false;
  }
  if (a.kind == SignatureKind::kProse || b.kind == SignatureKind::kProse ||
      a.canonical == b.canonical) {
    return true;
  }
  ++counters.dropped_structure;
  return false;
}

const Signature& StepFilter::signature(Step& step, Counters& counters) {
  if (!step.signature) {
    decode(step.tokens);
    const Limits limits{config_.max_chars, config_.max_depth, config_.max_nodes};
    step.signature = read_signature(text_, limits, step.in_code);
    step.signature->canonical.shrink_to_fit();
    counters.over_bound += step.signature->kind == SignatureKind::kOverBound;
  }
  return *step.signature;
}

void StepFilter::decode(const std::vector<int32_t>& tokens) {
  bytes_.clear();
  for (const int32_t token : tokens) vocabulary_.append_bytes(token, bytes_);
  text_.clear();
  decode_utf8(reinterpret_cast<const uint8_t*>(bytes_.data()), bytes_.size(), text_);
}

}  // namespace reasoncache
