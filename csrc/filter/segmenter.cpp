// SPDX-License-Identifier: Apache-2.0
#include "filter/segmenter.h"

#include <algorithm>

namespace reasoncache {
namespace {

bool contains(const std::vector<int32_t>& ids, int32_t token) {
  return std::find(ids.begin(), ids.end(), token) != ids.end();
}

}  // namespace

bool Segmenter::push(int32_t token, RawStep& step) {
  if (contains(markers_.end, token)) {
    inside_ = false;
    ++position_;
    return finish_open(step);
  }
  if (contains(markers_.start, token)) {
    inside_ = true;
    ++position_;
    return finish_open(step);
  }
  if (!inside_) {
    ++position_;
    return false;
  }
  const int64_t position = position_;
  const std::optional<Span> span = advance(token);
  position_ = position + 1;
  if (!span) {
    if (open_) tokens_.push_back(token);
    return false;
  }
  // A token that the step does not include starts the next one.
  const bool included = span->end > position;
  if (included) tokens_.push_back(token);
  step.start = span->start;
  step.tokens = std::move(tokens_);
  tokens_.clear();
  if (!included) tokens_.push_back(token);
  return true;
}

// The reasoning ends, or starts anew, before a blank line came.
bool Segmenter::finish_open(RawStep& step) {
  if (!open_) return false;
  finish(position_);
  step.start = start_;
  step.tokens = std::move(tokens_);
  tokens_.clear();
  return true;
}

std::optional<Span> Segmenter::advance(int32_t token) {
  const uint8_t flags = vocabulary_.classes_of(token);
  const int64_t end = position_ + 1;
  if (!open_) {
    if (flags & kBlank) return std::nullopt;
    open_ = true;
    start_ = position_;
    if (flags & kClosesWithBlankLine) return finish(end);
  } else if (flags) {
    const bool opens =
        (flags & kOpensWithBlankLine) || (pending_newline_ && (flags & kStartsNewline));
    if (opens && !(flags & (kBlank | kClosesWithBlankLine))) {
      const Span done{start_, position_};
      start_ = position_;
      pending_newline_ = flags & kEndsNewline;
      return done;
    }
    if (opens || (flags & kClosesWithBlankLine)) return finish(end);
  }
  if (flags & kEndsNewline) {
    pending_newline_ = true;
  } else if (!(flags & kBlank)) {
    pending_newline_ = false;
  }
  if (end - start_ >= max_step_tokens_) return finish(end);
  return std::nullopt;
}

std::optional<Span> Segmenter::finish(int64_t end) {
  open_ = false;
  pending_newline_ = false;
  return Span{start_, end};
}

}  // namespace reasoncache
