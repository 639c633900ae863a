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
  Floats squares = spread(0.0f);
  for (int64_t k = 0; k < norm.K; k += kLanes) {
    const Floats x = from_bfloat16(x_K + k);
    squares = multiply_add(x, x, squares);
  }
  const Floats length = spread(std::sqrt(sum_of(squares) + *norm.floor));
  for (int64_t k = 0; k < norm.K; k += kLanes)
    store(y_K + k, from_bfloat16(x_K + k) * load(norm.weight + k) / length);
}
