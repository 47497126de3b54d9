// SPDX-License-Identifier: Apache-2.0
// Vector types of the compiler. A vector has as many fp32 lanes as a register of the target CPU. GCC
// and clang compile these types for any CPU. Intrinsics are used only where they are faster.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace reasoncache {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#define RC_INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));

template <class Vector>
RC_INLINE Vector unaligned(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// a * b + c, fused on x86 CPUs with FMA. The flag -ffp-contract=off keeps the compiler from fusing on its own.
RC_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Returns lanes 1, 0, 3, 2, 5, 4, ... of v.
RC_INLINE Floats swap_neighbours(Floats v) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permute_ps((__m512)v, 0xB1);
#elif defined(__AVX__)
  return (Floats)_mm256_permute_ps((__m256)v, 0xB1);
#elif defined(__clang__)
  return __builtin_shufflevector(v, v, 1, 0, 3, 2);
#else
  return __builtin_shuffle(v, Ints{1, 0, 3, 2});
#endif
}

// Lane i of the result is v[(i + by) % of].
template <int by, int of = kLanes>
RC_INLINE Floats turned(Floats v) {
  Ints from;
  for (int lane = 0; lane < kLanes; ++lane) from[lane] = (lane + by) % of;
#if defined(__clang__)
  Floats found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = v[from[lane]];
  return found;
#else
  return __builtin_shuffle(v, from);
#endif
}

// Uses intrinsics: with __builtin_convertvector GCC 12 splits the vector, which takes three times as long.
RC_INLINE Words widened(Shorts v) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Words);
#endif
}

RC_INLINE Shorts widened(Bytes v) {
#if defined(__AVX512F__)
  return (Shorts)_mm256_cvtepu8_epi16((__m128i)v);
#else
  return __builtin_convertvector(v, Shorts);
#endif
}

// Sum of all lanes.
RC_INLINE double sum_of(const Doubles& v) {
  double total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// Prefetches into the second-level cache, because the first-level cache allows too few pending misses.
RC_INLINE void prefetch(std::uintptr_t address) {
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2);
}

}  // namespace reasoncache
