// SPDX-License-Identifier: Apache-2.0
#include "structure/code.h"

#include <vector>

#include "structure/code_scan.h"
#include "vocabulary_tables.h"

namespace reasoncache {
namespace {

// A logical line: its indentation in columns, its tokens with nested brackets.
struct Line {
    size_t indent;
    NodeList children;
};

// An open bracket, and what its surroundings hold so far.
struct Bracket {
    std::u32string_view opened;
    NodeList outside;
};

// Columns of the white space behind the last line break, as str.expandtabs and len.
size_t indentation(std::u32string_view line_break) {
    const size_t newline = line_break.rfind(U'\n');
    if (newline != std::u32string_view::npos) line_break.remove_prefix(newline + 1);
    size_t width = 0;
    size_t column = 0;
    for (const char32_t c : line_break) {
        const size_t step = c == U'\t' ? tables::kTabColumns - column % tables::kTabColumns : 1;
        width += step;
        // A carriage return counts, and the next tab stop is counted from it.
        column = c == U'\r' ? 0 : column + step;
    }
    return width;
}

class LineReader {
public:
    LineReader(std::u32string_view text, const Limits& limits, TextArena& arena, Forest& forest)
        : scanner_(text), limits_(limits), arena_(arena), forest_(forest) {}

    OverBound read(std::vector<Line>& lines) {
        CodeToken token{};
        for (uint32_t num_before = 0; scanner_.next(token); ++num_before) {
            if (num_before > limits_.max_nodes) return kMaxNodes;
            switch (token.kind) {
                case CodeKind::kLine:
                    if (brackets_.empty()) {
                        end_line(lines);
                        indent_ = indentation(token.text);
                    }
                    break;
                case CodeKind::kOpen:
                    if (brackets_.size() >= limits_.max_depth) return kMaxDepth;
                    brackets_.push_back({token.text, here_});
                    here_ = {};
                    break;
                case CodeKind::kClose:
                    if (!brackets_.empty()) {
                        close_bracket(token.text);
                        break;
                    }
                    [[fallthrough]];
                case CodeKind::kLeaf:
                    forest_.append(here_, forest_.add(token.text));
                    break;
            }
        }
        while (!brackets_.empty()) close_bracket({});
        end_line(lines);
        return kWithin;
    }

private:
    void close_bracket(std::u32string_view closed) {
        const Bracket bracket = brackets_.back();
        brackets_.pop_back();
        const NodeId group = forest_.add(arena_.join(bracket.opened, closed), here_);
        here_ = bracket.outside;
        forest_.append(here_, group);
    }

    void end_line(std::vector<Line>& lines) {
        if (here_.size > 0) lines.push_back({indent_, here_});
        here_ = {};
    }

    CodeScanner scanner_;
    Limits limits_;
    TextArena& arena_;
    Forest& forest_;
    size_t indent_ = 0;
    NodeList here_;
    std::vector<Bracket> brackets_;
};

}  // namespace

OverBound code_tree(std::u32string_view text, const Limits& limits, TextArena& arena,
                    Forest& forest, NodeList& found) {
    std::vector<Line> lines;
    const OverBound over = LineReader(text, limits, arena, forest).read(lines);
    if (over != kWithin) return over;
    if (lines.empty()) return kWithin;
    // One frame for each open block: its indentation and its finished lines.
    std::vector<Line> frames = {{lines.front().indent, {}}};
    const auto close_block = [&] {
        const NodeId block = forest.add(U"block", frames.back().children);
        frames.pop_back();
        forest.append(frames.back().children, block);
    };
    for (const Line& line : lines) {
        while (frames.size() > 1 && line.indent < frames.back().indent) close_block();
        if (line.indent > frames.back().indent) {
            if (frames.size() > limits.max_depth) return kMaxDepth;
            frames.push_back({line.indent, {}});
        }
        forest.append(frames.back().children, forest.add(U"line", line.children));
    }
    while (frames.size() > 1) close_block();
    forest.append(found, forest.add(U"code", frames.front().children));
    return kWithin;
}

}  // namespace reasoncache
