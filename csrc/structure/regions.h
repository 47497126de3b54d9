// SPDX-License-Identifier: Apache-2.0
// The split of a step in plain text, LaTeX and code: regions() of scan.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace reasoncache {

enum class RegionKind : uint8_t { kPlain, kLatex, kCode };

struct Region {
    RegionKind kind;
    std::u32string_view text;
};

// Gives the regions one after the other, so that a reader who has reached a
// bound saves the rest. No region is empty. Linear in the characters.
class Regions {
public:
    // `in_code`: the step begins inside a fence.
    Regions(std::u32string_view text, bool in_code) : text_(text), in_code_(in_code) {}

    // The next region, or false at the end.
    bool next(Region& region);

private:
    static constexpr size_t kNone = std::u32string_view::npos;
    static constexpr size_t kNumOpeners = 6;

    bool next_span(Region& region);
    size_t find_opener(size_t pos, size_t& opener) const;
    size_t find_closer(size_t opener, size_t pos);
    bool is_span(size_t opener, size_t start, size_t stop) const;

    std::u32string_view text_;
    bool in_code_;
    size_t plain_start_ = 0;
    size_t pos_ = 0;
    // A span waits here while the plain text before it is handed out.
    Region waiting_{RegionKind::kPlain, {}};
    // Closers known to be missing from here on: searching again for every
    // opener would make hostile text quadratic.
    bool is_missing_[kNumOpeners] = {};
};

}  // namespace reasoncache
