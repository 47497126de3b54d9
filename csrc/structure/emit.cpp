// SPDX-License-Identifier: Apache-2.0
#include "structure/emit.h"

#include <algorithm>

#include "structure/lookup.h"

namespace reasoncache {

using tables::Kind;
using tables::Raw;

namespace {

constexpr Token kSeparator = token(Kind::kSeparator, kSeparatorText);

Token word_token(std::u32string_view text) {
    if (tables::contains(tables::kFunctions, text)) return token(Kind::kFunction, text);
    if (text == U"mod") return operator_token(*tables::find_sign(text));
    return token(Kind::kName, text);
}

void emit_sign(const tables::Sign& sign, Tokens& tokens) {
    if (sign.is_script) {
        tokens.push_back(token(Kind::kScript, sign.label));
        return;
    }
    // "a &= b" aligns a relation; elsewhere "&" divides columns.
    if (sign.is_relation && !tokens.empty() && is_separator(tokens.back(), kColumnText)) {
        tokens.pop_back();
    }
    tokens.push_back(operator_token(sign));
}

// A LaTeX command; an unknown one is a leaf of its own name. `spelled` has the backslash.
void emit_command(std::u32string_view spelled, Tokens& tokens) {
    const tables::Command* const command = tables::find_command(spelled.substr(1));
    if (command == nullptr) {
        tokens.push_back(token(Kind::kName, spelled));
    } else if (command->is_ignored) {
        return;
    } else if (command->sign >= 0) {
        emit_sign(tables::kSigns[command->sign], tokens);
    } else {
        tokens.push_back({command->kind, command->num_arguments, command->label, {}});
    }
}

// Unicode superscript or subscript: x² is x^2, x⁻¹ is x^{-1}.
void emit_script(std::u32string_view script, std::u32string_view text, TextArena& arena,
                 Tokens& tokens) {
    tokens.push_back(token(Kind::kScript, script));
    char32_t* const plain = arena.allocate(text.size());
    std::transform(text.begin(), text.end(), plain, tables::plain_of_script);
    const size_t start = tokens.size();
    Scanner scanner({plain, text.size()}, arena);
    // Plain digits, letters, signs and brackets: this calls itself once at most.
    for (RawToken raw{}; scanner.next(raw);) emit(raw, arena, tokens);
    if (tokens.size() - start > 1 || tokens[start].kind == Kind::kOperator) {
        tokens.insert(tokens.begin() + static_cast<std::ptrdiff_t>(start),
                      token(Kind::kOpen, U"{"));
        tokens.push_back(token(Kind::kClose, U"}"));
    }
}

// Punctuation inside a formula.
void emit_other(std::u32string_view text, Tokens& tokens) {
    if (text == U"&") {
        tokens.push_back(token(Kind::kSeparator, kColumnText));
    } else if (text == U":") {
        tokens.push_back(operator_token(*tables::find_sign(text)));
    } else if (text == U"," || text == U";" || text == U"." || text == U"?") {
        tokens.push_back(kSeparator);
    } else {
        tokens.push_back(token(Kind::kName, text));
    }
}

bool starts_with(std::u32string_view text, std::u32string_view start) {
    return text.substr(0, start.size()) == start;
}

void emit_latex(const RawToken& raw, TextArena& arena, Tokens& tokens) {
    if (raw.group == Raw::kWord) {
        // TeX reads adjoining letters as a product of variables.
        for (size_t i = 0; i < raw.text.size(); ++i) {
            tokens.push_back(token(Kind::kName, raw.text.substr(i, 1)));
        }
    } else if (raw.group == Raw::kOther) {
        emit_other(raw.text, tokens);
    } else if (raw.group != Raw::kNewline && raw.text != U"~") {
        emit(raw, arena, tokens);
    }
}

}  // namespace

void emit(const RawToken& raw, TextArena& arena, Tokens& tokens) {
    switch (raw.group) {
        case Raw::kNumber:
            tokens.push_back(token(Kind::kNumber, raw.text));
            break;
        case Raw::kSymbol:
        case Raw::kPrime:
            tokens.push_back(token(Kind::kName, raw.text));
            break;
        case Raw::kOpen:
            tokens.push_back(token(Kind::kOpen, raw.text));
            break;
        case Raw::kClose:
            tokens.push_back(token(Kind::kClose, raw.text));
            break;
        case Raw::kWord:
            tokens.push_back(word_token(raw.text));
            break;
        case Raw::kOperator:
            emit_sign(*raw.sign, tokens);
            break;
        case Raw::kCommand:
            // The text stands behind its backslash in the input.
            emit_command({raw.text.data() - 1, raw.text.size() + 1}, tokens);
            break;
        case Raw::kSuperscript:
            emit_script(U"^", raw.text, arena, tokens);
            break;
        case Raw::kSubscript:
            emit_script(U"_", raw.text, arena, tokens);
            break;
        case Raw::kTextArgument:
            if (starts_with(raw.text, U"begin:") || starts_with(raw.text, U"end:")) {
                tokens.insert(tokens.end(),
                              {kSeparator, token(Kind::kName, raw.text), kSeparator});
            } else {
                tokens.push_back(token(Kind::kName, raw.text));
            }
            break;
        default:
            tokens.push_back(kSeparator);
            break;
    }
}

OverBound latex_tokens(std::u32string_view text, const Limits& limits, TextArena& arena,
                       Tokens& tokens) {
    Scanner scanner(text, arena);
    uint32_t num_raw = 0;
    for (RawToken raw{}; scanner.next(raw);) {
        if (++num_raw > limits.max_nodes) return kMaxNodes;
        emit_latex(raw, arena, tokens);
        if (tokens.size() > limits.max_nodes) return kMaxNodes;
    }
    return kWithin;
}

}  // namespace reasoncache
