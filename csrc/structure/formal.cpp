// SPDX-License-Identifier: Apache-2.0
#include "structure/formal.h"

#include "structure/emit.h"
#include "structure/lookup.h"
#include "text/characters.h"

namespace reasoncache {

using tables::Raw;

namespace {

// Before the first and after the last token: a line break that touches nothing.
constexpr size_t kNowhere = SIZE_MAX;
constexpr RawToken kEdge = {Raw::kNewline, nullptr, U"\n", kNowhere, kNowhere};

constexpr uint32_t bit(Raw group) { return 1u << static_cast<unsigned>(group); }

constexpr uint32_t kScripts = bit(Raw::kSuperscript) | bit(Raw::kSubscript);
constexpr uint32_t kSolid = bit(Raw::kNumber) | bit(Raw::kWord) | kScripts | bit(Raw::kOpen) |
                            bit(Raw::kClose) | bit(Raw::kCommand);

bool is_one_of(const RawToken& token, uint32_t groups) { return (bit(token.group) & groups) != 0; }

bool is_name(std::u32string_view word) {
    return word.size() <= tables::kMaxCapitals && is_upper(word);
}

bool is_english_letter(std::u32string_view text) {
    return text.size() == 1 &&
           tables::kEnglishLetters.find(text.front()) != std::u32string_view::npos;
}

// A number, single letter, name in capitals, script or closing bracket.
bool is_operand(const RawToken& token) {
    if (token.group == Raw::kWord) return token.text.size() == 1 || is_name(token.text);
    return is_one_of(token, bit(Raw::kNumber) | bit(Raw::kClose) | kScripts | bit(Raw::kPrime));
}

bool touch(const RawToken& before, const RawToken& after) {
    return before.end == after.start && after.start != kNowhere;
}

}  // namespace

OverBound FormalReader::read(std::u32string_view text, Tokens& tokens) {
    if (!scan(text)) return kMaxNodes;
    flags_.assign(raw_.size(), 0);
    for (size_t i = 1; i + 1 < raw_.size(); ++i) flags_[i] = is_formal(i);
    if (!flag_brackets()) return kMaxDepth;
    for (size_t i = 1; i + 1 < raw_.size(); ++i) {
        if (flags_[i] != 0) {
            emit(raw_[i], arena_, tokens);
        } else if (!tokens.empty() && !is_separator(tokens.back(), kSeparatorText)) {
            tokens.push_back(token(tables::Kind::kSeparator, kSeparatorText));
        }
        // One script of many characters is one raw token and many parser tokens.
        if (tokens.size() > limits_.max_nodes) return kMaxNodes;
    }
    return kWithin;
}

// False with more than max_nodes tokens.
bool FormalReader::scan(std::u32string_view text) {
    raw_.clear();
    raw_.reserve(64);
    raw_.push_back(kEdge);
    Scanner scanner(text, arena_);
    for (RawToken token{}; scanner.next(token);) {
        raw_.push_back(token);
        if (raw_.size() - 1 > limits_.max_nodes) return false;
    }
    raw_.push_back(kEdge);
    return true;
}

bool FormalReader::is_formal(size_t i) const {
    const RawToken& token = raw_[i];
    const RawToken& before = raw_[i - 1];
    switch (token.group) {
        case Raw::kWord:
            return is_formal_word(i);
        case Raw::kOperator:
            return is_formal_operator(i);
        case Raw::kPrime:
            return touch(before, token) && is_operand(before);
        case Raw::kSymbol:
            return token.text != U"!" || (touch(before, token) && is_operand(before));
        case Raw::kNumber:
        case Raw::kSuperscript:
        case Raw::kSubscript:
        case Raw::kTextArgument:
        case Raw::kCommand:
            return true;
        default:
            return false;
    }
}

bool FormalReader::is_formal_word(size_t i) const {
    const RawToken& before = raw_[i - 1];
    const RawToken& token = raw_[i];
    const RawToken& after = raw_[i + 1];
    if (token.text.size() == 1) return !is_english_letter(token.text) || is_variable(i);
    if (tables::contains(tables::kFunctions, token.text) || token.text == U"mod" ||
        is_name(token.text)) {
        return true;
    }
    if (touch(token, after) && is_one_of(after, bit(Raw::kOpen) | kScripts | bit(Raw::kNumber))) {
        return true;
    }
    if (touch(before, token) && before.group == Raw::kNumber) return true;
    return is_strong(i - 1) || is_strong(i + 1);
}

// Whether "a", "A" or "I" is a variable, not an English word.
bool FormalReader::is_variable(size_t i) const {
    const RawToken& before = raw_[i - 1];
    const RawToken& after = raw_[i + 1];
    for (const RawToken* const near : {&before, &after}) {
        if (is_one_of(*near, bit(Raw::kNumber) | kScripts)) return true;
        if (near->group == Raw::kWord && near->text.size() == 1) return true;
    }
    if (before.group == Raw::kOperator && is_formal_operator(i - 1)) return true;
    if (after.group != Raw::kWord) return true;
    return raw_[i].text != U"I" && tables::contains(tables::kAfterVariableA, after.text);
}

// An operator that makes any neighbouring word an operand.
bool FormalReader::is_strong(size_t i) const {
    return raw_[i].group == Raw::kOperator && raw_[i].sign->is_strong && !is_emphasis(i);
}

// Markdown: **word or word**, open to the other side.
bool FormalReader::is_emphasis(size_t i) const {
    const RawToken& token = raw_[i];
    if (!token.sign->is_emphasis) return false;
    const RawToken& before = raw_[i - 1];
    const RawToken& after = raw_[i + 1];
    const bool left = touch(before, token) && is_one_of(before, kSolid);
    const bool right = touch(token, after) && is_one_of(after, kSolid);
    if (left == right) return false;
    const RawToken& near = left ? before : after;
    return near.group == Raw::kWord && near.text.size() > 1;
}

bool FormalReader::is_formal_operator(size_t i) const {
    const RawToken& before = raw_[i - 1];
    const RawToken& token = raw_[i];
    const RawToken& after = raw_[i + 1];
    if (!token.sign->is_hyphen) return !is_emphasis(i);
    if (before.group == Raw::kNewline && !touch(token, after)) return false;  // list bullet
    if (is_one_of(after, bit(Raw::kOpen) | bit(Raw::kCommand))) return true;
    const bool left = is_operand(before);
    const bool right = is_operand(after);
    // "word - a better way": the article alone makes no difference of the dash.
    return (left && right) || (left && !is_english_letter(before.text)) ||
           (right && !is_english_letter(after.text));
}

// Flags the bracket pairs worth keeping; unmatched brackets are dropped. Any
// closing bracket ends the innermost open one, as in [0, 1). False with
// brackets nested deeper than max_depth.
bool FormalReader::flag_brackets() {
    open_.clear();
    size_t num_formal = 0;
    for (size_t i = 1; i + 1 < raw_.size(); ++i) {
        if (raw_[i].group == Raw::kOpen) {
            open_.push_back({i, num_formal});
            if (open_.size() > limits_.max_depth) return false;
        } else if (raw_[i].group != Raw::kClose) {
            num_formal += flags_[i];
        } else if (!open_.empty()) {
            const Bracket opened = open_.back();
            open_.pop_back();
            // The flag of the edge is 0: nothing applies the first bracket.
            const bool is_applied =
                flags_[opened.index - 1] != 0 && touch(raw_[opened.index - 1], raw_[opened.index]);
            if (num_formal > opened.num_formal || is_applied) flags_[opened.index] = flags_[i] = 1;
        }
    }
    return true;
}

}  // namespace reasoncache
