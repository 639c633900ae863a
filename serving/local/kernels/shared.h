// Linear layers whose numbers share exponents (block floating point), for AVX2: of 64 inputs each is a whole number times
// a power of two that all have in common, chosen by the largest. The CPU multiplies such numbers in 16 bits, and adds
// them up in 32, faster than float. A weight has 12 bits and a sign, an input 13, so that 64 products fit into 32 bits;
// of bfloat16's eight bits none is lost in weights down to 1/16 of the largest, nor in inputs down to 1/32.
//
// A weight lies in strips of kLanes outputs, in the order in which it is read: [strips, blocks, (powers of kLanes
// outputs in bfloat16, then 32 steps of [kLanes, 2 inputs])]. Suffixes: M tokens, K inputs, N outputs.
#pragma once

#ifndef __AVX512F__

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "layer.h"
#include "sums.h"
#include "team.h"

constexpr int64_t kTogether = 64, kSteps = kTogether / 2;  // inputs of a block, and steps of two
constexpr int kInputBits = 13;
// Powers of two are at least so, that the product of two is no denormal number: of numbers below 2⁻⁴⁹ bits are lost.
constexpr int kLeastPower = -62;
constexpr int kMostTokens = 6;  // at a time: the CPU has 16 registers
constexpr int64_t kPowersBytes = kLanes * sizeof(uint16_t), kBlockBytes = kPowersBytes + kSteps * kLine;
constexpr int64_t kDistance = 8192;  // bytes ahead from which the second nearest cache is filled

// A block of an input, `count` numbers and zeros behind them, and its power of two: NaN if one of them is no number.
inline float share_exponent(const uint16_t* x, int64_t count, int16_t* whole) {
  __m256i most = _mm256_setzero_si256();  // as bits, which order absolute values as numbers do, and NaN above all
  for (int64_t k = 0; k < count; k += kLanes) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k));
    most = _mm256_max_epu16(most, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
  }
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi32(-1)));
  const uint32_t largest = ~_mm_cvtsi128_si32(least) & 0x7fff;
  // As exponents are kept, with 127 added.
  const int exponent = largest >> 7, power = std::max(exponent + 1 - kInputBits, 127 + kLeastPower);
  const Floats inverse = spread(from_bits((2 * 127 - power) << 23));
  for (int64_t k = 0; k < kTogether; k += kLanes) {
    const __m256i sixteen = k < count ? to_whole16(from_bfloat16(x + k) * inverse) : _mm256_setzero_si256();
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole + k), sixteen);
  }
  return from_bits(exponent == 255 ? 0x7fc00000 : power << 23);
}

// Tokens' inputs: whole numbers [M, blocks, kTogether] and powers of two [M, blocks].
struct Shared {
  int64_t M, blocks;
  const int16_t* whole;
  const float* powers;
};

// A block of a strip times that of kRows tokens from m on, added to out [kRows, kLanes]. At every step `part` bytes of
// what lies further on are fetched: the next strips, and behind the last the next weight where they lie in their order.
template <int kRows>
void add_block(const uint8_t* strip, const Shared& x, int64_t m, int64_t block, const uint8_t* ahead, int64_t part,
               float (*out)[kLanes]) {
  const uint8_t* const powers = strip + block * kBlockBytes;
  const uint8_t* weight = powers + kPowersBytes;
  const int16_t* pairs = x.whole + (m * x.blocks + block) * kTogether;
  Line sums[kRows];
  for (int row = 0; row < kRows; ++row) sums[row] = no_line();
#pragma GCC unroll 4
  for (int step = 0; step < kSteps; ++step, weight += kLine, pairs += 2, ahead += part) {
    _mm_prefetch(ahead, _MM_HINT_T1);
    const Line outputs = load_line(weight);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      int32_t pair;
      std::memcpy(&pair, pairs + row * x.blocks * kTogether, sizeof pair);
      sums[row] = add_products(spread_bits(pair), outputs, sums[row]);
    }
  }
  const Floats of_outputs = from_bfloat16(reinterpret_cast<const uint16_t*>(powers));
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const Floats power = of_outputs * spread(x.powers[(m + row) * x.blocks + block]);
    store(out[row], multiply_add(from_whole(sums[row]), power, load(out[row])));
  }
}

template <size_t... kLess>
constexpr auto block_additions(std::index_sequence<kLess...>) {
  return std::array{add_block<kLess + 1>...};
}

// Outputs n … n + kLanes of y [M, N].
inline void multiply_strip(const Layer& layer, int64_t n, const Shared& x, uint16_t* y) {
  static constexpr auto kAdd = block_additions(std::make_index_sequence<kMostTokens>());
  static thread_local std::vector<float> sums;
  const int64_t M = x.M, N = layer.N, turns = (M + kMostTokens - 1) / kMostTokens, part = (kLine + turns - 1) / turns;
  const uint8_t* const strip = static_cast<const uint8_t*>(layer.weight) + n / kLanes * x.blocks * kBlockBytes;
  sums.assign(M * kLanes, 0.0f);
  float (*const out)[kLanes] = reinterpret_cast<float (*)[kLanes]>(sums.data());
  // All tokens take a block, in turns, before the next one is read.
  for (int64_t block = 0; block < x.blocks; ++block)
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t m = turn * M / turns, num_rows = (turn + 1) * M / turns - m;
      const uint8_t* const ahead = strip + block * kBlockBytes + kDistance + turn * kSteps * part;
      kAdd[num_rows - 1](strip, x, m, block, ahead, part, out + m);
    }
  for (int64_t m = 0; m < M; ++m) {
    Floats result = load(out[m]);
    if (layer.bias_N != nullptr) result = result + load(layer.bias_N + n);
    store_first(y + m * N + n, result, std::min<int64_t>(N - n, kLanes));
  }
}

// x [M, K] → y [M, N].
inline void multiply_shared(const Layer& layer, int64_t M, const uint16_t* x, uint16_t* y, const Threads& threads) {
  static thread_local std::vector<int16_t> whole;  // of this thread; others read them
  static thread_local std::vector<float> powers;
  const int64_t K = layer.K, N = layer.N, blocks = (K + kTogether - 1) / kTogether;
  whole.resize(M * blocks * kTogether);
  powers.resize(M * blocks);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t block = 0, k = 0; block < blocks; ++block, k += kTogether) {
      const int64_t at = m * blocks + block;
      powers[at] = share_exponent(x + m * K + k, std::min(K - k, kTogether), whole.data() + at * kTogether);
    }
  const Shared shared{M, blocks, whole.data(), powers.data()};
  threads.each((N + kPanel - 1) / kPanel, [=, &layer](int64_t panel) {
    for (int64_t n = panel * kPanel; n < std::min(N, (panel + 1) * kPanel); n += kLanes)
      multiply_strip(layer, n, shared, y);
  });
}

#endif
