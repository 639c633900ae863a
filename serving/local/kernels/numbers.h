// Numbers in registers of sixteen. One in bfloat16 is a uint16_t.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

constexpr int kLanes = 16;  // 32-bit numbers of a register

inline __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m512 from_bfloat16(const uint16_t* x) {
  return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

inline __m256i to_bfloat16(__m512 x) {  // the nearest, of two the even one
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline void store(uint16_t* y, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), to_bfloat16(x));
}

// exp of numbers ≤ 0, to 2e-7; below e⁻⁸⁷, where denormals would come, it is 0. NaN stays.
inline __m512 exp_of(__m512 x) {
  const __mmask16 is_seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(scaled, whole);  // 2^part as Taylor's series of exp(part · ln 2)
  __m512 power = _mm512_set1_ps(1.54035304e-4f);
  for (const float term : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(term));
  return _mm512_maskz_scalef_ps(is_seen, power, whole);
}
