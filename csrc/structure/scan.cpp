// SPDX-License-Identifier: Apache-2.0
#include "structure/scan.h"

#include "structure/lookup.h"
#include "text/characters.h"

namespace reasoncache {

using tables::first_group;
using tables::Raw;

namespace {

bool is_ascii_letter(char32_t c) { return (c | 0x20) >= U'a' && (c | 0x20) <= U'z'; }

bool is_apostrophe(char32_t c) { return c == U'\'' || c == U'\u2019'; }

}  // namespace

bool Scanner::is_decimal_at(size_t pos) const {
    return pos < text_.size() && is_decimal(text_[pos]);
}

bool Scanner::is_word_at(size_t pos) const {
    return pos < text_.size() && first_group(text_[pos]) == Raw::kWord;
}

bool Scanner::next(RawToken& token) {
    while (pos_ < text_.size() && first_group(text_[pos_]) == Raw::kSpace) ++pos_;
    if (pos_ == text_.size()) return false;
    const char32_t c = text_[pos_];
    Raw group = first_group(c);
    if (group == Raw::kCommand) {
        scan_command(token);
        pos_ = token.end;
        return true;
    }
    size_t end = pos_ + 1;
    switch (group) {
        case Raw::kNumber:
            end = number_end(pos_);
            break;
        case Raw::kWord:
            end = word_end(pos_);
            break;
        case Raw::kSuperscript:
        case Raw::kSubscript:
        case Raw::kPrime:
            end = run_end(pos_, group);
            break;
        case Raw::kOperator:
        case Raw::kSymbol:
        case Raw::kOther:
            // "!" and ":" may begin a longer operator, "." a number.
            if (const size_t longer = long_operator_end(); longer > 0) {
                group = Raw::kOperator;
                end = longer;
            } else if (c == U'.' && is_decimal_at(pos_ + 1)) {
                group = Raw::kNumber;
                end = run_end(pos_ + 1, Raw::kNumber);
            }
            break;
        default:
            break;
    }
    token.group = group;
    token.text = text_.substr(pos_, end - pos_);
    token.sign = group == Raw::kOperator ? tables::find_sign(token.text) : nullptr;
    token.start = pos_;
    token.end = end;
    pos_ = end;
    return true;
}

size_t Scanner::run_end(size_t pos, Raw group) const {
    while (pos < text_.size() && first_group(text_[pos]) == group) ++pos;
    return pos;
}

// \d+(?:,\d{3}(?!\d))*(?:\.\d+)?
size_t Scanner::number_end(size_t pos) const {
    pos = run_end(pos, Raw::kNumber);
    while (at(pos) == U',' && is_decimal_at(pos + 1) && is_decimal_at(pos + 2) &&
           is_decimal_at(pos + 3) && !is_decimal_at(pos + 4)) {
        pos += 4;
    }
    if (at(pos) == U'.' && is_decimal_at(pos + 1)) pos = run_end(pos + 1, Raw::kNumber);
    return pos;
}

// Letters, with apostrophes between them.
size_t Scanner::word_end(size_t pos) const {
    pos = run_end(pos, Raw::kWord);
    while (is_apostrophe(at(pos)) && is_word_at(pos + 1)) pos = run_end(pos + 1, Raw::kWord);
    return pos;
}

// End of an operator of several signs at the current place, or 0.
size_t Scanner::long_operator_end() const {
    const std::u32string_view rest = text_.substr(pos_);
    for (const std::u32string_view spelling : tables::kLongOperators) {
        if (rest.front() == spelling.front() && rest.substr(0, spelling.size()) == spelling) {
            return pos_ + spelling.size();
        }
    }
    return 0;
}

// A backslash and letters, or one character of any kind, or the end of the text.
void Scanner::scan_command(RawToken& token) {
    const size_t name_start = pos_ + 1;
    size_t end = name_start;
    while (is_ascii_letter(at(end))) ++end;
    const std::u32string_view letters = text_.substr(name_start, end - name_start);
    token.sign = nullptr;
    token.start = pos_;
    if (tables::contains(tables::kTextCommands, letters) &&
        scan_text_argument(letters, end, token)) {
        return;
    }
    if (letters.empty() && end < text_.size()) ++end;
    token.group = Raw::kCommand;
    token.text = text_.substr(name_start, end - name_start);
    token.end = end;
}

// \text{a few words} is one leaf. False where no closed argument follows.
bool Scanner::scan_text_argument(std::u32string_view name, size_t pos, RawToken& token) {
    if (at(pos) == U'*') ++pos;
    while (at(pos) == U' ' || at(pos) == U'\t') ++pos;
    if (at(pos) != U'{') return false;
    const size_t start = pos + 1;
    // Ends at any brace, so that text after text is looked at once.
    const size_t end = text_.find_first_of(U"{}", start);
    if (end == std::u32string_view::npos || text_[end] == U'{') return false;
    token.group = Raw::kTextArgument;
    token.text = arena_.join(name, U":", strip(text_.substr(start, end - start)));
    token.end = end + 1;
    return true;
}

}  // namespace reasoncache
