// SPDX-License-Identifier: Apache-2.0
#include "structure/code_scan.h"

#include "text/characters.h"

namespace reasoncache {
namespace {

// Operators of two signs that do not end in "=": code.py lists them.
constexpr std::u32string_view kPairs[] = {U"**", U"//", U"->", U"=>", U"&&",
                                          U"||", U"::", U"++", U"--"};
constexpr std::u32string_view kBeforeEquals = U"-+*/%&|^=!<>:";

bool is_angle(char32_t c) { return c == U'<' || c == U'>'; }

bool is_line_space(char32_t c) { return c == U' ' || c == U'\t' || c == U'\r' || c == U'\n'; }

}  // namespace

bool CodeScanner::next(CodeToken& token) {
    if (has_begun_) {
        while (pos_ < text_.size() && text_[pos_] != U'\n' && is_space(text_[pos_])) ++pos_;
        if (pos_ == text_.size()) return false;
    }
    if (!has_begun_ || text_[pos_] == U'\n') {
        const size_t start = has_begun_ ? pos_ + 1 : 0;
        has_begun_ = true;
        pos_ = start;
        while (pos_ < text_.size() && is_line_space(text_[pos_])) ++pos_;
        token = {CodeKind::kLine, text_.substr(start, pos_ - start)};
        return true;
    }
    const CodeKind kind = kind_at(pos_);
    const size_t end = kind == CodeKind::kLeaf ? leaf_end(pos_) : pos_ + 1;
    token = {kind, text_.substr(pos_, end - pos_)};
    pos_ = end;
    return true;
}

CodeKind CodeScanner::kind_at(size_t pos) const {
    switch (text_[pos]) {
        case U'(':
        case U'[':
        case U'{':
            return CodeKind::kOpen;
        case U')':
        case U']':
        case U'}':
            return CodeKind::kClose;
        default:
            return CodeKind::kLeaf;
    }
}

// A name, a number, a string, an operator or any other visible character.
size_t CodeScanner::leaf_end(size_t start) const {
    const char32_t c = text_[start];
    if (is_word(c)) {
        const bool is_number = is_decimal(c);
        size_t end = start + 1;
        while (end < text_.size() && (is_word(text_[end]) || (is_number && text_[end] == U'.'))) {
            ++end;
        }
        return end;
    }
    if (c == U'"' || c == U'\'') return string_end(start);
    return operator_end(start);
}

// A string that is not closed ends with its line.
size_t CodeScanner::string_end(size_t start) const {
    const char32_t quote = text_[start];
    size_t end = start + 1;
    while (end < text_.size() && text_[end] != quote && text_[end] != U'\n') {
        if (text_[end] != U'\\') {
            ++end;
        } else if (end + 1 < text_.size() && text_[end + 1] != U'\n') {
            end += 2;
        } else {
            return end;  // nothing to escape: the backslash is a token of its own
        }
    }
    return at(end) == quote ? end + 1 : end;
}

size_t CodeScanner::operator_end(size_t start) const {
    const char32_t first = text_[start];
    const char32_t second = at(start + 1);
    if (is_angle(first) && is_angle(second)) {
        return at(start + 2) == U'=' ? start + 3 : start + 2;
    }
    if (second == U'=' && kBeforeEquals.find(first) != std::u32string_view::npos) return start + 2;
    for (const std::u32string_view pair : kPairs) {
        if (first == pair[0] && second == pair[1]) return start + 2;
    }
    return start + 1;
}

}  // namespace reasoncache
