// SPDX-License-Identifier: Apache-2.0
// Memory for short texts made while reading: labels that are not a piece of the input.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

namespace reasoncache {

// Hands out room that stays where it is until the arena goes.
class TextArena {
public:
    // Room for `size` characters. Throws std::bad_alloc only.
    char32_t* allocate(size_t size) {
        if (size > left_) {
            const size_t room = std::max(size, kChunk);
            chunks_.push_back(std::make_unique<char32_t[]>(room));
            next_ = chunks_.back().get();
            left_ = room;
        }
        char32_t* const found = next_;
        next_ += size;
        left_ -= size;
        return found;
    }

    // One text after the other.
    template <typename... Parts>
    std::u32string_view join(Parts... parts) {
        const size_t size = (std::u32string_view(parts).size() + ...);
        char32_t* const start = allocate(size);
        char32_t* end = start;
        ((end = std::copy_n(std::u32string_view(parts).data(), std::u32string_view(parts).size(),
                            end)),
         ...);
        return {start, size};
    }

private:
    static constexpr size_t kChunk = 256;
    std::vector<std::unique_ptr<char32_t[]>> chunks_;
    char32_t* next_ = nullptr;
    size_t left_ = 0;
};

}  // namespace reasoncache
