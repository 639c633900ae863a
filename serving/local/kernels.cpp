// What no library has cheap for a few tokens at a time: linear layers, in bfloat16 or in 8 bits, and attention over
// slots. For CPUs with AVX-512 and VNNI. What a token gets is computed in one order, whatever tokens are beside it: a
// verification of several tokens gives bit for bit what decoding one by one does.
//
// Suffixes: M tokens, K inputs, N outputs, L positions, h head size; a number in bfloat16 is a uint16_t.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kLanes = 16;                // 32-bit numbers of a register
constexpr int kBlocks = 4;                // registers of outputs at a time
constexpr int kPanel = kBlocks * kLanes;  // outputs that lie together in a packed weight
constexpr int kMostRows = 6;              // of inputs at a time: times kBlocks they fill the registers
constexpr int kStep = 4;                  // bytes of a row that one instruction multiplies and adds up in a lane
constexpr int kLine = 64;                 // bytes that memory is read in, and of a register
constexpr float kLargest = 127.0f;
constexpr int kOffset = 128;              // the instruction takes unsigned inputs

__m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

__m512 from_bfloat16(const uint16_t* x) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }

void store(uint16_t* y, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), x); }

__m256i to_bfloat16(__m512 x) {  // the nearest, of two the even one
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

// A token's input as two rows of whole numbers + 128, the second of what the first leaves over, and its scale.
float whole_rows(const uint16_t* x_K, int64_t K, uint8_t* first_K, uint8_t* second_K) {
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
    const __m512i first = _mm512_cvtps_epi32(rounded);
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(quotient, rounded), steps));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(first_K + k), _mm512_cvtepi32_epi8(_mm512_add_epi32(first, offset)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(second_K + k), _mm512_cvtepi32_epi8(_mm512_add_epi32(second, offset)));
  }
  return scale;
}

struct Layer {
  int64_t K, N;
  const void* weight;        // [panels, steps, kPanel, kStep bytes]: what a step multiplies by lies together
  const int32_t* offsets_N;  // in 8 bits: takes off the sums what the inputs' offset adds to them
  const float* scale_N;      // in 8 bits
  const float* bias_N;       // or none
};

// In 8 bits: a token is two rows of whole numbers, and a scale.
struct WholeNumbers {
  static constexpr int kRows = 2, kDepth = 4;

  [[gnu::always_inline]] static __m512i begin(const Layer& layer, int64_t n) {
    return _mm512_loadu_si512(layer.offsets_N + n);
  }
  [[gnu::always_inline]] static __m512i add(__m512i sums, __m512i x, __m512i w) {
    return _mm512_dpbusd_epi32(sums, x, w);
  }
  static __m512 result(const Layer& layer, int64_t n, const int32_t (*sums)[kPanel], int part, float scale) {
    const __m512 of_row = _mm512_loadu_ps(layer.scale_N + n);
    const __m512 ours = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums[0] + part)), of_row);
    const __m512 left = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums[1] + part)), of_row);
    const __m512 both = _mm512_add_ps(ours, _mm512_div_ps(left, _mm512_set1_ps(2 * kLargest)));
    return _mm512_mul_ps(both, _mm512_set1_ps(scale));
  }
};

#ifdef __AVX512BF16__
struct Bfloat16 {
  static constexpr int kRows = 1, kDepth = 2;

  [[gnu::always_inline]] static __m512i begin(const Layer&, int64_t) { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static __m512i add(__m512i sums, __m512i x, __m512i w) {
    const __m512 more = _mm512_dpbf16_ps(_mm512_castsi512_ps(sums), (__m512bh)x, (__m512bh)w);
    return _mm512_castps_si512(more);
  }
  static __m512 result(const Layer&, int64_t, const int32_t (*sums)[kPanel], int part, float) {
    return _mm512_loadu_ps(sums[0] + part);
  }
};
#endif

// Sums of some rows over one panel of outputs. Members, not an array: GCC keeps those in registers.
template <typename Kind, int kRows>
struct Sums {
  Sums<Kind, kRows - 1> others;
  __m512i a, b, c, d;

  [[gnu::always_inline]] void begin(const Layer& layer, int64_t n) {
    others.begin(layer, n);
    a = Kind::begin(layer, n);
    b = Kind::begin(layer, n + kLanes);
    c = Kind::begin(layer, n + 2 * kLanes);
    d = Kind::begin(layer, n + 3 * kLanes);
  }

  [[gnu::always_inline]] void add(const uint8_t* rows, int64_t stride, __m512i a_w, __m512i b_w, __m512i c_w,
                                  __m512i d_w) {
    others.add(rows, stride, a_w, b_w, c_w, d_w);
    int32_t four;
    std::memcpy(&four, rows + (kRows - 1) * stride, sizeof four);
    const __m512i x = _mm512_set1_epi32(four);
    a = Kind::add(a, x, a_w);
    b = Kind::add(b, x, b_w);
    c = Kind::add(c, x, c_w);
    d = Kind::add(d, x, d_w);
  }

  [[gnu::always_inline]] void end(int32_t (*sums)[kPanel]) const {
    others.end(sums);
    _mm512_storeu_si512(sums[kRows - 1], a);
    _mm512_storeu_si512(sums[kRows - 1] + kLanes, b);
    _mm512_storeu_si512(sums[kRows - 1] + 2 * kLanes, c);
    _mm512_storeu_si512(sums[kRows - 1] + 3 * kLanes, d);
  }
};

template <typename Kind>
struct Sums<Kind, 0> {
  void begin(const Layer&, int64_t) {}
  void add(const uint8_t*, int64_t, __m512i, __m512i, __m512i, __m512i) {}
  void end(int32_t (*)[kPanel]) const {}
};

// What is to be in the cache when the next panel's turn comes: `lines` at every step, from `from` on.
struct Ahead {
  const uint8_t* from;
  int64_t lines;
};

// One panel of outputs for a few tokens, whose rows follow one another.
template <typename Kind, int kTokens>
void multiply(const Layer& layer, int64_t panel, Ahead ahead, const uint8_t* rows, const float* scales, uint16_t* y) {
  const int64_t N = layer.N, n = panel * kPanel, steps = layer.K / Kind::kDepth, stride = steps * kStep;
  Sums<Kind, Kind::kRows * kTokens> running;
  running.begin(layer, n);
  const uint8_t* weight = static_cast<const uint8_t*>(layer.weight) + panel * steps * kBlocks * kLine;
  for (int64_t step = 0; step < steps; ++step, weight += kBlocks * kLine) {
    for (int64_t line = 0; line < ahead.lines; ++line, ahead.from += kLine) _mm_prefetch(ahead.from, _MM_HINT_T1);
    running.add(rows + step * kStep, stride, _mm512_loadu_si512(weight), _mm512_loadu_si512(weight + kLine),
                _mm512_loadu_si512(weight + 2 * kLine), _mm512_loadu_si512(weight + 3 * kLine));
  }
  int32_t sums[Kind::kRows * kTokens][kPanel];
  running.end(sums);
  for (int token = 0; token < kTokens; ++token)
    for (int part = 0; part < kPanel && n + part < N; part += kLanes) {
      const int64_t at = n + part, left = std::min<int64_t>(N - at, kLanes);
      __m512 out = Kind::result(layer, at, sums + Kind::kRows * token, part, scales == nullptr ? 1 : scales[token]);
      if (layer.bias_N != nullptr) out = _mm512_add_ps(out, _mm512_loadu_ps(layer.bias_N + at));
      _mm256_mask_storeu_epi16(y + token * N + at, (1 << left) - 1, to_bfloat16(out));
    }
}

// rows [M, rows of a token, 4 · steps bytes] → y [M, N]
template <typename Kind>
void multiply_all(const Layer& layer, int64_t M, const uint8_t* rows, const float* scales_M, uint16_t* y,
                  int64_t num_threads) {
  constexpr int kTogether = kMostRows / Kind::kRows;
  static constexpr decltype(&multiply<Kind, 1>) kMultiply[kMostRows] = {
      multiply<Kind, 1>,  // of so many tokens; in 8 bits the last three are not asked for
      multiply<Kind, 2>,
      multiply<Kind, 3>,
      multiply<Kind, kTogether - 2>,
      multiply<Kind, kTogether - 1>,
      multiply<Kind, kTogether>,
  };
  // A panel has kBlocks lines for every step. The next one is fetched evenly while this one's tokens take their turns.
  const int64_t turns = (M + kTogether - 1) / kTogether, lines = (kBlocks + turns - 1) / turns;
  const int64_t steps = layer.K / Kind::kDepth, panel_bytes = steps * kBlocks * kLine;
#pragma omp parallel for if (num_threads > 1) num_threads(num_threads)
  for (int64_t panel = 0; panel < (layer.N + kPanel - 1) / kPanel; ++panel) {
    const uint8_t* const next = static_cast<const uint8_t*>(layer.weight) + (panel + 1) * panel_bytes;
    for (int64_t m = 0, ahead = 0; m < M; m += kTogether, ahead += lines) {
      const Ahead part{next + ahead * steps * kLine, ahead < kBlocks ? lines : 0};
      const uint8_t* const some = rows + m * Kind::kRows * steps * kStep;
      const float* const scales = scales_M == nullptr ? nullptr : scales_M + m;
      kMultiply[std::min<int64_t>(M - m, kTogether) - 1](layer, panel, part, some, scales, y + m * layer.N);
    }
  }
}

// exp of numbers ≤ 0, within 2e-7 of it; below e⁻⁸⁷, where denormals would come, it is 0. NaN stays.
__m512 exp_of(__m512 x) {
  const __mmask16 is_seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(scaled, whole);  // 2^part as Taylor's series of exp(part · ln 2)
  __m512 power = _mm512_set1_ps(1.54035304e-4f);
  for (const float term : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(term));
  return _mm512_maskz_scalef_ps(is_seen, power, whole);
}

// The query heads of one token that share a key head.
struct Queries {
  int64_t num_heads, stride;  // numbers from one of them to the next
  const uint16_t* q;
  uint16_t* out;
};

// One key head of a slot.
struct Context {
  const uint16_t* keys;
  const uint16_t* values;
  const uint16_t* next;  // keys whose turn is next, to be in the cache then; or none, as where these are already
  int64_t length;        // positions
};

void fetch(const uint16_t* row, int64_t length) {
  for (int64_t at = 0; at < length; at += kLine / sizeof *row) _mm_prefetch(row + at, _MM_HINT_T1);
}

// Attends over the context; room for num_heads · (h + length rounded up to kLanes) numbers.
template <int kParts>
void attend(const Queries& queries, const Context& context, float scale, float* room) {
  constexpr int kHead = kParts * kLanes;
  const int64_t length = context.length;
  const int64_t padded = (length + kLanes - 1) / kLanes * kLanes;
  float* const scores = room + queries.num_heads * kHead;  // [heads, padded]; before it queries [heads, h]
  for (int64_t head = 0; head < queries.num_heads; ++head)
    for (int part = 0; part < kHead; part += kLanes) {
      const __m512 q = from_bfloat16(queries.q + head * queries.stride + part);
      _mm512_storeu_ps(room + head * kHead + part, _mm512_mul_ps(q, _mm512_set1_ps(scale)));
    }
  for (int64_t l = 0; l < length; ++l) {
    __m512 key[kParts];
    for (int part = 0; part < kParts; ++part) key[part] = from_bfloat16(context.keys + l * kHead + part * kLanes);
    if (context.next != nullptr) fetch(context.values + l * kHead, kHead);
    for (int64_t head = 0; head < queries.num_heads; ++head) {
      const float* const q = room + head * kHead;
      __m512 product = _mm512_mul_ps(key[0], _mm512_loadu_ps(q));
      for (int part = 1; part < kParts; ++part)
        product = _mm512_fmadd_ps(key[part], _mm512_loadu_ps(q + part * kLanes), product);
      scores[head * padded + l] = _mm512_reduce_add_ps(product);
    }
  }
  for (int64_t head = 0; head < queries.num_heads; ++head) {
    float* const row = scores + head * padded;
    std::fill(row + length, row + padded, -std::numeric_limits<float>::infinity());
    __m512 most = _mm512_loadu_ps(row);
    for (int64_t l = kLanes; l < padded; l += kLanes) most = _mm512_max_ps(most, _mm512_loadu_ps(row + l));
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 total = _mm512_setzero_ps();
    for (int64_t l = 0; l < padded; l += kLanes) {
      const __m512 weight = exp_of(_mm512_sub_ps(_mm512_loadu_ps(row + l), largest));
      _mm512_storeu_ps(row + l, weight);
      total = _mm512_add_ps(total, weight);
    }
    __m512 out[kParts];
    for (int part = 0; part < kParts; ++part) out[part] = _mm512_setzero_ps();
    for (int64_t l = 0; l < length; ++l) {
      const __m512 weight = _mm512_set1_ps(row[l]);
      for (int part = 0; part < kParts; ++part)
        out[part] = _mm512_fmadd_ps(weight, from_bfloat16(context.values + l * kHead + part * kLanes), out[part]);
      if (head == 0 && context.next != nullptr) fetch(context.next + l * kHead, kHead);
    }
    const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(total));
    for (int part = 0; part < kParts; ++part)
      store(queries.out + head * queries.stride + part * kLanes, to_bfloat16(_mm512_div_ps(out[part], sum)));
  }
}

}  // namespace

// x [M, K] → y [M, N], bfloat16; K a multiple of 16, and what a layer keeps padded to whole panels.
extern "C" void slipstream_linear_int8(int64_t M, int64_t K, int64_t N, const uint16_t* x, const void* weight,
                                       const int32_t* offsets_N, const float* scale_N, const float* bias_N,
                                       uint16_t* y, int64_t num_threads) {
  static thread_local std::vector<uint8_t> rows;
  static thread_local std::vector<float> scales;
  if (M == 0) return;
  rows.resize(2 * M * K);
  scales.resize(M);
  for (int64_t m = 0; m < M; ++m)
    scales[m] = whole_rows(x + m * K, K, rows.data() + 2 * m * K, rows.data() + (2 * m + 1) * K);
  const Layer layer{K, N, weight, offsets_N, scale_N, bias_N};
  multiply_all<WholeNumbers>(layer, M, rows.data(), scales.data(), y, num_threads);
}

#ifdef __AVX512BF16__
extern "C" void slipstream_linear_bfloat16(int64_t M, int64_t K, int64_t N, const uint16_t* x, const void* weight,
                                           const float* bias_N, uint16_t* y, int64_t num_threads) {
  if (M == 0) return;
  const Layer layer{K, N, weight, nullptr, nullptr, bias_N};
  multiply_all<Bfloat16>(layer, M, reinterpret_cast<const uint8_t*>(x), nullptr, y, num_threads);
}
#endif

// gates and behind them what they multiply [M, 2I] → silu(gate) · up [M, I], rounded after either; I a multiple of 16.
extern "C" void slipstream_gate(int64_t M, int64_t I, const uint16_t* gate_up, uint16_t* out, int64_t num_threads) {
  const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for if (num_threads > 1) num_threads(num_threads)
  for (int64_t m = 0; m < M; ++m)
    for (int64_t i = 0; i < I; i += kLanes) {
      const __m512 gate = from_bfloat16(gate_up + 2 * m * I + i), up = from_bfloat16(gate_up + (2 * m + 1) * I + i);
      const __m512 power = exp_of(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
      const __mmask16 is_negative = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
      const __m512 above = _mm512_mask_blend_ps(is_negative, one, power);  // of σ(gate) = above / (1 + e^−|gate|)
      const __m512 silu = _mm512_mul_ps(gate, _mm512_div_ps(above, _mm512_add_ps(one, power)));
      store(out + m * I + i, to_bfloat16(_mm512_mul_ps(widened(to_bfloat16(silu)), up)));
    }
}

// Stores keys and values of T new tokens of each slot first_slot + b, from position starts_B[b] on, then attends.
// heads [B, T, P · G + 2G, h], query heads by their place in the group first; cache [slots, 2G, L, h]; out [B, T,
// P · G, h]. h is 64 or 128.
extern "C" void slipstream_attend(int64_t B, int64_t T, int64_t P, int64_t G, int64_t L, int64_t h, int64_t first_slot,
                                 const int64_t* starts_B, float scale, const uint16_t* heads, uint16_t* cache,
                                 uint16_t* out, int64_t num_threads) {
  const auto of_one = h == 64 ? attend<4> : attend<8>;
  const int64_t num_heads = P * G + 2 * G;
#pragma omp parallel for collapse(2) if (num_threads > 1) num_threads(num_threads)
  for (int64_t b = 0; b < B; ++b)
    for (int64_t g = 0; g < G; ++g) {
      static thread_local std::vector<float> room;
      room.resize(P * (h + starts_B[b] + T + kLanes));
      uint16_t* const keys = cache + (((first_slot + b) * 2 * G + g) * L) * h;
      uint16_t* const values = keys + G * L * h;
      const uint16_t* const next = g + 1 < G ? keys + L * h : keys + (G + 1) * L * h;  // past the last slot: no matter
      for (int64_t t = 0; t < T; ++t) {
        const uint16_t* const token = heads + (b * T + t) * num_heads * h;
        const int64_t position = starts_B[b] + t;
        std::memcpy(keys + position * h, token + (P * G + g) * h, h * sizeof *keys);
        std::memcpy(values + position * h, token + (P * G + G + g) * h, h * sizeof *values);
        const Queries queries{P, G * h, token + g * h, out + ((b * T + t) * P * G + g) * h};
        of_one(queries, Context{keys, values, t == 0 ? next : nullptr, position + 1}, scale, room.data());
      }
    }
}
