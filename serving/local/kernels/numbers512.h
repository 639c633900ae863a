// Sixteen numbers in a register of AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

using Floats = __m512;
using Line = __m512i;    // whatever is in 64 bytes
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
