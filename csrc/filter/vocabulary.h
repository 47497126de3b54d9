// SPDX-License-Identifier: Apache-2.0
// Bytes and blank-line class of every token id; read-only, shared by all requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace reasoncache {

// Flags of policy/segment.py's TokenClass.
enum TokenClass : uint8_t {
  kBlank = 1,
  kStartsNewline = 2,
  kEndsNewline = 4,
  kOpensWithBlankLine = 8,
  kClosesWithBlankLine = 16,
};

class Vocabulary {
 public:
  // `offsets` holds size + 1 ascending numbers, the last one the size of `blob`.
  Vocabulary(const uint8_t* blob, const uint64_t* offsets, const uint8_t* classes, size_t size)
      : blob_(blob, blob + offsets[size]),
        offsets_(offsets, offsets + size + 1),
        classes_(classes, classes + size) {}

  // An id outside the vocabulary shows nothing.
  uint8_t classes_of(int32_t token) const { return has(token) ? classes_[token] : uint8_t{kBlank}; }

  void append_bytes(int32_t token, std::string& out) const {
    if (!has(token)) return;
    const char* bytes = reinterpret_cast<const char*>(blob_.data());
    out.append(bytes + offsets_[token], bytes + offsets_[token + 1]);
  }

 private:
  bool has(int32_t token) const {
    return token >= 0 && static_cast<size_t>(token) < classes_.size();
  }

  std::vector<uint8_t> blob_;
  std::vector<uint64_t> offsets_;
  std::vector<uint8_t> classes_;
};

}  // namespace reasoncache
