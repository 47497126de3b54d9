// SPDX-License-Identifier: Apache-2.0
// Plain C functions for the tests, called through ctypes. No exception leaves them.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "structure/structure.h"
#include "text/characters.h"
#include "text/utf8.h"

#define REASONCACHE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Results below 0 of the functions that can fail.
constexpr int32_t kOutOfMemory = -1;
constexpr int32_t kTooSmall = -2;

// Copies what fits; `size` is told in full either way.
template <typename Text, typename Unit>
int32_t give(const Text& text, Unit* out, size_t capacity, size_t* size) {
    *size = text.size();
    if (text.size() > capacity) return kTooSmall;
    if (!text.empty()) std::memcpy(out, text.data(), text.size() * sizeof(Unit));
    return 0;
}

}  // namespace

// Kind of the signature of a step, or below 0. `out` gets the serialised trees
// of a formal step, the name of the bound of one over it, and else nothing.
REASONCACHE_EXPORT int32_t reasoncache_structure(const uint8_t* utf8, size_t size,
                                                 uint32_t max_chars, uint32_t max_depth,
                                                 uint32_t max_nodes, int32_t in_code, uint8_t* out,
                                                 size_t capacity, size_t* out_size) {
    try {
        std::u32string text;
        text.reserve(size);
        reasoncache::decode_utf8(utf8, size, text);
        const reasoncache::Signature found =
            reasoncache::read_signature(text, {max_chars, max_depth, max_nodes}, in_code != 0);
        const bool is_over = found.kind == reasoncache::SignatureKind::kOverBound;
        const int32_t given = give(is_over ? std::string(found.bound) : found.canonical, out,
                                   capacity, out_size);
        return given < 0 ? given : static_cast<int32_t>(found.kind);
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
}

// Whether a code fence is open after the text: 0, 1, or below 0.
REASONCACHE_EXPORT int32_t reasoncache_leaves_fence_open(const uint8_t* utf8, size_t size,
                                                         int32_t in_code) {
    try {
        std::u32string text;
        reasoncache::decode_utf8(utf8, size, text);
        return reasoncache::leaves_fence_open(text, in_code != 0) ? 1 : 0;
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
}

// Code points of UTF-8, or below 0.
REASONCACHE_EXPORT int32_t reasoncache_decode_utf8(const uint8_t* utf8, size_t size, uint32_t* out,
                                                   size_t capacity, size_t* out_size) {
    try {
        std::u32string text;
        reasoncache::decode_utf8(utf8, size, text);
        return give(text, out, capacity, out_size);
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
}

// UTF-8 of code points, or below 0.
REASONCACHE_EXPORT int32_t reasoncache_encode_utf8(const uint32_t* points, size_t size,
                                                   uint8_t* out, size_t capacity,
                                                   size_t* out_size) {
    try {
        const std::u32string text(points, points + size);
        std::string encoded;
        reasoncache::encode_utf8(text, encoded);
        return give(encoded, out, capacity, out_size);
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
}

// Classes of each code point, or-ed: see unicode_tables.h.
REASONCACHE_EXPORT void reasoncache_character_classes(const uint32_t* points, size_t size,
                                                      uint8_t* out) {
    for (size_t i = 0; i < size; ++i) out[i] = reasoncache::character_classes(points[i]);
}

// str.isupper and the size of what str.strip leaves, of one text.
REASONCACHE_EXPORT int32_t reasoncache_is_upper(const uint32_t* points, size_t size,
                                                size_t* stripped_size) {
    try {
        const std::u32string text(points, points + size);
        *stripped_size = reasoncache::strip(text).size();
        return reasoncache::is_upper(text) ? 1 : 0;
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
}
