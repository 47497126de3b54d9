// SPDX-License-Identifier: Apache-2.0
#include "structure/regions.h"

#include <algorithm>

#include "structure/structure.h"
#include "text/characters.h"

namespace reasoncache {
namespace {

constexpr std::u32string_view kFence = U"```";

struct Delimiter {
    std::u32string_view opener;
    std::u32string_view closer;
    RegionKind kind;
};

// In the order in which they are tried.
constexpr size_t kFenceIndex = 0;
constexpr size_t kBacktickIndex = 1;
constexpr size_t kDollarIndex = 5;
constexpr Delimiter kDelimiters[] = {
    {kFence, kFence, RegionKind::kCode},        {U"`", U"`", RegionKind::kCode},
    {U"\\[", U"\\]", RegionKind::kLatex}, {U"\\(", U"\\)", RegionKind::kLatex},
    {U"$$", U"$$", RegionKind::kLatex},         {U"$", U"$", RegionKind::kLatex},
};

// The info string ("python") is not part of the code.
std::u32string_view without_info(std::u32string_view inside) {
    const size_t newline = inside.find(U'\n');
    if (newline == std::u32string_view::npos) return inside;
    const std::u32string_view line = inside.substr(0, newline);
    const size_t first = line.find_first_not_of(U" \t\r");
    if (first == std::u32string_view::npos) return inside.substr(newline + 1);
    const size_t last = line.find_last_not_of(U" \t\r");
    const bool is_info = std::find(line.begin() + first, line.begin() + last, U' ') ==
                         line.begin() + last;
    return is_info ? inside.substr(newline + 1) : inside;
}

}  // namespace

bool leaves_fence_open(std::u32string_view text, bool in_code) {
    for (size_t pos = text.find(kFence); pos != std::u32string_view::npos;
         pos = text.find(kFence, pos + kFence.size())) {
        in_code = !in_code;
    }
    return in_code;
}

bool Regions::next(Region& region) {
    if (!waiting_.text.empty()) {
        region = waiting_;
        waiting_.text = {};
        return true;
    }
    if (in_code_) {
        in_code_ = false;
        const size_t stop = std::min(text_.find(kFence), text_.size());
        plain_start_ = pos_ = stop + kFence.size();
        if (stop > 0) {
            region = {RegionKind::kCode, text_.substr(0, stop)};
            return true;
        }
    }
    if (next_span(region)) return true;
    if (plain_start_ >= text_.size()) return false;
    region = {RegionKind::kPlain, text_.substr(plain_start_)};
    plain_start_ = pos_ = text_.size();
    return true;
}

// The next delimited span, or the plain text before it; false where only plain text is left.
bool Regions::next_span(Region& region) {
    size_t opener = 0;
    for (size_t start = find_opener(pos_, opener); start != kNone;
         start = find_opener(pos_, opener)) {
        const Delimiter& delimiter = kDelimiters[opener];
        pos_ = start + delimiter.opener.size();
        size_t stop = find_closer(opener, pos_);
        if (stop == kNone) {
            if (opener != kFenceIndex) continue;
            stop = text_.size();
        }
        if (!is_span(opener, pos_, stop)) continue;
        std::u32string_view inside = text_.substr(pos_, stop - pos_);
        if (opener == kFenceIndex) inside = without_info(inside);
        const std::u32string_view before = text_.substr(plain_start_, start - plain_start_);
        plain_start_ = pos_ = stop + delimiter.closer.size();
        if (!before.empty()) {
            region = {RegionKind::kPlain, before};
            waiting_ = {delimiter.kind, inside};
            return true;
        }
        if (!inside.empty()) {
            region = {delimiter.kind, inside};
            return true;
        }
    }
    return false;
}

// Start of the next opener at or behind `pos`, and which.
size_t Regions::find_opener(size_t pos, size_t& opener) const {
    for (; pos < text_.size(); ++pos) {
        const char32_t c = text_[pos];
        if (c != U'`' && c != U'\\' && c != U'$') continue;
        for (opener = 0; opener < kNumOpeners; ++opener) {
            const std::u32string_view spelling = kDelimiters[opener].opener;
            if (text_.substr(pos, spelling.size()) == spelling) return pos;
        }
    }
    return kNone;
}

size_t Regions::find_closer(size_t opener, size_t pos) {
    if (is_missing_[opener]) return kNone;
    const size_t stop = text_.find(kDelimiters[opener].closer, pos);
    is_missing_[opener] = stop == kNone;
    return stop;
}

// Tells inline code and $x$ from stray back-ticks and amounts of money.
bool Regions::is_span(size_t opener, size_t start, size_t stop) const {
    if (opener != kBacktickIndex && opener != kDollarIndex) return true;
    const std::u32string_view inside = text_.substr(start, stop - start);
    if (inside.empty() || inside.find(U'\n') != kNone) return false;
    if (opener == kBacktickIndex) return true;
    // Pandoc's rule: no space inside the dollars, no digit after the second.
    if (is_space(inside.front()) || is_space(inside.back())) return false;
    return stop + 1 >= text_.size() || !is_digit(text_[stop + 1]);
}

}  // namespace reasoncache
