// SPDX-License-Identifier: Apache-2.0
#include "structure/expression.h"

#include <algorithm>

#include "structure/lookup.h"

namespace reasoncache {

using tables::Kind;

namespace {

constexpr uint8_t kProductLevel = tables::kProductLevel;

bool starts_operand(Kind kind) {
    return kind == Kind::kNumber || kind == Kind::kName || kind == Kind::kOpen ||
           kind == Kind::kFunction || kind == Kind::kCommand;
}

bool is_prefix(const Token& token) {
    return token.kind == Kind::kOperator && !token.prefix_label.empty();
}

}  // namespace

Parser::Parser(Tokens& tokens, uint32_t max_depth, bool latex, TextArena& arena, Forest& forest)
    : tokens_(tokens), max_depth_(max_depth), latex_(latex), arena_(arena), forest_(forest) {
    tokens_.push_back(token(Kind::kClose, {}));  // the end: every rule returns there
}

OverBound Parser::parse(NodeList& found) {
    items(found);
    while (!is_at_end()) {
        ++pos_;  // a closing bracket that nothing opened
        items(found);
    }
    return is_over_ ? kMaxDepth : kWithin;
}

// One level down. False beyond max_depth: the reading then stands at the end,
// where all callers return without another step down.
bool Parser::enter() {
    if (++depth_ <= max_depth_) return true;
    is_over_ = true;
    pos_ = tokens_.size() - 1;
    return false;
}

// Parts up to the next closing bracket, which is not consumed.
void Parser::items(NodeList& found) {
    while (ahead().kind != Kind::kClose) {
        if (ahead().kind == Kind::kSeparator) {
            ++pos_;
        } else {
            forest_.append(found, chain(1));
        }
    }
}

// Binding strength of what comes next; 0 where the expression ends.
uint8_t Parser::level_ahead() const {
    const Token& next = ahead();
    if (next.kind == Kind::kOperator) return next.number != 0 ? next.number : kProductLevel;
    return starts_operand(next.kind) ? kProductLevel : 0;
}

// Expression whose operators bind at least as strongly as `level`. A chain of
// one level is one node labelled with its operators.
NodeId Parser::chain(uint8_t level) {
    NodeId left = prefixed();
    for (uint8_t here = level_ahead(); here >= level; here = level_ahead()) {
        const size_t start = operators_.size();
        NodeList operands;
        forest_.append(operands, left);
        while (level_ahead() == here) {
            if (ahead().kind == Kind::kOperator && ahead().number != 0) {
                operators_.push_back(ahead().text);
                ++pos_;
            } else {
                operators_.push_back(U"*");  // neighbours multiply
            }
            const uint8_t tighter = static_cast<uint8_t>(here + 1);
            forest_.append(operands, here == kProductLevel ? prefixed() : chain(tighter));
        }
        left = forest_.add(joined_operators(start), operands);
    }
    return left;
}

// The operators from `start` on, with spaces between them; takes them off the stack.
std::u32string_view Parser::joined_operators(size_t start) {
    if (operators_.size() - start == 1) {
        const std::u32string_view only = operators_.back();
        operators_.pop_back();
        return only;
    }
    size_t size = operators_.size() - start - 1;
    for (size_t i = start; i < operators_.size(); ++i) size += operators_[i].size();
    char32_t* const joined = arena_.allocate(size);
    char32_t* end = joined;
    for (size_t i = start; i < operators_.size(); ++i) {
        if (i > start) *end++ = U' ';
        end = std::copy(operators_[i].begin(), operators_[i].end(), end);
    }
    operators_.resize(start);
    return {joined, size};
}

NodeId Parser::prefixed() {
    const size_t start = pos_;
    while (is_prefix(ahead())) {
        ++pos_;
        if (pos_ - start > max_depth_) {
            is_over_ = true;
            pos_ = tokens_.size() - 1;
            return empty();
        }
    }
    const size_t end = pos_;
    NodeId node = operand();
    for (size_t i = end; i > start; --i) {
        NodeList child;
        forest_.append(child, node);
        node = forest_.add(tokens_[i - 1].prefix_label, child);
    }
    return node;
}

// An atom with its scripts; the empty leaf where there is none.
NodeId Parser::operand() {
    if (!enter()) return empty();
    NodeId node = kNoNode;
    switch (ahead().kind) {
        case Kind::kNumber:
        case Kind::kName:
            node = leaf_ahead();
            break;
        case Kind::kOpen:
            node = group();
            break;
        case Kind::kFunction:
            node = function();
            break;
        case Kind::kCommand:
            node = command();
            break;
        default:
            node = empty();
            break;
    }
    node = scripted(node);
    --depth_;
    return node;
}

// Scripts in canonical order, so that x_1^2 equals x^2_1.
NodeId Parser::scripted(NodeId base) {
    if (ahead().kind != Kind::kScript) return base;
    NodeList raised;
    NodeList lowered;
    while (ahead().kind == Kind::kScript) {
        const bool is_raised = ahead().text == U"^";
        ++pos_;
        const NodeId script = latex_ ? argument() : exponent();
        forest_.append(is_raised ? raised : lowered, script);
    }
    NodeList children;
    forest_.append(children, base);
    forest_.extend(children, raised);
    forest_.extend(children, lowered);
    const size_t start = operators_.size();
    operators_.insert(operators_.end(), raised.size, U"^");
    operators_.insert(operators_.end(), lowered.size, U"_");
    return forest_.add(joined_operators(start), children);
}

NodeId Parser::group() {
    const std::u32string_view opened = ahead().text;
    ++pos_;
    NodeList found;
    items(found);
    const std::u32string_view closed = ahead().text;
    if (!is_at_end()) ++pos_;
    if (found.size == 1 && (opened == U"(" || opened == U"{")) return found.first;
    if (found.size == 0 && opened == U"{") return empty();
    return forest_.add(arena_.join(opened, closed), found);
}

// sin x, max(a, b), \log_2 8; a leaf where nothing follows.
NodeId Parser::function() {
    const std::u32string_view label = ahead().text;
    const NodeId head = scripted(leaf_ahead());
    if (!starts_operand(ahead().kind)) return head;
    const bool is_plain = forest_.is_leaf(head);
    NodeList children;
    if (!is_plain) forest_.append(children, head);
    forest_.append(children, operand());
    return forest_.add(is_plain ? label : U"apply", children);
}

// \frac{a}{b}, \sqrt[3]{x} and other braced commands.
NodeId Parser::command() {
    const std::u32string_view label = ahead().text;
    const uint8_t num_arguments = ahead().number;
    ++pos_;
    NodeList arguments;
    if (label == U"sqrt" && ahead().kind == Kind::kOpen && ahead().text == U"[") {
        forest_.append(arguments, nested_group());
    }
    for (uint8_t i = 0; i < num_arguments; ++i) forest_.append(arguments, argument());
    return forest_.add(label, arguments);
}

// A bracket group that is not an operand; counts as one level all the same.
NodeId Parser::nested_group() {
    if (!enter()) return empty();
    const NodeId node = group();
    --depth_;
    return node;
}

// What TeX takes as an argument: a group, a command or one character.
NodeId Parser::argument() {
    Token& next = tokens_[pos_];
    switch (next.kind) {
        case Kind::kOpen:
            return next.text == U"{" ? nested_group() : leaf_ahead();
        case Kind::kNumber:
            if (next.text.size() > 1) {
                const std::u32string_view digit = next.text.substr(0, 1);
                next.text.remove_prefix(1);
                return forest_.add(digit);
            }
            return leaf_ahead();
        case Kind::kFunction:
        case Kind::kCommand:
            return operand();
        case Kind::kClose:
        case Kind::kSeparator:
        case Kind::kScript:
            return empty();
        default:
            return leaf_ahead();
    }
}

// Script in plain text: signs, then a whole number, name or group.
NodeId Parser::exponent() {
    switch (ahead().kind) {
        case Kind::kOpen:
            return nested_group();
        case Kind::kOperator:
            return is_prefix(ahead()) ? prefixed() : empty();
        case Kind::kFunction:
        case Kind::kCommand:
            return operand();
        case Kind::kNumber:
        case Kind::kName:
            return leaf_ahead();
        default:
            return empty();
    }
}

// The token ahead as a leaf; goes on to the next.
NodeId Parser::leaf_ahead() { return forest_.add(tokens_[pos_++].text); }

}  // namespace reasoncache
