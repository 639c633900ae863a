// Attention over a KV cache of slots, as two products with keys and values in panels. Suffixes: M tokens, h head size,
// L positions of a slot.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "linear.h"

constexpr int kMostHead = 256;  // h
constexpr int kMostAhead = 8;   // most cache lines to prefetch in a step

struct Heads {
  int64_t sharing, groups, size;  // query heads of a key head, key heads, and h, a multiple of kPanel
  float scale;
  Norm query, key;  // applied before the rotation; or none
};

// New tokens of one slot, from position `start` on. Each follows the one before it, or in a tree its parent:
// parents [num_tokens] are earlier indices in the window, −1 for the first.
struct Window {
  int64_t slot, start, num_tokens;
  const int64_t* parents;
};

// A key head of a slot: keys [L / kPanel, h / 2, kPanel, 2], where outputs are positions, and values
// [h / kPanel, L / 2, kPanel, 2], where inputs are positions. L is a multiple of kPanel.
struct Kept {
  uint16_t* keys;
  uint16_t* values;
  int64_t length;
};

// A head [h] with its norm, if any, and rotary embedding (rotate-half).
inline void rotate(const uint16_t* head, const Norm& norm, const float* cos, const float* sin, int64_t h, float* out) {
  uint16_t normed[kMostHead];
  if (norm.weight != nullptr) {
    apply(norm, head, normed);
    head = normed;
  }
  const int64_t half = h / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Floats first = from_bfloat16(head + i), second = from_bfloat16(head + half + i);
    store(out + i, first * load(cos + i) - second * load(sin + i));
    store(out + half + i, second * load(cos + half + i) + first * load(sin + half + i));
  }
}

inline void keep(const Kept& kept, int64_t position, const float* key, const uint16_t* value, int64_t h) {
  uint16_t rounded[kMostHead];
  for (int64_t i = 0; i < h; i += kLanes) store(rounded + i, load(key + i));
  uint16_t* const place = kept.keys + position / kPanel * kPanel * h + position % kPanel * 2;
  for (int64_t i = 0; i < h; i += 2) std::memcpy(place + i * kPanel, rounded + i, 2 * sizeof *rounded);
  for (int64_t first = 0; first < h; first += kPanel) {
    uint16_t* const pairs = kept.values + first * kept.length + position / 2 * 2 * kPanel;
    for (int64_t i = 0; i < kPanel; ++i) {
      pairs[2 * i + position % 2] = value[first + i];
      // Writing the first of a pair clears the second: a product reads both.
      if (position % 2 == 0) pairs[2 * i + 1] = 0;
    }
  }
}

// Scores [padded] → unnormalised softmax weights, 0 from `visible` on; returns their sum.
inline float soften(float* scores, int64_t visible, int64_t padded) {
  const Floats unseen = spread(-std::numeric_limits<float>::infinity());
  Floats most = unseen;
  for (int64_t l = 0; l < padded; l += kLanes) {
    const Floats seen = load_first(scores + l, std::clamp<int64_t>(visible - l, 0, kLanes), unseen);
    store(scores + l, seen);
    most = larger(most, seen);
  }
  const Floats largest = spread(largest_of(most));
  Floats total = spread(0.0f);
  for (int64_t l = 0; l < padded; l += kLanes) {
    const Floats weight = exp_of(load(scores + l) - largest);
    store(scores + l, weight);
    total = total + weight;
  }
  return sum_of(total);
}

// What a token attends to: all positions before its window's `start`, and its ancestors in the window and itself.
struct Sight {
  const int64_t* path;  // their indices in the window; null: the first ones
  int64_t start, length;

  int64_t count() const { return start + length; }
};

// Softmax weights of one token, in place of the scores; returns their sum, by which the result is divided later. Hidden
// positions get 0. For a tree the visible scores are first moved together, so that the same tokens are summed in the
// same order wherever they lie.
inline float soften_seen(float* scores, const Sight& sight, int64_t padded) {
  if (sight.path == nullptr) return soften(scores, sight.count(), padded);
  float* const own = scores + sight.start;
  for (int64_t i = 0; i < sight.length; ++i) own[i] = own[sight.path[i]];
  const float total = soften(scores, sight.count(), padded);
  for (int64_t i = sight.length; i-- > 0;) {
    const float weight = own[i];
    own[i] = 0;
    own[sight.path[i]] = weight;
  }
  return total;
}

// Cache lines from an address on.
struct Lines {
  const void* from;
  int64_t count;
};

// The keys of some positions.
inline Lines keys_of(const Kept& kept, int64_t num_positions, int64_t h) {
  const int64_t padded = (num_positions + kPanel - 1) / kPanel * kPanel;
  return Lines{kept.keys, padded * h * int64_t{sizeof *kept.keys} / kLine};
}

// kRows queries [kRows, h] over the first `longest` positions → rows of out. A position that only some queries see has
// weight 0 for the others, so its value must be finite. While keys are multiplied the values are prefetched, and during
// the values what comes next.
template <int kRows>
void attend_rows(const Kept& kept, int64_t h, const float* queries, const Sight* sights, int64_t longest,
                 bool has_values, Lines next, float* scores, uint16_t* const* out) {
  const int64_t padded = (longest + kPanel - 1) / kPanel * kPanel;
  for (int64_t l = 0; l < padded; l += kPanel) {
    // As many values as keys; for larger heads column by column of panels.
    const int64_t at = l * (h / kPanel), column = at / padded;
    const uint16_t* const values = kept.values + column * kPanel * kept.length + (at - column * padded) * kPanel;
    const Ahead ahead{reinterpret_cast<const uint8_t*>(values), has_values ? 0 : kBlocks};
    sum_up<Bfloat16, kRows>(kept.keys + l * h, h / 2, queries, h * sizeof *queries, ahead, scores + l, padded);
  }
  Floats totals[kRows];
  for (int row = 0; row < kRows; ++row) totals[row] = spread(soften_seen(scores + row * padded, sights[row], padded));
  const int64_t steps = (longest + 1) / 2, all_steps = steps * (h / kPanel);
  const int64_t lines = std::min<int64_t>((next.count + all_steps - 1) / all_steps, kMostAhead);
  const uint8_t* const from = static_cast<const uint8_t*>(next.from);
  for (int64_t i = 0; i < h; i += kPanel) {
    float sums[kRows][kPanel];
    const Ahead ahead{from + i / kPanel * steps * lines * kLine, lines};
    sum_up<Bfloat16, kRows>(kept.values + i * kept.length, steps, scores, padded * sizeof *scores, ahead, sums[0],
                            kPanel);
    for (int row = 0; row < kRows; ++row)
      for (int part = 0; part < kPanel; part += kLanes)
        store(out[row] + i + part, load(sums[row] + part) / totals[row]);
  }
}

template <size_t... kLess>
constexpr auto attend_some(std::index_sequence<kLess...>) {
  return std::array{attend_rows<kLess + 1>...};
}

// What each token of a window attends to.
class Sights {
 public:
  explicit Sights(const Window& window) : window_(window) {
    const int64_t T = window.num_tokens;
    if (window.parents == nullptr) return;
    depths_.resize(T);
    paths_.resize(T * T);
    for (int64_t t = 0; t < T; ++t) {
      const int64_t parent = window.parents[t];
      if (parent >= 0) std::copy_n(paths_.data() + parent * T, depths_[parent] + 1, paths_.data() + t * T);
      depths_[t] = parent < 0 ? 0 : depths_[parent] + 1;
      paths_[t * T + depths_[t]] = t;
    }
  }
  int64_t depth(int64_t t) const { return depths_.empty() ? t : depths_[t]; }
  Sight of(int64_t t) const {
    return {paths_.empty() ? nullptr : paths_.data() + t * window_.num_tokens, window_.start, depth(t) + 1};
  }

 private:
  const Window& window_;
  std::vector<int64_t> depths_, paths_;  // [T] and [T, T]; a row is filled up to its token's depth
};

// Which tokens of a window attend: all, the last alone, or none. The others only store keys and values.
enum class Asked { kAll, kNewest, kNone };

// One key head of a window. cos and sin [positions, h], qkv [M, P · G + 2G, h] from the window's first token on, query
// heads by index in the group first, and out [M, P · G, h] from the first attending token on.
inline void attend_group(const Heads& heads, int64_t group, const Window& window, const Kept& kept, const float* cos,
                         const float* sin, const uint16_t* qkv, Asked asked, Lines next, uint16_t* out) {
  static constexpr auto kAttend = attend_some(std::make_index_sequence<Bfloat16::kMostRows>());
  static thread_local std::vector<float> queries, scores;
  const Sights sights(window);
  const int64_t h = heads.size, P = heads.sharing, G = heads.groups;
  const int64_t first_asked = asked == Asked::kAll ? 0 : window.num_tokens - (asked == Asked::kNewest);
  const int64_t num_rows = (window.num_tokens - first_asked) * P;
  queries.resize(num_rows * h);
  scores.resize(Bfloat16::kMostRows * (window.start + window.num_tokens + kPanel));
  for (int64_t t = 0; t < window.num_tokens; ++t) {
    const uint16_t* const token = qkv + t * (P + 2) * G * h;
    const int64_t position = window.start + sights.depth(t);
    float key[kMostHead];
    rotate(token + (P * G + group) * h, heads.key, cos + position * h, sin + position * h, h, key);
    keep(kept, window.start + t, key, token + ((P + 1) * G + group) * h, h);
    for (int64_t p = 0; p < P && t >= first_asked; ++p) {
      float* const query = queries.data() + ((t - first_asked) * P + p) * h;
      rotate(token + (p * G + group) * h, heads.query, cos + position * h, sin + position * h, h, query);
      for (int64_t i = 0; i < h; i += kLanes)
        store(query + i, load(query + i) * spread(heads.scale));
    }
  }
  const int64_t turns = (num_rows + Bfloat16::kMostRows - 1) / Bfloat16::kMostRows;
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t row = turn * num_rows / turns, together = (turn + 1) * num_rows / turns - row;
    Sight seen[Bfloat16::kMostRows];
    uint16_t* places[Bfloat16::kMostRows];
    for (int64_t i = 0; i < together; ++i) {
      const int64_t t = (row + i) / P, p = (row + i) % P;
      seen[i] = sights.of(first_asked + t);
      places[i] = out + ((t * P + p) * G + group) * h;
    }
    const int64_t longest = window.start + first_asked + (row + together - 1) / P + 1;
    kAttend[together - 1](kept, h, queries.data() + row * h, seen, longest, turn > 0,
                          turn + 1 < turns ? Lines{} : next, scores.data(), places);
  }
}

// Stores keys and values of all windows' tokens, which are consecutive rows of qkv, and attends → out [attending
// tokens, P · G, h]. The cache of a layer is [slots, G, keys and values, L · h].
inline void attend(const Heads& heads, int64_t num_windows, const Window* windows, const float* cos, const float* sin,
                   const uint16_t* qkv, uint16_t* cache, int64_t L, Asked asked, uint16_t* out,
                   const Threads& threads) {
  const int64_t h = heads.size, P = heads.sharing, G = heads.groups;
  const auto kept = [=](int64_t w, int64_t group) {
    uint16_t* const keys = cache + (windows[w].slot * G + group) * 2 * L * h;
    return Kept{keys, keys + L * h, L};
  };
  threads.each(num_windows * G, [&](int64_t index) {
    const int64_t w = index / G, group = index % G, likely = index + threads.count(), next_w = likely / G;
    int64_t first = 0;  // row of the window's first token
    for (int64_t before = 0; before < w; ++before) first += windows[before].num_tokens;
    Lines next{};
    if (next_w < num_windows)
      next = keys_of(kept(next_w, likely % G), windows[next_w].start + windows[next_w].num_tokens, h);
    attend_group(heads, group, windows[w], kept(w, group), cos, sin, qkv + first * (P + 2) * G * h, asked, next,
                 out + (asked == Asked::kAll ? first : w) * P * G * h);
  });
}
