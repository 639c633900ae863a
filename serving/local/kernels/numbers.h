// Vectors of sixteen numbers: one AVX-512 register, or two of AVX2. A bfloat16 number is a uint16_t. Both give the same
// bits: sums over lanes, too, have one order.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

constexpr int kLanes = 16;  // 32-bit numbers in a vector
constexpr int kLine = 64;   // bytes of a cache line, and of a vector

#ifdef __AVX512F__

// With AVX-512.

using Floats = __m512;
using Line = __m512i;    // 64 bytes of any content
using Spread = __m512i;  // the same 32 bits in all lanes of one

inline Floats load(const void* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats spread(float x) { return _mm512_set1_ps(x); }
inline Floats multiply_add(Floats x, Floats y, Floats sum) { return _mm512_fmadd_ps(x, y, sum); }
inline Floats larger(Floats x, Floats y) { return _mm512_max_ps(x, y); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }

inline Floats rounded(Floats x) {  // to the nearest whole number, of two the even one
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// The first `count` of them, and others for the rest.
inline Floats load_first(const float* from, int64_t count, Floats others) {
  return _mm512_mask_loadu_ps(others, (1u << count) - 1, from);
}

inline Floats where_negative(Floats x, Floats then, Floats otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), otherwise, then);
}

// power · 2^whole, and 0 where x is below the bound.
inline Floats scaled_unless_below(Floats x, float bound, Floats power, Floats whole) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_NLT_UQ), power, whole);
}

inline Floats widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m256i to_bfloat16(Floats x) {  // the nearest, of two the even one
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sums = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sums, 16));
}

inline void store_first(uint16_t* to, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(to, (1u << count) - 1, to_bfloat16(x));
}

inline Line load_line(const void* from) { return _mm512_loadu_si512(from); }
inline void store_line(void* to, Line x) { _mm512_storeu_si512(to, x); }
inline Line no_line() { return _mm512_setzero_si512(); }
inline Spread spread_bits(int32_t x) { return _mm512_set1_epi32(x); }

// Of 16 pairs in bfloat16 the first or the second, as float.
inline Line one_of_pairs(Line x, int which) {
  return which == 0 ? _mm512_slli_epi32(x, 16) : _mm512_and_si512(x, _mm512_set1_epi32(~0xffff));
}

inline Line multiply_add(Spread x, Line y, Line sums) {  // as float
  return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), _mm512_castsi512_ps(sums)));
}

#else

// With AVX2.

struct Floats {
  __m256 low, high;
};

struct Line {  // 64 bytes of any content
  __m256i low, high;
};

using Spread = __m256i;  // the same 32 bits in all lanes of one

inline Floats operator+(Floats x, Floats y) { return {x.low + y.low, x.high + y.high}; }
inline Floats operator-(Floats x, Floats y) { return {x.low - y.low, x.high - y.high}; }
inline Floats operator*(Floats x, Floats y) { return {x.low * y.low, x.high * y.high}; }
inline Floats operator/(Floats x, Floats y) { return {x.low / y.low, x.high / y.high}; }

inline Floats load(const void* from) {
  const float* const numbers = static_cast<const float*>(from);
  return {_mm256_loadu_ps(numbers), _mm256_loadu_ps(numbers + 8)};
}
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
inline Floats spread(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats multiply_add(Floats x, Floats y, Floats sum) {
  return {_mm256_fmadd_ps(x.low, y.low, sum.low), _mm256_fmadd_ps(x.high, y.high, sum.high)};
}
inline Floats larger(Floats x, Floats y) { return {_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)}; }
inline Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}

// Adds half to half, in the order of AVX-512's reductions.
inline float sum_of(Floats x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
inline float largest_of(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Floats rounded(Floats x) {  // to the nearest whole number, of two the even one
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kNearest), _mm256_round_ps(x.high, kNearest)};
}

// The first `count` of them, and others for the rest.
inline Floats load_first(const float* from, int64_t count, Floats others) {
  const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i left = _mm256_set1_epi32(static_cast<int>(count)), of_high = _mm256_sub_epi32(left, _mm256_set1_epi32(8));
  const __m256i low = _mm256_cmpgt_epi32(left, place), high = _mm256_cmpgt_epi32(of_high, place);
  return {_mm256_blendv_ps(others.low, _mm256_maskload_ps(from, low), _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(others.high, _mm256_maskload_ps(from + 8, high), _mm256_castsi256_ps(high))};
}

inline __m256 where_negative(__m256 x, __m256 then, __m256 otherwise) {
  return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}
inline Floats where_negative(Floats x, Floats then, Floats otherwise) {
  return {where_negative(x.low, then.low, otherwise.low), where_negative(x.high, then.high, otherwise.high)};
}

// power · 2^whole, and 0 where x is below the bound.
inline __m256 scaled_unless_below(__m256 x, float bound, __m256 power, __m256 whole) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  const __m256 scaled = power * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_NLT_UQ));
}
inline Floats scaled_unless_below(Floats x, float bound, Floats power, Floats whole) {
  return {scaled_unless_below(x.low, bound, power.low, whole.low),
          scaled_unless_below(x.high, bound, power.high, whole.high)};
}

inline Floats widened(__m256i x) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}

inline __m256i upper_halves(__m256 x) {  // rounded to bfloat16: nearest, ties to even
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff))), 16);
}
inline __m256i to_bfloat16(Floats x) {
  // The pack instruction interleaves quarters.
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(upper_halves(x.low), upper_halves(x.high)), 0b11011000);
}

inline void store_first(uint16_t* to, Floats x, int64_t count) {
  const __m256i all = to_bfloat16(x);
  std::memcpy(to, &all, count * sizeof *to);
}

inline Line load_line(const void* from) {
  const __m256i* const halves = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline void store_line(void* to, Line x) {
  __m256i* const halves = static_cast<__m256i*>(to);
  _mm256_storeu_si256(halves, x.low);
  _mm256_storeu_si256(halves + 1, x.high);
}
inline Line no_line() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Spread spread_bits(int32_t x) { return _mm256_set1_epi32(x); }

// Of 16 pairs in bfloat16 the first or the second, as float.
inline Line one_of_pairs(Line x, int which) {
  if (which == 0) return {_mm256_slli_epi32(x.low, 16), _mm256_slli_epi32(x.high, 16)};
  const __m256i upper = _mm256_set1_epi32(~0xffff);
  return {_mm256_and_si256(x.low, upper), _mm256_and_si256(x.high, upper)};
}

inline __m256i multiply_add(__m256i x, __m256i y, __m256i sums) {  // as float
  return _mm256_castps_si256(_mm256_fmadd_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(y), _mm256_castsi256_ps(sums)));
}
inline Line multiply_add(Spread x, Line y, Line sums) {
  return {multiply_add(x, y.low, sums.low), multiply_add(x, y.high, sums.high)};
}

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

// exp of numbers ≤ 0, to 2e-7; 0 for x < −87, where the result would be denormal. NaN stays.
inline Floats exp_of(Floats x) {
  const Floats scaled = x * spread(1.44269504f), whole = rounded(scaled);
  const Floats part = scaled - whole;  // 2^part by the Taylor series of exp(part · ln 2)
  Floats power = spread(1.54035304e-4f);
  for (const float term : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    power = multiply_add(power, part, spread(term));
  return scaled_unless_below(x, -87.0f, power, whole);
}
