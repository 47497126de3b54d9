// SPDX-License-Identifier: Apache-2.0
// Tokens of code: the pattern of code.py by hand, in linear time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace reasoncache {

enum class CodeKind : uint8_t { kLine, kLeaf, kOpen, kClose };

struct CodeToken {
    CodeKind kind;
    // Of a line break: the white space behind its first newline.
    std::u32string_view text;
};

// Cuts code into tokens. The first is the line break that the text begins
// behind, so that its indentation is read like any other.
class CodeScanner {
public:
    explicit CodeScanner(std::u32string_view text) : text_(text) {}

    // The next token, or false at the end.
    bool next(CodeToken& token);

private:
    char32_t at(size_t pos) const { return pos < text_.size() ? text_[pos] : U'\0'; }
    CodeKind kind_at(size_t pos) const;
    size_t leaf_end(size_t start) const;
    size_t string_end(size_t start) const;
    size_t operator_end(size_t start) const;

    std::u32string_view text_;
    size_t pos_ = 0;
    bool has_begun_ = false;
};

}  // namespace reasoncache
