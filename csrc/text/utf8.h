// SPDX-License-Identifier: Apache-2.0
// UTF-8 to code points and back, with Python's treatment of invalid bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace reasoncache {

// Appends the characters of `data` to `out`, as bytes.decode("utf-8", "replace"):
// each maximal invalid part, surrogates and overlong forms included, becomes
// one U+FFFD. Linear. Throws std::bad_alloc only.
void decode_utf8(const uint8_t* data, size_t size, std::u32string& out);

// Appends `text` to `out` as UTF-8. Characters must be Unicode scalar values,
// which is what decode_utf8 gives. Linear. Throws std::bad_alloc only.
void encode_utf8(std::u32string_view text, std::string& out);

}  // namespace reasoncache
