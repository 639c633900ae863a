// Linear layers in bfloat16. Suffixes: M tokens, K inputs, N outputs.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "sums.h"
#include "team.h"

struct Layer {
  int64_t K, N;         // K a multiple of kLanes
  const void* weight;   // in panels, the last one padded
  const float* bias_N;  // padded like the weight; or none
  int64_t in_pairs;     // whether Bfloat16Pairs multiplies
};

// One panel of outputs for a few tokens, whose rows follow one another.
template <typename Kind, int kTokens>
void multiply_panel(const Layer& layer, int64_t panel, Ahead ahead, const uint8_t* rows, uint16_t* y) {
  const int64_t N = layer.N, n = panel * kPanel, steps = layer.K / kInputs;
  const uint8_t* const weight = static_cast<const uint8_t*>(layer.weight) + panel * steps * kBlocks * kLine;
  float sums[kTokens][kPanel];
  sum_up<Kind, kTokens>(weight, steps, rows, steps * kStepBytes<Kind>, ahead, sums[0], kPanel);
  for (int token = 0; token < kTokens; ++token)
    for (int part = 0; part < kPanel && n + part < N; part += kLanes) {
      const int64_t at = n + part, left = std::min<int64_t>(N - at, kLanes);
      Floats out = load(sums[token] + part);
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
  static constexpr auto kMultiply = multiply_panels<Kind>(std::make_index_sequence<Kind::kMostRows>());
  static thread_local std::vector<float> wide;  // of this thread; others read it
  const int64_t steps = layer.K / kInputs, token_bytes = steps * kStepBytes<Kind>;
  const uint8_t* rows = reinterpret_cast<const uint8_t*>(x);
  if (Kind::kIsWide) {
    wide.resize(M * layer.K);
    for (int64_t i = 0; i < M * layer.K; i += kLanes) store(wide.data() + i, from_bfloat16(x + i));
    rows = reinterpret_cast<const uint8_t*>(wide.data());
  }
  // A panel has kBlocks lines for every step. The one that is likely next, since threads take turns, is fetched evenly
  // while this one's tokens take theirs.
  const int64_t together = M > 2 * Kind::kMostRows ? Kind::kRowsOfMany : Kind::kMostRows;
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
      kMultiply[num_tokens - 1](layer, panel, part, rows + m * token_bytes, y + m * layer.N);
    }
  });
}

// x [M, K] → y [M, N]; `next` is the weight whose turn is after this one, to be in the cache then, or none.
inline void multiply(const Layer& layer, int64_t M, const uint16_t* x, uint16_t* y, const void* next,
                     const Threads& threads) {
  if (M == 0) return;
#ifdef __AVX512F__
  if (layer.in_pairs != 0) return multiply_all<Bfloat16Pairs>(layer, M, x, y, next, threads);
#endif
  multiply_all<Bfloat16>(layer, M, x, y, next, threads);
}
