// What linear layers and attention have in common: a few rows times one panel of a weight.
//
// A weight lies in panels of kPanel outputs, [panels, steps, kPanel, inputs of a step]: what is read together lies
// together. A number is summed up input by input, whatever rows are beside its own.
#pragma once

#include <cstring>

#include "numbers.h"

constexpr int kBlocks = 4;                // registers of outputs at a time
constexpr int kPanel = kBlocks * kLanes;  // outputs that lie together
constexpr int kMostRows = 6;              // at a time: times kBlocks they fill the registers
constexpr int kLine = 64;                 // bytes that memory is read in, and of a register

// In 8 bits a step is four inputs, which one instruction multiplies and adds up in a lane.
struct WholeNumbers {
  static constexpr int kInputs = 4, kParts = 1;

  [[gnu::always_inline]] static __m512i part(__m512i w, int) { return w; }
  [[gnu::always_inline]] static __m512i add(__m512i sums, __m512i x, __m512i w) {
    return _mm512_dpbusd_epi32(sums, x, w);
  }
};

// In bfloat16 it is two, which are widened once for all rows: the instruction for pairs takes twice as long.
struct Bfloat16 {
  static constexpr int kInputs = 2, kParts = 2;

  [[gnu::always_inline]] static __m512i part(__m512i w, int which) {
    return which == 0 ? _mm512_slli_epi32(w, 16) : _mm512_and_si512(w, _mm512_set1_epi32(~0xffff));
  }
  [[gnu::always_inline]] static __m512i add(__m512i sums, __m512i x, __m512i w) {
    return _mm512_castps_si512(
        _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), _mm512_castsi512_ps(sums)));
  }
};

// Bytes of one row for one step: uint8_t for WholeNumbers, float for Bfloat16.
template <typename Kind>
constexpr int64_t kStepBytes = 4 * Kind::kParts;

// Sums of some rows over one panel of outputs. Members, not an array: GCC keeps those in registers.
template <typename Kind, int kRows>
struct Sums {
  Sums<Kind, kRows - 1> others;
  __m512i a, b, c, d;

  [[gnu::always_inline]] void begin(__m512i from_a, __m512i from_b, __m512i from_c, __m512i from_d) {
    others.begin(from_a, from_b, from_c, from_d);
    a = from_a, b = from_b, c = from_c, d = from_d;
  }

  [[gnu::always_inline]] void add(const uint8_t* rows, int64_t stride, __m512i a_w, __m512i b_w, __m512i c_w,
                                  __m512i d_w) {
    others.add(rows, stride, a_w, b_w, c_w, d_w);
    int32_t one;
    std::memcpy(&one, rows + (kRows - 1) * stride, sizeof one);
    const __m512i x = _mm512_set1_epi32(one);
    a = Kind::add(a, x, a_w);
    b = Kind::add(b, x, b_w);
    c = Kind::add(c, x, c_w);
    d = Kind::add(d, x, d_w);
  }

  [[gnu::always_inline]] void end(int32_t* sums, int64_t stride) const {
    others.end(sums, stride);
    int32_t* const own = sums + (kRows - 1) * stride;
    _mm512_storeu_si512(own, a);
    _mm512_storeu_si512(own + kLanes, b);
    _mm512_storeu_si512(own + 2 * kLanes, c);
    _mm512_storeu_si512(own + 3 * kLanes, d);
  }
};

template <typename Kind>
struct Sums<Kind, 0> {
  void begin(__m512i, __m512i, __m512i, __m512i) {}
  void add(const uint8_t*, int64_t, __m512i, __m512i, __m512i, __m512i) {}
  void end(int32_t*, int64_t) const {}
};

// What is to be in the cache when its turn comes: `lines` at every step, from `from` on.
struct Ahead {
  const uint8_t* from = nullptr;
  int64_t lines = 0;
};

// kRows rows, `stride` bytes from one to the next, times `steps` of a panel: sums [kRows, kPanel], `apart` numbers from
// one row to the next, 32-bit whole numbers or float as Kind has it. They begin with begin_N, or with 0.
template <typename Kind, int kRows>
void sum_up(const void* panel, int64_t steps, const void* rows, int64_t stride, const int32_t* begin_N, Ahead ahead,
            int32_t* sums, int64_t apart) {
  Sums<Kind, kRows> running;
  const __m512i none = _mm512_setzero_si512();
  if (begin_N == nullptr)
    running.begin(none, none, none, none);
  else
    running.begin(_mm512_loadu_si512(begin_N), _mm512_loadu_si512(begin_N + kLanes),
                  _mm512_loadu_si512(begin_N + 2 * kLanes), _mm512_loadu_si512(begin_N + 3 * kLanes));
  const uint8_t* weight = static_cast<const uint8_t*>(panel);
  const uint8_t* row = static_cast<const uint8_t*>(rows);
  for (int64_t step = 0; step < steps; ++step, weight += kBlocks * kLine) {
    for (int64_t line = 0; line < ahead.lines; ++line, ahead.from += kLine) _mm_prefetch(ahead.from, _MM_HINT_T1);
    const __m512i a = _mm512_loadu_si512(weight), b = _mm512_loadu_si512(weight + kLine);
    const __m512i c = _mm512_loadu_si512(weight + 2 * kLine), d = _mm512_loadu_si512(weight + 3 * kLine);
#pragma GCC unroll 2
    for (int part = 0; part < Kind::kParts; ++part, row += 4)
      running.add(row, stride, Kind::part(a, part), Kind::part(b, part), Kind::part(c, part), Kind::part(d, part));
  }
  running.end(sums, apart);
}
