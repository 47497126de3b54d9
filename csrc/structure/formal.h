// SPDX-License-Identifier: Apache-2.0
// Which part of prose is formal: formal.py, which states the rules.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "structure/over_bound.h"
#include "structure/scan.h"
#include "structure/structure.h"
#include "structure/token.h"
#include "text/text_arena.h"

namespace reasoncache {

// Reads plain text; one reader may read many texts, its memory is used again.
class FormalReader {
public:
    FormalReader(const Limits& limits, TextArena& arena) : limits_(limits), arena_(arena) {}

    // Appends the parser tokens of `text`: formal ones, prose as separators.
    // `tokens` must be empty. Over max_nodes or max_depth (nested brackets).
    OverBound read(std::u32string_view text, Tokens& tokens);

private:
    // An opening bracket, and how many formal tokens stand before it.
    struct Bracket {
        size_t index;
        size_t num_formal;
    };

    bool scan(std::u32string_view text);
    bool is_formal(size_t i) const;
    bool is_formal_word(size_t i) const;
    bool is_formal_operator(size_t i) const;
    bool is_variable(size_t i) const;
    bool is_strong(size_t i) const;
    bool is_emphasis(size_t i) const;
    bool flag_brackets();

    Limits limits_;
    TextArena& arena_;
    std::vector<RawToken> raw_;  // with an edge at both ends
    std::vector<uint8_t> flags_;  // one for each of raw_: 1 where it is formal
    std::vector<Bracket> open_;
};

}  // namespace reasoncache
