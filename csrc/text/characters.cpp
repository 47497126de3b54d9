// SPDX-License-Identifier: Apache-2.0
#include "text/characters.h"

namespace reasoncache {

bool is_upper(std::u32string_view text) {
    bool found = false;
    for (const char32_t c : text) {
        const uint8_t classes = character_classes(c);
        // One character is upper case or not, whatever else it may be.
        if ((classes & unicode::kLowerOrTitle) != 0 && text.size() > 1) return false;
        found = found || (classes & unicode::kUpper) != 0;
    }
    return found;
}

std::u32string_view strip(std::u32string_view text) {
    while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
    while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
    return text;
}

}  // namespace reasoncache
