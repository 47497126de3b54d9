// SPDX-License-Identifier: Apache-2.0
#include "filter/lexical.h"

#include <algorithm>
#include <cmath>

namespace reasoncache {
namespace {

// Similarities are averaged in units of 2^-40: a sum of integers does not depend
// on the order, so both engines find the same threshold.
constexpr double kMeanScale = 1099511627776.0;

}  // namespace

void LexicalIndex::add(Step&& step, const Bag& bag) {
  const auto row = static_cast<uint32_t>(rows_.size());
  rows_.push_back({step.norm_sq, step.num_chars});
  dots_.push_back(0);
  for (const auto& [token, count] : bag) postings_[token].push_back({row, count});
  steps_.push_back(std::move(step));
  if (steps_.size() > max_history_steps_) {
    steps_.pop_front();
    // Half of the rows are dead: cleaning up now costs O(1) a step.
    if (++dropped_ >= max_history_steps_) compact();
  }
}

std::vector<Candidate> LexicalIndex::candidates(const Step& step, const Bag& bag,
                                                const FilterConfig& config) {
  touched_.clear();
  for (const auto& [token, count] : bag) {
    const auto found = postings_.find(token);
    if (found == postings_.end()) continue;
    for (const Posting& posting : found->second) {
      if (posting.row < dropped_) continue;
      uint64_t& dot = dots_[posting.row];
      if (dot == 0) touched_.push_back(posting.row);
      dot += uint64_t{count} * posting.count;
    }
  }
  std::vector<Candidate> found;
  found.reserve(touched_.size());
  int64_t sum = 0;
  for (const uint32_t row : touched_) {
    const double sim = similarity(step, rows_[row], dots_[row]);
    dots_[row] = 0;
    sum += std::llrint(sim * kMeanScale);
    found.push_back({sim, row - dropped_});
  }
  double tau = config.fixed_tau;
  if (tau < 0) {
    const double mean = static_cast<double>(sum) / (static_cast<double>(size()) * kMeanScale);
    tau = config.strict - (config.strict - config.soft) * mean;
  }
  found.erase(std::remove_if(found.begin(), found.end(),
                             [tau](const Candidate& c) { return !(c.similarity > tau); }),
              found.end());
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return a.similarity != b.similarity ? a.similarity > b.similarity : a.index > b.index;
  });
  return found;
}

double LexicalIndex::similarity(const Step& step, const Row& row, uint64_t dot) const {
  // The product is an exact integer, so equal bags give exactly 1.
  double sim = static_cast<double>(dot) /
               std::sqrt(static_cast<double>(row.norm_sq) * static_cast<double>(step.norm_sq));
  if (length_factor_) {
    sim *= static_cast<double>(std::min(row.num_chars, step.num_chars));
    sim /= static_cast<double>(std::max(row.num_chars, step.num_chars));
  }
  return sim;
}

void LexicalIndex::compact() {
  const auto dropped = static_cast<uint32_t>(dropped_);
  for (auto entry = postings_.begin(); entry != postings_.end();) {
    std::vector<Posting>& list = entry->second;
    const auto live = std::find_if(list.begin(), list.end(),
                                   [dropped](const Posting& p) { return p.row >= dropped; });
    list.erase(list.begin(), live);
    if (list.empty()) {
      entry = postings_.erase(entry);
      continue;
    }
    for (Posting& posting : list) posting.row -= dropped;
    list.shrink_to_fit();
    ++entry;
  }
  rows_.erase(rows_.begin(), rows_.begin() + dropped);
  dots_.resize(rows_.size());
  dropped_ = 0;
}

}  // namespace reasoncache
