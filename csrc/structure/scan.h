// SPDX-License-Identifier: Apache-2.0
// Raw lexical tokens of mathematical text: SCANNER of scan.py by hand, in linear time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "text/text_arena.h"
#include "vocabulary_tables.h"

namespace reasoncache {

// One scanned piece; `start` and `end` are character offsets.
struct RawToken {
    tables::Raw group;
    const tables::Sign* sign;  // of an operator, else null
    std::u32string_view text;
    size_t start;
    size_t end;
};

// Cuts a text into raw tokens; spaces only separate them. What a token points
// to is in the text or in the arena.
class Scanner {
public:
    Scanner(std::u32string_view text, TextArena& arena) : text_(text), arena_(arena) {}

    // The next token, or false at the end.
    bool next(RawToken& token);

private:
    char32_t at(size_t pos) const { return pos < text_.size() ? text_[pos] : U'\0'; }
    bool is_decimal_at(size_t pos) const;
    bool is_word_at(size_t pos) const;
    size_t run_end(size_t pos, tables::Raw group) const;
    size_t number_end(size_t pos) const;
    size_t word_end(size_t pos) const;
    size_t long_operator_end() const;
    void scan_command(RawToken& token);
    bool scan_text_argument(std::u32string_view name, size_t pos, RawToken& token);

    std::u32string_view text_;
    TextArena& arena_;
    size_t pos_ = 0;
};

}  // namespace reasoncache
