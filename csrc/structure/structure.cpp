// SPDX-License-Identifier: Apache-2.0
#include "structure/structure.h"

#include <algorithm>

#include "structure/code.h"
#include "structure/emit.h"
#include "structure/expression.h"
#include "structure/formal.h"
#include "structure/forest.h"
#include "structure/over_bound.h"
#include "structure/regions.h"
#include "text/text_arena.h"
#include "vocabulary_tables.h"

namespace reasoncache {
namespace {

// What one step is read with. Nothing outlives the step.
class Reader {
public:
    explicit Reader(const Limits& limits) : limits_(limits), formal_(limits, arena_) {}

    OverBound read(std::u32string_view text, bool in_code) {
        Regions regions(text, in_code);
        for (Region region{}; regions.next(region);) {
            const OverBound over = region.kind == RegionKind::kCode
                                       ? read_code(region.text)
                                       : read_mathematics(region.text, region.kind);
            if (over != kWithin) return over;
            // Each part is below the bound on its own; so must be the whole.
            if (num_nodes_ > limits_.max_nodes) return kMaxNodes;
        }
        return kWithin;
    }

    bool is_prose() const { return trees_.size == 0; }
    std::string canonical() const { return forest_.serialise(trees_); }

private:
    OverBound read_code(std::u32string_view text) {
        const size_t before = forest_.size();
        const OverBound over = code_tree(text, limits_, arena_, forest_, trees_);
        num_nodes_ += forest_.size() - before;
        return over;
    }

    OverBound read_mathematics(std::u32string_view text, RegionKind kind) {
        const bool is_latex = kind == RegionKind::kLatex;
        tokens_.clear();
        const OverBound over = is_latex ? latex_tokens(text, limits_, arena_, tokens_)
                                        : formal_.read(text, tokens_);
        if (over != kWithin) return over;
        num_nodes_ += tokens_.size();
        if (tokens_.empty()) return kWithin;
        return Parser(tokens_, limits_.max_depth, is_latex, arena_, forest_).parse(trees_);
    }

    Limits limits_;
    TextArena arena_;
    Forest forest_;
    NodeList trees_;
    size_t num_nodes_ = 0;
    Tokens tokens_;
    FormalReader formal_;
};

}  // namespace

Signature read_signature(std::u32string_view text, const Limits& limits, bool in_code) {
    if (text.size() > limits.max_chars) return {SignatureKind::kOverBound, {}, kMaxChars};
    Limits bounded = limits;
    bounded.max_depth = std::min(limits.max_depth, tables::kMaxDepthAllowed);
    Reader reader(bounded);
    const OverBound over = reader.read(text, in_code);
    if (over != kWithin) return {SignatureKind::kOverBound, {}, over};
    if (reader.is_prose()) return {SignatureKind::kProse, {}, ""};
    return {SignatureKind::kFormal, reader.canonical(), ""};
}

}  // namespace reasoncache
