// Linear layers, in bfloat16 or in 8 bits. Suffixes: M tokens, K inputs, N outputs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "layer.h"
#include "shared.h"
#include "sums.h"
#include "team.h"

constexpr float kLargest = 127.0f;
constexpr int kOffset = 128;  // the instruction takes unsigned inputs

#ifdef __AVX512F__
// A token's input as two rows of whole numbers + 128, the second of what the first leaves over, and its scale.
inline float whole_rows(const uint16_t* x_K, int64_t K, uint8_t* rows_2K) {
  // The largest as bits, which order absolute values as numbers do, and NaN above all: it is not to be lost.
  __m512i most = _mm512_castps_si512(_mm512_set1_ps(std::numeric_limits<float>::min()));
  for (int64_t k = 0; k < K; k += kLanes)
    most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(from_bfloat16(x_K + k))));
  const int32_t bits = _mm512_reduce_max_epi32(most);
  float largest;
  std::memcpy(&largest, &bits, sizeof bits);
  const float scale = largest / kLargest;
  const __m512 divisor = _mm512_set1_ps(scale), steps = _mm512_set1_ps(2 * kLargest);
  const __m512i offset = _mm512_set1_epi32(kOffset);
  for (int64_t k = 0; k < K; k += kLanes) {
    const __m512 quotient = _mm512_div_ps(from_bfloat16(x_K + k), divisor);
    const __m512 rounded = _mm512_roundscale_ps(quotient, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i first = _mm512_add_epi32(_mm512_cvtps_epi32(rounded), offset);
    const __m512i second = _mm512_add_epi32(_mm512_cvtps_epi32((quotient - rounded) * steps), offset);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rows_2K + k), _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rows_2K + K + k), _mm512_cvtepi32_epi8(second));
  }
  return scale;
}
#endif

// Inputs as the sums take them: of a token in 8 bits two rows and a scale, in bfloat16 one row of float.
template <typename Kind>
struct Inputs;

#ifdef __AVX512F__
template <>
struct Inputs<WholeNumbers> {
  static constexpr int kRows = 2;

  static float prepare(const uint16_t* x_K, int64_t K, uint8_t* rows) { return whole_rows(x_K, K, rows); }
  static __m512 result(const Layer& layer, int64_t n, const int32_t (*sums)[kPanel], int part, float scale) {
    const __m512 of_row = _mm512_loadu_ps(layer.scale_N + n);
    const __m512 ours = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums[0] + part)) * of_row;
    const __m512 left = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums[1] + part)) * of_row;
    return (ours + left / _mm512_set1_ps(2 * kLargest)) * _mm512_set1_ps(scale);
  }
};
#endif

template <>
struct Inputs<Bfloat16> {
  static constexpr int kRows = 1;

  static float prepare(const uint16_t* x_K, int64_t K, uint8_t* rows) {
    for (int64_t k = 0; k < K; k += kLanes) store(reinterpret_cast<float*>(rows) + k, from_bfloat16(x_K + k));
    return 1;
  }
  static Floats result(const Layer&, int64_t, const int32_t (*sums)[kPanel], int part, float) {
    return load(sums[0] + part);
  }
};

#ifdef __AVX512F__
template <>
struct Inputs<Bfloat16Pairs> : Inputs<Bfloat16> {
  static float prepare(const uint16_t* x_K, int64_t K, uint8_t* rows) {
    std::memcpy(rows, x_K, K * sizeof *x_K);
    return 1;
  }
};
#endif

// One panel of outputs for a few tokens, whose rows follow one another.
template <typename Kind, int kTokens>
void multiply_panel(const Layer& layer, int64_t panel, Ahead ahead, const uint8_t* rows, const float* scales,
                    uint16_t* y) {
  constexpr int kRows = Inputs<Kind>::kRows;
  const int64_t N = layer.N, n = panel * kPanel, steps = layer.K / Kind::kInputs;
  const uint8_t* const weight = static_cast<const uint8_t*>(layer.weight) + panel * steps * kBlocks * kLine;
  int32_t sums[kRows * kTokens][kPanel];
  sum_up<Kind, kRows * kTokens>(weight, steps, rows, steps * kStepBytes<Kind>,
                                layer.offsets_N == nullptr ? nullptr : layer.offsets_N + n, ahead, sums[0], kPanel);
  for (int token = 0; token < kTokens; ++token)
    for (int part = 0; part < kPanel && n + part < N; part += kLanes) {
      const int64_t at = n + part, left = std::min<int64_t>(N - at, kLanes);
      Floats out = Inputs<Kind>::result(layer, at, sums + kRows * token, part, scales[token]);
      if (layer.bias_N != nullptr) out = out + load(layer.bias_N + at);
      store_first(y + token * N + at, out, left);
    }
}

template <typename Kind, size_t... kLess>
constexpr auto multiply_panels(std::index_sequence<kLess...>) {
  return std::array{multiply_panel<Kind, kLess + 1>...};
}

template <typename Kind>
void multiply_all(const Layer& layer, int64_t M, const uint16_t* x, uint16_t* y, const void* next,
                  const Threads& threads) {
  constexpr int kRows = Inputs<Kind>::kRows;
  static constexpr auto kMultiply = multiply_panels<Kind>(std::make_index_sequence<Kind::kMostRows / kRows>());
  static thread_local std::vector<uint8_t> all_rows;
  static thread_local std::vector<float> all_scales;
  const int64_t steps = layer.K / Kind::kInputs, token_bytes = kRows * steps * kStepBytes<Kind>;
  all_rows.resize(M * token_bytes);
  all_scales.resize(M);
  uint8_t* const rows = all_rows.data();  // of this thread; others read them
  float* const scales = all_scales.data();
  for (int64_t m = 0; m < M; ++m) scales[m] = Inputs<Kind>::prepare(x + m * layer.K, layer.K, rows + m * token_bytes);
  // A panel has kBlocks lines for every step. The one that is likely next, since threads take turns, is fetched evenly
  // while this one's tokens take theirs.
  const int64_t together = (M * kRows > 2 * Kind::kMostRows ? Kind::kRowsOfMany : Kind::kMostRows) / kRows;
  const int64_t turns = (M + together - 1) / together, lines = (kBlocks + turns - 1) / turns;
  const int64_t panel_bytes = steps * kBlocks * kLine, num_panels = (layer.N + kPanel - 1) / kPanel;
  const uint8_t* const weight = static_cast<const uint8_t*>(layer.weight);
  threads.each(num_panels, [=, &layer, &threads](int64_t panel) {
    const int64_t likely = panel + threads.count();
    const uint8_t* const from = likely < num_panels ? weight + likely * panel_bytes
                                : next == nullptr
                                    ? nullptr
                                    : static_cast<const uint8_t*>(next) + (likely - num_panels) * panel_bytes;
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t m = turn * M / turns, num_tokens = (turn + 1) * M / turns - m, ahead = turn * lines;
      Ahead part;
      if (from != nullptr && ahead < kBlocks) part = Ahead{from + ahead * steps * kLine, lines};
      kMultiply[num_tokens - 1](layer, panel, part, rows + m * token_bytes, scales + m, y + m * layer.N);
    }
  });
}

// x [M, K] → y [M, N]; `next` is the weight whose turn is after this one, to be in the cache then, or none. Numbers that
// share exponents fetch what lies behind the weight instead.
inline void multiply(const Layer& layer, int64_t M, const uint16_t* x, uint16_t* y, const void* next,
                     const Threads& threads) {
  if (M == 0) return;
  switch (layer.way) {
    case Way::kFloat:
      return multiply_all<Bfloat16>(layer, M, x, y, next, threads);
#ifdef __AVX512F__
    case Way::kPairs:
      return multiply_all<Bfloat16Pairs>(layer, M, x, y, next, threads);
    case Way::kWhole8:
      return multiply_all<WholeNumbers>(layer, M, x, y, next, threads);
#else
    case Way::kSharedExponents:
      return multiply_shared(layer, M, x, y, threads);
#endif
    default:
      std::abort();  // what is not compiled in here; no layer says so
  }
}
