// SPDX-License-Identifier: Apache-2.0
// Code, Python or C-like, as a tree of lines, blocks and brackets: code.py.
#pragma once

#include <string_view>

#include "structure/forest.h"
#include "structure/over_bound.h"
#include "structure/structure.h"
#include "text/text_arena.h"

namespace reasoncache {

// Appends the tree of a piece of code to `found`, or nothing where it is empty.
// Over max_nodes (tokens) or max_depth (brackets, indentation).
OverBound code_tree(std::u32string_view text, const Limits& limits, TextArena& arena,
                    Forest& forest, NodeList& found);

}  // namespace reasoncache
