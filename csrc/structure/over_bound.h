// SPDX-License-Identifier: Apache-2.0
// Names of the bounds, as the fields of the Python class Limits.
#pragma once

namespace reasoncache {

// What a reading returns: null, or the bound that the step exceeds. A plain
// return value: steps over a bound come from hostile text, where unwinding
// would be the dearest part.
using OverBound = const char*;

inline constexpr OverBound kWithin = nullptr;
inline constexpr OverBound kMaxChars = "max_chars";
inline constexpr OverBound kMaxDepth = "max_depth";
inline constexpr OverBound kMaxNodes = "max_nodes";

}  // namespace reasoncache
