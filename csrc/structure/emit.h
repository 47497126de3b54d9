// SPDX-License-Identifier: Apache-2.0
// From raw tokens to parser tokens: emit.py.
#pragma once

#include <string_view>

#include "structure/over_bound.h"
#include "structure/scan.h"
#include "structure/structure.h"
#include "structure/token.h"
#include "text/text_arena.h"

namespace reasoncache {

// Appends the parser tokens of one formal piece of plain text or LaTeX.
void emit(const RawToken& raw, TextArena& arena, Tokens& tokens);

// Parser tokens of the inside of a LaTeX formula; all of it is formal. Over
// max_nodes with more raw or parser tokens than that.
OverBound latex_tokens(std::u32string_view text, const Limits& limits, TextArena& arena,
                       Tokens& tokens);

}  // namespace reasoncache
