// Numbers in registers of sixteen: of AVX-512, or of AVX2 two by two. One in bfloat16 is a uint16_t. Either way gives the
// same bits: the sums over a register's lanes, too, are taken in one order.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

constexpr int kLanes = 16;  // 32-bit numbers of a register
constexpr int kLine = 64;   // bytes that memory is read in, and of a register

#ifdef __AVX512F__
#include "numbers512.h"
#else
#include "numbers256.h"
#endif

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline Floats from_bfloat16(const uint16_t* x) {
  return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

inline void store(uint16_t* y, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), to_bfloat16(x)); }

// exp of numbers ≤ 0, to 2e-7; below e⁻⁸⁷, where denormals would come, it is 0. NaN stays.
inline Floats exp_of(Floats x) {
  const Floats scaled = x * spread(1.44269504f), whole = rounded(scaled);
  const Floats part = scaled - whole;  // 2^part as Taylor's series of exp(part · ln 2)
  Floats power = spread(1.54035304e-4f);
  for (const float term : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    power = multiply_add(power, part, spread(term));
  return scaled_unless_below(x, -87.0f, power, whole);
}
