// SPDX-License-Identifier: Apache-2.0
// Character classes, each exactly what the Python interpreter that built this
// library calls so: the tables come from its own str methods and `re` module.
#pragma once

#include <cstdint>
#include <string_view>

#include "unicode_tables.h"

namespace reasoncache {

// All classes of one character; values of unicode::CharacterClass, or-ed.
inline uint8_t character_classes(char32_t c) {
    if (c > 0x10FFFF) return 0;
    return unicode::kPages[unicode::kPageOf[c >> 8]][c & 0xFF];
}

inline bool has_class(char32_t c, uint8_t classes) { return (character_classes(c) & classes) != 0; }

// `\s` of re, str.isspace.
inline bool is_space(char32_t c) { return has_class(c, unicode::kSpace); }
// `\w` of re.
inline bool is_word(char32_t c) { return has_class(c, unicode::kWord); }
// `\d` of re.
inline bool is_decimal(char32_t c) { return has_class(c, unicode::kDecimal); }
// str.isdigit of one character.
inline bool is_digit(char32_t c) { return has_class(c, unicode::kDigit); }
// `[^\W\d_]` of re.
inline bool is_letter(char32_t c) { return has_class(c, unicode::kLetter); }
// str.isupper of one character.
inline bool is_upper(char32_t c) { return has_class(c, unicode::kUpper); }
// Lower or title case: one such character makes str.isupper of a text false.
inline bool is_lower_or_title(char32_t c) { return has_class(c, unicode::kLowerOrTitle); }

// str.isupper of a whole text.
bool is_upper(std::u32string_view text);

// str.strip() without arguments.
std::u32string_view strip(std::u32string_view text);

}  // namespace reasoncache
