// SPDX-License-Identifier: Apache-2.0
// The structure signature of a reasoning step: the native twin of
// sglang_reasoncache/policy/structure, which explains the rules. Both give the
// same result on every text; where they do not, the Python is right.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace reasoncache {

// As the Python class of the same name. A max_depth above 128 is read as 128:
// it bounds the recursion, and a step over a bound is only shared less.
struct Limits {
    uint32_t max_chars;
    uint32_t max_depth;
    uint32_t max_nodes;
};

enum class SignatureKind : uint8_t { kProse = 0, kFormal = 1, kOverBound = 2 };

struct Signature {
    SignatureKind kind;
    // The trees in the serialisation of tree.py, UTF-8; empty unless formal.
    // Equal strings mean equal trees.
    std::string canonical;
    // The field of Limits exceeded, a static string; "" unless over a bound.
    const char* bound;
};

// Reads the formal content of a step; `in_code`: it begins inside a code fence.
// Time and memory are linear in the characters, recursion is bounded by
// max_depth. Keeps no state: any number of threads may call it. Throws
// std::bad_alloc only.
Signature read_signature(std::u32string_view text, const Limits& limits, bool in_code);

// Whether a code fence is open after `text`, given its state before.
bool leaves_fence_open(std::u32string_view text, bool in_code);

}  // namespace reasoncache
