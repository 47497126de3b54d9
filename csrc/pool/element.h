// SPDX-License-Identifier: Apache-2.0
// The element types of a KV pool and their exact conversion to fp32.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "pool/vector.h"

namespace reasoncache {

struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};
struct Float8E4M3 {  // e4m3fn: no infinity, NaN is 0x7f and 0xff
  std::uint8_t bits;
};
struct Float8E5M2 {  // the upper byte of a Float16
  std::uint8_t bits;
};

namespace portable {

// Decodes a float of a sign bit, `exponent_bits` and `mantissa_bits`, with arithmetic on normal numbers only.
constexpr float decode(unsigned bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
  const unsigned exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const bool negative = ((bits >> (mantissa_bits + exponent_bits)) & 1) != 0;
  const unsigned last = (1u << exponent_bits) - 1;
  float value = 0;
  if (exponent == last && has_infinity) {
    value = mantissa ? __builtin_nanf("") : __builtin_inff();
  } else if (exponent == last && mantissa == (1u << mantissa_bits) - 1 && !has_infinity) {
    value = __builtin_nanf("");
  } else {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    int power = (exponent ? static_cast<int>(exponent) : 1) - bias - mantissa_bits;
    value = static_cast<float>(exponent ? mantissa + (1u << mantissa_bits) : mantissa);
    for (; power > 0; --power) value *= 2;
    for (; power < 0; ++power) value /= 2;
  }
  return negative ? -value : value;
}

template <int exponent_bits, int mantissa_bits, bool has_infinity>
constexpr std::array<float, 256> table_of_bytes() {
  std::array<float, 256> table{};
  for (unsigned bits = 0; bits < 256; ++bits) {
    table[bits] = decode(bits, exponent_bits, mantissa_bits, has_infinity);
  }
  return table;
}

constexpr std::array<float, 256> kE4M3 = table_of_bytes<4, 3, false>();
constexpr std::array<float, 256> kE5M2 = table_of_bytes<5, 2, true>();

inline float from_half(std::uint16_t half) {
  std::uint32_t magnitude = half & 0x7fffu;
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  float value;
  if (magnitude < 0x0400u) {  // zero or subnormal: a multiple of 2^-24
    value = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&magnitude, &value, 4);
  } else {
    magnitude = (magnitude << 13) + (magnitude >= 0x7c00u ? (255u - 31u) << 23 : 112u << 23);
  }
  magnitude |= sign;
  std::memcpy(&value, &magnitude, 4);
  return value;
}

}  // namespace portable

RC_INLINE Floats from_half(Shorts half) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)half);
#elif defined(__AVX__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)half);
#else
  Floats value{};
  for (int i = 0; i < kLanes; ++i) value[i] = portable::from_half(half[i]);
  return value;
#endif
}

RC_INLINE Floats load(const float* from) { return unaligned<Floats>(from); }

RC_INLINE Floats load(const Bfloat16* from) {
  return (Floats)(widened(unaligned<Shorts>(from)) << 16);
}

RC_INLINE Floats load(const Float16* from) { return from_half(unaligned<Shorts>(from)); }

#if defined(__AVX512F__) || (defined(__AVX__) && defined(__F16C__))

// Converts through fp16, which is several times faster than a table look-up for each lane.
RC_INLINE Floats load(const Float8E5M2* from) {
  return from_half(widened(unaligned<Bytes>(from)) << 8);
}

// Read as fp16, the shifted bits are the value times 2^-8. The magnitude 0x7f means NaN, not 480.
RC_INLINE Floats load(const Float8E4M3* from) {
  const Shorts bits = widened(unaligned<Bytes>(from));
  const Shorts magnitude = bits & 0x7f;
  const Floats value = from_half((magnitude << 7) | ((bits & 0x80) << 8)) * 256.0f;
  const Ints is_nan = __builtin_convertvector(magnitude, Ints) == 0x7f;
  return (Floats)((Ints)value | is_nan);
}

#else

RC_INLINE Floats load(const Float8E5M2* from) {
  Floats value{};
  for (int i = 0; i < kLanes; ++i) value[i] = portable::kE5M2[from[i].bits];
  return value;
}

RC_INLINE Floats load(const Float8E4M3* from) {
  Floats value{};
  for (int i = 0; i < kLanes; ++i) value[i] = portable::kE4M3[from[i].bits];
  return value;
}

#endif

// Loads only `count` elements, which must be fewer than kLanes. The other lanes are zero.
template <class Element>
RC_INLINE Floats load_some(const Element* from, std::int64_t count) {
  Element padded[kLanes];
  std::memset(static_cast<void*>(padded), 0, sizeof padded);
  std::memcpy(static_cast<void*>(padded), from, static_cast<std::size_t>(count) * sizeof(Element));
  return load(padded);
}

}  // namespace reasoncache
