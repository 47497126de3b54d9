// SPDX-License-Identifier: Apache-2.0
// Operations on fp32 numbers that only attention needs: exp, sums across lanes, stores, conversions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "pool/element.h"

namespace reasoncache {
namespace attention {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

RC_INLINE Floats all_of(float value) { return Floats{} + value; }

// Keeps `value` in a register. Otherwise the compiler would load it again for each product.
RC_INLINE Floats held(Floats value) {
#if defined(__AVX__)
  asm("" : "+v"(value));
#endif
  return value;
}

RC_INLINE void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

RC_INLINE Floats select(Ints condition, Floats yes, Floats no) {
  return condition ? yes : no;
}

// exp(x) within 2 ulp for x in [-87, 88], 0 for x below -87, NaN for NaN. x must not be above 88.
RC_INLINE Floats exp_of(Floats x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits of the sum.
  const Floats magic = all_of(12582912.0f);
  const Floats shifted = multiply_add(x, all_of(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = multiply_add(n, all_of(-0.693359375f), x);
  r = multiply_add(n, all_of(2.12194440e-4f), r);
  Floats p = all_of(1.9875691500e-4f);
  p = multiply_add(p, r, all_of(1.3981999507e-3f));
  p = multiply_add(p, r, all_of(8.3334519073e-3f));
  p = multiply_add(p, r, all_of(4.1665795894e-2f));
  p = multiply_add(p, r, all_of(1.6666665459e-1f));
  p = multiply_add(p, r, all_of(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + 1.0f);
  const Floats power = (Floats)(((Words)shifted - (Words)magic + 127) << 23);
  return select(x < -87.0f, Floats{}, p * power);
}

// cap * tanh(x / cap)
RC_INLINE Floats soft_cap(Floats x, float cap) {
  Floats y = x / cap;
  y = select(y > 20.0f, all_of(20.0f), select(y < -20.0f, all_of(-20.0f), y));
  return cap * (1.0f - 2.0f / (exp_of(y + y) + 1.0f));
}

// Lane i of the result is the sum of the lanes of v[i].
RC_INLINE Floats sums_of(const Floats (&v)[kLanes]) {
#if defined(__AVX512F__)
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = (__m512)v[4 * i];
    const __m512 b = (__m512)v[4 * i + 1];
    const __m512 c = (__m512)v[4 * i + 2];
    const __m512 d = (__m512)v[4 * i + 3];
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  const auto join = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
  };
  return (Floats)join(join(quads[0], quads[1]), join(quads[2], quads[3]));
#elif defined(__AVX__)
  __m256 quads[2];
  for (int i = 0; i < 2; ++i) {
    quads[i] = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[4 * i], (__m256)v[4 * i + 1]),
                              _mm256_hadd_ps((__m256)v[4 * i + 2], (__m256)v[4 * i + 3]));
  }
  return (Floats)_mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
                               _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
#else
  Floats sums{};
  for (int i = 0; i < kLanes; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) sums[i] += v[i][lane];
  }
  return sums;
#endif
}

// Writes an fp32 number as an element, rounded to the nearest, ties to even.
inline void put(float* to, float value) { *to = value; }

inline void put(Bfloat16* to, float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to->bits = static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}

inline void put(Float16* to, float value) {
#if defined(__AVX__) && defined(__F16C__)
  to->bits = static_cast<std::uint16_t>(
      _mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  std::uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // rounds to 2^16 or more
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {  // subnormal: a multiple of 2^-24, rounded by the addition
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::uint32_t sum;
    std::memcpy(&sum, &magnitude, 4);
    half = sum - 0x3f000000u;
  } else {
    half = (bits - 0x38000000u + 0x0fffu + ((bits >> 13) & 1)) >> 13;
  }
  to->bits = static_cast<std::uint16_t>(half | sign);
#endif
}

inline float get(const float* from) { return *from; }

inline float get(const Bfloat16* from) {
  const std::uint32_t bits = static_cast<std::uint32_t>(from->bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float get(const Float16* from) { return portable::from_half(from->bits); }

}  // namespace attention
}  // namespace reasoncache
