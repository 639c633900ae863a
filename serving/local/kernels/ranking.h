// Argmax, top-k and sampling over bfloat16 logits of V tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "numbers.h"

constexpr int16_t kLowest = std::numeric_limits<int16_t>::min();
constexpr int64_t kPiece = 64;  // logits in a block whose maximum is kept

// The first `count` bfloat16 numbers as integers of the same order: −NaN and missing ones lowest, NaN highest.
inline __m256i ordered(const uint16_t* x, int64_t count) {
  __m256i bits = _mm256_set1_epi16(-1);
  if (count >= kLanes)
    bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  else
    std::memcpy(&bits, x, count * sizeof *x);
  return _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi16(bits, 15), _mm256_set1_epi16(0x7fff)));
}

inline int16_t largest_of(__m256i ordered) {
  const __m128i eight = _mm_max_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  const __m128i flipped = _mm_xor_si128(eight, _mm_set1_epi16(0x7fff));  // the CPU has only an unsigned minimum
  return static_cast<int16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(flipped)) ^ 0x7fff);
}

// The maximum of the first `count` logits.
inline int16_t largest_of(const uint16_t* logits, int64_t count) {
  __m256i most = _mm256_set1_epi16(kLowest);
  for (int64_t v = 0; v < count; v += kLanes) most = _mm256_max_epi16(most, ordered(logits + v, count - v));
  return largest_of(most);
}

// A bit for each of 16 logits that exists and is at least `least`.
inline uint32_t no_less(const uint16_t* logits, int64_t count, int16_t least) {
  const __m256i less = _mm256_cmpgt_epi16(_mm256_set1_epi16(least), ordered(logits, count));
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(less), _mm256_extracti128_si256(less, 1));
  const uint32_t is_there = count >= kLanes ? 0xffff : (1u << count) - 1;
  return ~_mm_movemask_epi8(bytes) & is_there;
}

// Argmax, the first of equal ones.
inline int64_t likeliest(int64_t V, const uint16_t* logits) {
  const int16_t largest = largest_of(logits, V);
  int64_t v = 0;
  uint32_t found;
  while ((found = no_less(logits + v, V - v, largest)) == 0) v += kLanes;
  return v + __builtin_ctz(found);
}

// log Σ exp(scale · logits); `largest` is the maximum of the logits.
inline float log_of_sum(int64_t V, const uint16_t* logits, float largest, float scale = 1.0f) {
  Floats sum = spread(0.0f);
  for (int64_t v = 0; v < V; v += kLanes) {
    uint16_t last[kLanes];
    const uint16_t* x = logits + v;
    if (V - v < kLanes) {
      std::fill_n(last, kLanes, 0xff80);  // −∞
      std::copy_n(x, V - v, last);
      x = last;
    }
    sum = sum + exp_of((from_bfloat16(x) - spread(largest)) * spread(scale));
  }
  return largest * scale + std::log(sum_of(sum));
}

// Top-k, K ≤ V, likeliest first: tokens and log-probabilities.
inline void rank(int64_t V, const uint16_t* logits, int64_t K, int32_t* ids, float* logprobs) {
  static thread_local std::vector<int16_t> largest, some;
  static thread_local std::vector<int32_t> found;
  largest.clear();
  for (int64_t v = 0; v < V; v += kPiece) largest.push_back(largest_of(logits + v, std::min(kPiece, V - v)));
  // K blocks have a maximum of at least this, so all of the K largest logits are at least this.
  int16_t least = kLowest;
  if (static_cast<int64_t>(largest.size()) >= K) {
    some = largest;
    std::nth_element(some.begin(), some.begin() + (K - 1), some.end(), std::greater<>());
    least = some[K - 1];
  }
  found.clear();
  for (int64_t piece = 0; piece < static_cast<int64_t>(largest.size()); ++piece) {
    if (largest[piece] < least) continue;
    for (int64_t v = piece * kPiece; v < std::min((piece + 1) * kPiece, V); v += kLanes)
      for (uint32_t bits = no_less(logits + v, V - v, least); bits != 0; bits &= bits - 1)
        found.push_back(static_cast<int32_t>(v + __builtin_ctz(bits)));
  }
  const auto key = [=](int32_t id) { return static_cast<int16_t>(logits[id] ^ (logits[id] >> 15 ? 0x7fff : 0)); };
  const auto is_before = [=](int32_t one, int32_t other) {
    return key(one) != key(other) ? key(one) > key(other) : one < other;
  };
  std::partial_sort(found.begin(), found.begin() + K, found.end(), is_before);
  const auto number = [=](int32_t id) { return from_bits(static_cast<uint32_t>(logits[id]) << 16); };
  const float total = log_of_sum(V, logits, number(found.front()));
  for (int64_t k = 0; k < K; ++k) {
    ids[k] = found[k];
    logprobs[k] = number(found[k]) - total;
  }
}

struct Drawn {
  int64_t id;
  float logprob;  // at the temperature, without the noise
};

// Argmax of V logits at a temperature, plus Gumbel noise [V] if it is given.
inline Drawn draw(int64_t V, const uint16_t* logits, float temperature, const float* noise) {
  const auto number = [=](int64_t id) { return from_bits(static_cast<uint32_t>(logits[id]) << 16); };
  const int64_t largest = likeliest(V, logits);
  const float scale = 1.0f / temperature, total = log_of_sum(V, logits, number(largest), scale);
  int64_t chosen = largest;
  for (int64_t v = 0; v < V && noise != nullptr; ++v)
    if (number(v) * scale + noise[v] > number(chosen) * scale + noise[chosen]) chosen = v;
  return {chosen, number(chosen) * scale - total};
}
