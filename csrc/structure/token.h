// SPDX-License-Identifier: Apache-2.0
// Parser tokens: one spelling for each sign.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "vocabulary_tables.h"

namespace reasoncache {

struct Token {
    tables::Kind kind;
    // Binding strength of an operator (0: not one of a chain); for a command,
    // how many braced arguments it has.
    uint8_t number;
    std::u32string_view text;
    std::u32string_view prefix_label;  // of an operator that can be a prefix, else empty
};

using Tokens = std::vector<Token>;

constexpr Token token(tables::Kind kind, std::u32string_view text) { return {kind, 0, text, {}}; }

inline Token operator_token(const tables::Sign& sign) {
    return {tables::Kind::kOperator, sign.level, sign.label, sign.prefix_label};
}

// Comma, row mark, or prose between two formal parts.
inline constexpr std::u32string_view kSeparatorText = U",";
// Mark of a column in a LaTeX table; a separator unless it aligns a relation.
inline constexpr std::u32string_view kColumnText = U"&";

inline bool is_separator(const Token& token, std::u32string_view text) {
    return token.kind == tables::Kind::kSeparator && token.text == text;
}

}  // namespace reasoncache
