// SPDX-License-Identifier: Apache-2.0
// Operator precedence parser for mathematics: expression.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "structure/forest.h"
#include "structure/over_bound.h"
#include "structure/token.h"
#include "text/text_arena.h"

namespace reasoncache {

// One pass over one token list. `operand` and `nested_group` are the only ways
// down, and they count the depth: a few small frames for each unit of it.
class Parser {
public:
    // `latex`: scripts take one digit or group, as TeX reads x^12. The parser
    // changes the tokens (a number is split where TeX takes one digit of it).
    Parser(Tokens& tokens, uint32_t max_depth, bool latex, TextArena& arena, Forest& forest);

    // Appends the trees, one for each part between separators. Over max_depth
    // with deeper nesting; `found` is then of no use.
    OverBound parse(NodeList& found);

private:
    const Token& ahead() const { return tokens_[pos_]; }
    bool is_at_end() const { return pos_ + 1 == tokens_.size(); }
    bool enter();

    void items(NodeList& found);
    uint8_t level_ahead() const;
    NodeId chain(uint8_t level);
    NodeId prefixed();
    NodeId operand();
    NodeId scripted(NodeId base);
    NodeId group();
    NodeId function();
    NodeId command();
    NodeId nested_group();
    NodeId argument();
    NodeId exponent();
    NodeId leaf_ahead();
    NodeId empty() { return forest_.add({}); }
    std::u32string_view joined_operators(size_t start);

    Tokens& tokens_;
    size_t pos_ = 0;
    uint32_t depth_ = 0;
    uint32_t max_depth_;
    bool latex_;
    bool is_over_ = false;
    TextArena& arena_;
    Forest& forest_;
    // Operators of the chains being read, innermost last.
    std::vector<std::u32string_view> operators_;
};

}  // namespace reasoncache
