// RMSNorm: x / √(|x|² / K + ε) · w as x · w√K / √(|x|² + Kε).
#pragma once

#include <cmath>

#include "numbers.h"

struct Norm {
  int64_t K;            // a multiple of kLanes
  const float* weight;  // w√K; or none, and there is no norm
  const float* floor;   // Kε
};

inline void apply(const Norm& norm, const uint16_t* x_K, uint16_t* y_K) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t k = 0; k < norm.K; k += kLanes) {
    const __m512 x = from_bfloat16(x_K + k);
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  const __m512 length = _mm512_set1_ps(std::sqrt(_mm512_reduce_add_ps(squares) + *norm.floor));
  for (int64_t k = 0; k < norm.K; k += kLanes)
    store(y_K + k, from_bfloat16(x_K + k) * _mm512_loadu_ps(norm.weight + k) / length);
}
