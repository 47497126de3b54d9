// SPDX-License-Identifier: Apache-2.0
#include "text/utf8.h"

namespace reasoncache {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

// How a lead byte goes on: the number of bytes after it (0: no lead byte) and
// what the second byte may be, which rules out overlong forms and surrogates.
struct Lead {
    uint8_t more;
    uint8_t low;
    uint8_t high;
};

Lead lead_of(uint8_t byte) {
    if (byte >= 0xC2 && byte <= 0xDF) return {1, 0x80, 0xBF};
    if (byte == 0xE0) return {2, 0xA0, 0xBF};
    if (byte == 0xED) return {2, 0x80, 0x9F};
    if (byte >= 0xE1 && byte <= 0xEF) return {2, 0x80, 0xBF};
    if (byte == 0xF0) return {3, 0x90, 0xBF};
    if (byte >= 0xF1 && byte <= 0xF3) return {3, 0x80, 0xBF};
    if (byte == 0xF4) return {3, 0x80, 0x8F};
    return {0, 0, 0};
}

}  // namespace

void decode_utf8(const uint8_t* data, size_t size, std::u32string& out) {
    size_t i = 0;
    while (i < size) {
        const uint8_t byte = data[i++];
        if (byte < 0x80) {
            out.push_back(byte);
            continue;
        }
        Lead lead = lead_of(byte);
        bool is_valid = lead.more > 0;
        char32_t c = lead.more > 0 ? byte & (0x3Fu >> lead.more) : 0;
        for (; is_valid && lead.more > 0; --lead.more) {
            // A byte that does not fit is not consumed: it may begin the next character.
            if (i == size || data[i] < lead.low || data[i] > lead.high) {
                is_valid = false;
            } else {
                c = (c << 6) | (data[i++] & 0x3Fu);
                lead.low = 0x80;
                lead.high = 0xBF;
            }
        }
        out.push_back(is_valid ? c : kReplacement);
    }
}

void encode_utf8(std::u32string_view text, std::string& out) {
    for (const char32_t c : text) {
        if (c < 0x80) {
            out.push_back(static_cast<char>(c));
            continue;
        }
        if (c < 0x800) {
            out.push_back(static_cast<char>(0xC0 | (c >> 6)));
        } else {
            if (c < 0x10000) {
                out.push_back(static_cast<char>(0xE0 | (c >> 12)));
            } else {
                out.push_back(static_cast<char>(0xF0 | (c >> 18)));
                out.push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3F)));
            }
            out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
        }
        out.push_back(static_cast<char>(0x80 | (c & 0x3F)));
    }
}

}  // namespace reasoncache
