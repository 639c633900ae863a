// A linear layer as its weight and what goes with it. Suffixes: K inputs, N outputs.
#pragma once

#include <cstdint>

// How it multiplies; the other side names them alike (library.py).
enum class Way : int64_t { kFloat, kPairs, kSharedExponents, kWhole8 };

struct Layer {
  int64_t K, N;              // K a multiple of kLanes
  const void* weight;        // as the way reads it; all that a layer keeps is padded to whole panels
  const int32_t* offsets_N;  // in 8 bits: takes off the sums what the inputs' offset adds to them
  const float* scale_N;      // in 8 bits
  const float* bias_N;       // or none
  Way way;
};
