// RMSNorm, products of a few rows with one panel of a weight (attention uses them, too), and linear layers in bfloat16.
// Suffixes: M tokens, K inputs, N outputs.
//
// A weight is stored in panels of kPanel outputs, [panels, steps, kPanel, inputs of a step], in the order in which it
// is read. Each output is summed input by input, independent of other rows.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "numbers.h"
#include "team.h"

// RMSNorm: x / √(|x|² / K + ε) · w as x · w√K / √(|x|² + Kε).
struct Norm {
  int64_t K;            // a multiple of kLanes
  const float* weight;  // w√K; null: no norm
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

constexpr int kBlocks = 4;                // registers of outputs at a time
constexpr int kPanel = kBlocks * kLanes;  // outputs that are stored together
constexpr int kSoon = 12;                 // how many steps ahead to prefetch into the L1 cache
constexpr int kInputs = 2;                // inputs in a step

// Most float rows at a time, and the part of a panel's width for so many: the CPU has 32 registers of sixteen numbers
// or 16 of eight, and the factors need some of them.
#ifdef __AVX512F__
constexpr int kFloatRows = 12;
constexpr int wide_for(int rows) { return rows <= 6 ? kBlocks : 2; }
#else
constexpr int kFloatRows = 6;
constexpr int wide_for(int rows) { return rows <= 2 ? 2 : 1; }
#endif

// Each kind of product takes kMostRows rows at a time, or kRowsOfMany if there are more than twice as many.

// Rows in float; weights are widened to float once for all rows.
struct Bfloat16 {
  static constexpr bool kIsWide = true;
  static constexpr int kMostRows = kFloatRows, kRowsOfMany = kFloatRows;

  [[gnu::always_inline]] static Line part(Line w, int which) { return one_of_pairs(w, which); }
  [[gnu::always_inline]] static Line add(Line sums, Spread x, Line w) { return multiply_add(x, w, sums); }
};

#ifdef __AVX512F__
// Two inputs at once, rows in bfloat16, for CPUs with AVX512-BF16. AMD's run it as fast as one float product; others
// take longer for it than for two.
struct Bfloat16Pairs {
  static constexpr bool kIsWide = false;
  static constexpr int kMostRows = 12, kRowsOfMany = 6;

  [[gnu::always_inline]] static __m512i part(__m512i w, int) { return w; }
  [[gnu::always_inline]] static __m512i add(__m512i sums, __m512i x, __m512i w) {
    return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sums), reinterpret_cast<__m512bh>(x),
                                                reinterpret_cast<__m512bh>(w)));
  }
};
#endif

// Number of parts in which a step is multiplied, and bytes of one row for a step.
template <typename Kind>
constexpr int kParts = Kind::kIsWide ? kInputs : 1;
template <typename Kind>
constexpr int64_t kStepBytes = 4 * kParts<Kind>;

// Registers of one row's sums, or of a weight. Members, not an array: GCC keeps members in registers.
template <typename Kind, int kWide>
struct Registers {
  Registers<Kind, kWide - 1> others;
  Line last;

  [[gnu::always_inline]] void load(const void* from) {
    others.load(from);
    last = load_line(static_cast<const uint8_t*>(from) + (kWide - 1) * kLine);
  }
  [[gnu::always_inline]] void clear() {
    others.clear();
    last = no_line();
  }
  [[gnu::always_inline]] void take_part(const Registers& weight, int which) {
    others.take_part(weight.others, which);
    last = Kind::part(weight.last, which);
  }
  [[gnu::always_inline]] void add(Spread x, const Registers& weight) {
    others.add(x, weight.others);
    last = Kind::add(last, x, weight.last);
  }
  [[gnu::always_inline]] void store(float* to) const {
    others.store(to);
    store_line(to + (kWide - 1) * kLanes, last);
  }
};

template <typename Kind>
struct Registers<Kind, 0> {
  void load(const void*) {}
  void clear() {}
  void take_part(const Registers&, int) {}
  void add(Spread, const Registers&) {}
  void store(float*) const {}
};

// Sums of some rows.
template <typename Kind, int kRows, int kWide>
struct Sums {
  Sums<Kind, kRows - 1, kWide> others;
  Registers<Kind, kWide> row;

  [[gnu::always_inline]] void clear() {
    others.clear();
    row.clear();
  }
  [[gnu::always_inline]] void add(const uint8_t* rows, int64_t stride, const Registers<Kind, kWide>& weight) {
    others.add(rows, stride, weight);
    int32_t one;
    std::memcpy(&one, rows + (kRows - 1) * stride, sizeof one);
    row.add(spread_bits(one), weight);
  }
  [[gnu::always_inline]] void end(float* sums, int64_t apart) const {
    others.end(sums, apart);
    row.store(sums + (kRows - 1) * apart);
  }
};

template <typename Kind, int kWide>
struct Sums<Kind, 0, kWide> {
  void clear() {}
  void add(const uint8_t*, int64_t, const Registers<Kind, kWide>&) {}
  void end(float*, int64_t) const {}
};

// Prefetch: `lines` cache lines at every step of a panel, from `from` on.
struct Ahead {
  const uint8_t* from = nullptr;
  int64_t lines = 0;
};

// A product with a part of a panel's width; `weight` is the first line of the part.
template <typename Kind, int kRows, int kWide>
[[gnu::always_inline]] inline void sum_up_part(const uint8_t* weight, int64_t steps, const uint8_t* row, int64_t stride,
                                               Ahead ahead, float* sums, int64_t apart) {
  Registers<Kind, kWide> lines, part;
  Sums<Kind, kRows, kWide> running;
  running.clear();
  for (int64_t step = 0; step < steps; ++step, weight += kBlocks * kLine) {
    for (int64_t line = 0; line < ahead.lines; ++line, ahead.from += kLine) _mm_prefetch(ahead.from, _MM_HINT_T1);
    for (int line = 0; line < kWide; ++line)
      _mm_prefetch(weight + (kSoon * kBlocks + line) * kLine, _MM_HINT_T0);
    lines.load(weight);
#pragma GCC unroll 2
    for (int which = 0; which < kParts<Kind>; ++which, row += 4) {
      part.take_part(lines, which);
      running.add(row, stride, part);
    }
  }
  running.end(sums, apart);
}

// kRows rows, `stride` bytes apart, times `steps` of a panel: sums [kRows, kPanel], `apart` numbers from row to row.
// Many rows take the panel part by part: so weights are widened less often than if the rows were split.
template <typename Kind, int kRows>
void sum_up(const void* panel, int64_t steps, const void* rows, int64_t stride, Ahead ahead, float* sums,
            int64_t apart) {
  constexpr int kWide = wide_for(kRows), kTimes = kBlocks / kWide;
  for (int first = 0; first < kBlocks; first += kWide) {
    const int64_t lines = (ahead.lines + kTimes - 1 - first / kWide) / kTimes;
    sum_up_part<Kind, kRows, kWide>(static_cast<const uint8_t*>(panel) + first * kLine, steps,
                                    static_cast<const uint8_t*>(rows), stride, Ahead{ahead.from, lines},
                                    sums + first * kLanes, apart);
    ahead.from += lines * steps * kLine;
  }
}

struct Layer {
  int64_t K, N;         // K a multiple of kLanes
  const void* weight;   // in panels, the last one padded
  const float* bias_N;  // padded like the weight; or null
  int64_t in_pairs;     // whether Bfloat16Pairs multiplies
};

// One panel of outputs for a few tokens in consecutive rows.
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
  static thread_local std::vector<float> wide;  // each caller has its own; helper threads read it
  const int64_t steps = layer.K / kInputs, token_bytes = steps * kStepBytes<Kind>;
  const uint8_t* rows = reinterpret_cast<const uint8_t*>(x);
  if (Kind::kIsWide) {
    wide.resize(M * layer.K);
    for (int64_t i = 0; i < M * layer.K; i += kLanes) store(wide.data() + i, from_bfloat16(x + i));
    rows = reinterpret_cast<const uint8_t*>(wide.data());
  }
  // A panel has kBlocks lines for every step. The panel that this thread likely takes next is prefetched evenly while
  // this one is multiplied.
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

// x [M, K] → y [M, N]; `next` is the weight that is read after this one, to be prefetched; or null.
inline void multiply(const Layer& layer, int64_t M, const uint16_t* x, uint16_t* y, const void* next,
                     const Threads& threads) {
  if (M == 0) return;
#ifdef __AVX512F__
  if (layer.in_pairs != 0) return multiply_all<Bfloat16Pairs>(layer, M, x, y, next, threads);
#endif
  multiply_all<Bfloat16>(layer, M, x, y, next, threads);
}
