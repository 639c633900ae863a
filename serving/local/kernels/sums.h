// What linear layers and attention have in common: a few rows times one panel of a weight.
//
// A weight lies in panels of kPanel outputs, [panels, steps, kPanel, inputs of a step]: what is read together lies
// together. A number is summed up input by input, whatever rows are beside its own.
#pragma once

#include <cstring>

#include "numbers.h"

constexpr int kBlocks = 4;                // registers of outputs at a time
constexpr int kPanel = kBlocks * kLanes;  // outputs that lie together
constexpr int kSoon = 12;                 // steps ahead from which the nearest cache is filled
constexpr int kInputs = 2;                // of a step

// Most rows of float at a time, and how much of a panel's width for so many: the CPU has 32 registers of sixteen numbers
// or 16 of eight, and what is multiplied needs some of them.
#ifdef __AVX512F__
constexpr int kFloatRows = 12;
constexpr int wide_for(int rows) { return rows <= 6 ? kBlocks : 2; }
#else
constexpr int kFloatRows = 6;
constexpr int wide_for(int rows) { return rows <= 2 ? 2 : 1; }
#endif

// Of every kind of sum kMostRows rows are multiplied at a time, kRowsOfMany where there are more than twice as many.

// Weights are widened once for all rows, which are in float.
struct Bfloat16 {
  static constexpr bool kIsWide = true;
  static constexpr int kMostRows = kFloatRows, kRowsOfMany = kFloatRows;

  [[gnu::always_inline]] static Line part(Line w, int which) { return one_of_pairs(w, which); }
  [[gnu::always_inline]] static Line add(Line sums, Spread x, Line w) { return multiply_add(x, w, sums); }
};

#ifdef __AVX512F__
// Both inputs at once, rows in bfloat16 too, for CPUs that have the instruction. AMD's do that as fast as one product
// of float, others take longer than for two.
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

// In how many parts a step is multiplied, and bytes of one row for a step.
template <typename Kind>
constexpr int kParts = Kind::kIsWide ? kInputs : 1;
template <typename Kind>
constexpr int64_t kStepBytes = 4 * kParts<Kind>;

// Registers of one row's sums, or of a weight, side by side. Members, not an array: GCC keeps those in registers.
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

// What is to be in the cache when its turn comes: `lines` at every step of a panel, from `from` on.
struct Ahead {
  const uint8_t* from = nullptr;
  int64_t lines = 0;
};

// Some registers' width of a panel, `weight` its first line.
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

// kRows rows, `stride` bytes from one to the next, times `steps` of a panel: sums [kRows, kPanel], `apart` numbers from
// one row to the next. Many rows take one part of the panel after the other: a weight is widened less often than with
// one part of the rows after the other.
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
