// SPDX-License-Identifier: Apache-2.0
// Search in the generated tables, which are sorted by (length, spelling).
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>

#include "vocabulary_tables.h"

namespace reasoncache::tables {

inline bool comes_before(std::u32string_view a, std::u32string_view b) {
    return a.size() != b.size() ? a.size() < b.size() : a < b;
}

template <size_t N>
bool contains(const std::u32string_view (&words)[N], std::u32string_view word) {
    // Most words of prose are longer than any in the table.
    if (word.size() > words[N - 1].size()) return false;
    const auto* const found =
        std::lower_bound(std::begin(words), std::end(words), word, comes_before);
    return found != std::end(words) && *found == word;
}

// The sign spelled so, or null.
inline const Sign* find_sign(std::u32string_view spelling) {
    const auto* const found = std::lower_bound(
        std::begin(kSigns), std::end(kSigns), spelling,
        [](const Sign& sign, std::u32string_view key) { return comes_before(sign.spelling, key); });
    return found != std::end(kSigns) && found->spelling == spelling ? found : nullptr;
}

// The command of that name, without its backslash, or null.
inline const Command* find_command(std::u32string_view name) {
    const auto* const found = std::lower_bound(
        std::begin(kCommands), std::end(kCommands), name,
        [](const Command& command, std::u32string_view key) {
            return comes_before(command.name, key);
        });
    return found != std::end(kCommands) && found->name == name ? found : nullptr;
}

// Which group of the scanner a character starts.
inline Raw first_group(char32_t c) {
    if (c > 0x10FFFF) return Raw::kOther;
    return static_cast<Raw>(kFirstPages[kFirstPageOf[c >> 8]][c & 0xFF]);
}

// x² is x^2: the plain character of a superscript or subscript.
inline char32_t plain_of_script(char32_t c) {
    const auto* const found =
        std::lower_bound(std::begin(kScriptCharacters), std::end(kScriptCharacters), c,
                         [](const Pair& pair, char32_t key) { return pair.from < key; });
    return found != std::end(kScriptCharacters) && found->from == c ? found->to : c;
}

}  // namespace reasoncache::tables
