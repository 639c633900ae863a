// Forward passes of a Llama-like target and of a draft in bfloat16, for CPUs with AVX2 or AVX-512. Each token's sums
// are computed in one order, whatever tokens are beside it: verifying several tokens gives bit for bit the same as
// decoding them one by one.
//
// Suffixes: M tokens, d hidden size, I inner size, h head size.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "ranking.h"

namespace {

struct Block {
  Norm input_norm, mlp_norm;
  Heads heads;
  Layer qkv, out, gate_up, down;
};

struct Model {
  int64_t num_blocks, num_aux;
  const Block* blocks;
  const int64_t* aux_blocks;  // blocks whose inputs are returned, in ascending order
  Norm norm;
  const void* after;  // the weight that is read next after the pass, to prefetch; or null
};

// A draft head has one block. Its input is a pair: a token's embedding and the feature of the position before it, which
// `fc` makes of three features of the target.
struct Draft {
  const uint16_t* embeddings;  // of the target's tokens
  Norm three_norm;             // of the three features side by side, or none
  Norm feature_norms[3];       // of each feature, or none
  Layer fc;
  Norm embedding_norm;
  Block block;  // its input norm is that of the feature
  Norm norm;    // before the head
  Layer head;
  const int64_t* target_ids;  // of the draft's tokens
  int64_t feeds_normed;       // whether the layer's output is fed back after `norm` (1) or before it (0)
  int64_t adds_to_normed;     // whether the residual is the feature after its norm (1) or before it (0)
};

// Arguments and results of drafting at most `num_steps` tokens for each of B requests. After a step, a request's reach
// is the probability that verification accepts all its proposals so far. Another step is computed while the sum of
// reaches exceeds that step's `least`.
struct Chain {
  int64_t num_steps;
  double most;                // upper bound of a probability
  double* rule;               // factors of the draft's probabilities and `least` [num_steps] each, and reaches [B]
  const float* temperatures;  // [B]; null if all are greedy
  const float* const* noise;  // [B], each [D] or null; with noise only one step is computed
  int64_t* ids;               // [num_steps, B], target ids
  float* logprobs;            // [num_steps, B]
  uint16_t* output;           // [B, d], output of the layer at the last step
  int64_t num_done;           // steps that were computed
};

int64_t products(const Layer& layer) { return layer.K * layer.N; }

int64_t products(const Block& block) {
  return products(block.qkv) + products(block.out) + products(block.gate_up) + products(block.down);
}

// Number of threads to use: one for so few products that they end before another thread wakes up.
int64_t worthwhile(int64_t num_threads, int64_t num_products) { return num_products < 1 << 20 ? 1 : num_threads; }

// x ← x + more, rounded.
void add(int64_t size, uint16_t* x, const uint16_t* more) {
  for (int64_t i = 0; i < size; i += kLanes) store(x + i, from_bfloat16(x + i) + from_bfloat16(more + i));
}

void apply_all(const Norm& norm, int64_t M, const uint16_t* x_Md, uint16_t* y_Md) {
  for (int64_t m = 0; m < M; ++m) apply(norm, x_Md + m * norm.K, y_Md + m * norm.K);
}

// [M, 2I] (gate, up) → silu(gate) · up [M, I], rounded after each.
void gate(int64_t M, int64_t I, const uint16_t* gate_up, uint16_t* out, const Threads& threads) {
  threads.each(M, [=](int64_t m) {
    const Floats one = spread(1.0f);
    for (int64_t i = 0; i < I; i += kLanes) {
      const Floats gate = from_bfloat16(gate_up + 2 * m * I + i), up = from_bfloat16(gate_up + (2 * m + 1) * I + i);
      const Floats power = exp_of(spread(0.0f) - absolute(gate));
      const Floats above = where_negative(gate, power, one);  // of σ(gate) = above / (1 + e^−|gate|)
      store(out + m * I + i, widened(to_bfloat16(gate * (above / (one + power)))) * up);
    }
  });
}

// After the attention: residual x [M, d] and attention's result → the layer's output, written to x.
void finish(const Block& block, int64_t M, const void* next, uint16_t* attended, uint16_t* more, uint16_t* wide,
            uint16_t* x, const Threads& threads) {
  const int64_t size = M * block.mlp_norm.K;
  multiply(block.out, M, attended, more, block.gate_up.weight, threads);
  add(size, x, more);
  apply_all(block.mlp_norm, M, x, more);
  multiply(block.gate_up, M, more, wide, block.down.weight, threads);
  gate(M, block.down.K, wide, attended, threads);
  multiply(block.down, M, attended, more, next, threads);
  add(size, x, more);
}

// KV cache of a pass, and the rotary tables.
struct Place {
  const float *cos, *sin;
  uint16_t* cache;
  int64_t L;
};

// Three target features, `apart` numbers from slot to slot, → one feature [N, d] for each pair of the windows.
void reduce(const Draft& draft, int64_t N, int64_t num_windows, const Window* windows, const uint16_t* three,
            int64_t apart, uint16_t* features, const Threads& threads) {
  static thread_local std::vector<uint16_t> rows;
  const int64_t K = draft.fc.K, d = draft.fc.N;
  rows.resize(N * K);
  uint16_t* row = rows.data();
  for (int64_t w = 0; w < num_windows; ++w) {
    const uint16_t* from = three + windows[w].slot * apart + windows[w].start * K;
    for (int64_t t = 0; t < windows[w].num_tokens; ++t, from += K, row += K) {
      std::copy_n(from, K, row);
      if (draft.three_norm.weight != nullptr) apply(draft.three_norm, row, row);
      for (int64_t part = 0; part < 3 && draft.feature_norms[0].weight != nullptr; ++part)
        apply(draft.feature_norms[part], row + part * d, row + part * d);
    }
  }
  multiply(draft.fc, N, rows.data(), features, draft.block.qkv.weight, threads);
}

// Stores keys and values of the windows' pairs → the layer's output [windows, d] for the last pair of each, if wanted.
// Features and output may be the same memory.
void run_layer(const Draft& draft, int64_t N, int64_t num_windows, const Window* windows, const Place& place,
               const int64_t* tokens, const uint16_t* features, uint16_t* output, const Threads& threads) {
  static thread_local std::vector<uint16_t> pairs, wide, narrow;
  const Block& block = draft.block;
  const int64_t d = block.input_norm.K, B = num_windows;
  pairs.resize(N * 2 * d);
  wide.resize(std::max(N * block.qkv.N, B * block.gate_up.N));
  narrow.resize(B * std::max(block.out.K, block.down.K));
  for (int64_t n = 0; n < N; ++n) {
    apply(draft.embedding_norm, draft.embeddings + tokens[n] * d, pairs.data() + 2 * n * d);
    apply(block.input_norm, features + n * d, pairs.data() + (2 * n + 1) * d);
  }
  multiply(block.qkv, N, pairs.data(), wide.data(), output == nullptr ? nullptr : block.out.weight, threads);
  attend(block.heads, B, windows, place.cos, place.sin, wide.data(), place.cache, place.L,
         output == nullptr ? Asked::kNone : Asked::kNewest, narrow.data(), threads);
  if (output == nullptr) return;
  for (int64_t w = 0, end = 0; w < B; ++w) {
    end += windows[w].num_tokens;
    const uint16_t* const residual = draft.adds_to_normed ? pairs.data() + (2 * end - 1) * d : features + (end - 1) * d;
    std::memmove(output + w * d, residual, d * sizeof *output);
  }
  finish(block, B, draft.head.weight, narrow.data(), pairs.data(), wide.data(), output, threads);
  if (draft.feeds_normed) apply_all(draft.norm, B, output, output);
}

// The layer's output [B, d] → a target token id for each request, and the draft's log-probability of it.
void choose(const Draft& draft, int64_t B, const Chain& chain, int64_t* ids, float* logprobs, const Threads& threads) {
  static thread_local std::vector<uint16_t> normed, logits;
  const int64_t D = draft.head.N;
  const uint16_t* x = chain.output;
  if (!draft.feeds_normed) {
    normed.resize(B * draft.norm.K);
    apply_all(draft.norm, B, x, normed.data());
    x = normed.data();
  }
  logits.resize(B * D);
  uint16_t* const all = logits.data();
  multiply(draft.head, B, x, all, draft.block.qkv.weight, threads);
  threads.each(B, [=, &draft, &chain](int64_t b) {
    const Drawn drawn = chain.noise == nullptr ? draw(D, all + b * D, 1.0f, nullptr)
                                               : draw(D, all + b * D, chain.temperatures[b], chain.noise[b]);
    ids[b] = draft.target_ids[drawn.id];
    logprobs[b] = drawn.logprob;
  });
}

}  // namespace

#define EXPORTED extern "C" [[gnu::visibility("default")]]  // all else is hidden (build.py)

// Sizes in bytes, which library.py compares with its own.
EXPORTED const int64_t slipstream_sizes[] = {sizeof(Model), sizeof(Block), sizeof(Draft), sizeof(Chain),
                                              sizeof(Window)};

// Whether products in pairs were compiled in.
#ifdef __AVX512F__
EXPORTED const int64_t slipstream_has_pairs = 1;
#else
EXPORTED const int64_t slipstream_has_pairs = 0;
#endif

EXPORTED void slipstream_linear(const Layer* layer, int64_t M, const uint16_t* x, uint16_t* y, int64_t num_threads) {
  multiply(*layer, M, x, y, nullptr, Threads(worthwhile(num_threads, M * products(*layer))));
}

EXPORTED void slipstream_attend(const Heads* heads, int64_t num_windows, const Window* windows, const float* cos,
                                  const float* sin, const uint16_t* qkv, uint16_t* cache, int64_t L, uint16_t* out,
                                  int64_t num_threads) {
  attend(*heads, num_windows, windows, cos, sin, qkv, cache, L, Asked::kAll, out, Threads(num_threads));
}

// Embeddings x [M, d], which are overwritten, → hidden states [M, d] and the inputs of some layers [M, num_aux · d].
EXPORTED void slipstream_pass(const Model* model, int64_t M, int64_t num_windows, const Window* windows,
                                const float* cos, const float* sin, uint16_t* cache, int64_t layer_stride, int64_t L,
                                uint16_t* x, uint16_t* hidden, uint16_t* aux, int64_t num_threads) {
  static thread_local std::vector<uint16_t> inputs, wide, narrow;
  const Threads threads(worthwhile(num_threads, M * model->num_blocks * products(*model->blocks)));
  const int64_t d = model->norm.K;
  int64_t num_kept = 0;
  for (int64_t index = 0; index < model->num_blocks; ++index, cache += layer_stride) {
    const Block& block = model->blocks[index];
    inputs.resize(M * d);
    wide.resize(M * std::max(block.qkv.N, block.gate_up.N));
    narrow.resize(M * std::max(block.out.K, block.down.K));
    if (num_kept < model->num_aux && model->aux_blocks[num_kept] == index) {
      for (int64_t m = 0; m < M; ++m) std::copy_n(x + m * d, d, aux + (m * model->num_aux + num_kept) * d);
      ++num_kept;
    }
    apply_all(block.input_norm, M, x, inputs.data());
    multiply(block.qkv, M, inputs.data(), wide.data(), block.out.weight, threads);
    attend(block.heads, num_windows, windows, cos, sin, wide.data(), cache, L, Asked::kAll, narrow.data(),
           threads);
    const void* const next = index + 1 < model->num_blocks ? model->blocks[index + 1].qkv.weight : model->after;
    finish(block, M, next, narrow.data(), inputs.data(), wide.data(), x, threads);
  }
  apply_all(model->norm, M, x, hidden);
}

// Reads the pairs of some windows and proposes the chain. The features are the target's, `apart` numbers from slot to
// slot; if null, the chain's output.
EXPORTED void slipstream_draft(const Draft* draft, Chain* chain, int64_t N, int64_t num_windows,
                               const Window* windows, const float* cos, const float* sin, uint16_t* cache, int64_t L,
                               const int64_t* tokens, const uint16_t* three, int64_t apart, int64_t num_threads) {
  static thread_local std::vector<uint16_t> reduced;
  static thread_local std::vector<Window> newest;
  const Threads threads(worthwhile(num_threads, N * products(draft->block)));
  const Place place{cos, sin, cache, L};
  const int64_t B = num_windows;
  const uint16_t* features = chain->output;
  if (three != nullptr) {
    reduced.resize(N * draft->fc.N);
    reduce(*draft, N, B, windows, three, apart, reduced.data(), threads);
    features = reduced.data();
  }
  uint16_t* const output = chain->num_steps == 0 ? nullptr : chain->output;
  run_layer(*draft, N, B, windows, place, tokens, features, output, threads);
  newest.assign(windows, windows + B);
  const double *const factors = chain->rule, *const least = factors + chain->num_steps;
  double* const reaches = chain->rule + 2 * chain->num_steps;
  for (int64_t step = 0; step < chain->num_steps; ++step) {
    int64_t* const ids = chain->ids + step * B;
    float* const logprobs = chain->logprobs + step * B;
    choose(*draft, B, *chain, ids, logprobs, threads);
    chain->num_done = step + 1;
    double reach = 0;
    for (int64_t b = 0; b < B; ++b)
      reach += reaches[b] *= std::min(chain->most, factors[step] * std::exp(double{logprobs[b]}));
    if (step + 1 == chain->num_steps || !(reach > least[step])) return;
    for (Window& window : newest) window = {window.slot, window.start + window.num_tokens, 1, nullptr};
    run_layer(*draft, B, B, newest.data(), place, ids, output, output, threads);
  }
}

// Logits [M, V] → argmax [M].
EXPORTED void slipstream_likeliest(int64_t M, int64_t V, const uint16_t* logits, int64_t* ids, int64_t num_threads) {
  const Threads threads(worthwhile(num_threads, M * V));
  threads.each(M, [=](int64_t m) { ids[m] = likeliest(V, logits + m * V); });
}

// Logits [M, V] → the K likeliest tokens, likeliest first, and their log-probabilities [M, K].
EXPORTED void slipstream_rank(int64_t M, int64_t V, const uint16_t* logits, int64_t K, int32_t* ids, float* logprobs,
                              int64_t num_threads) {
  const Threads threads(worthwhile(num_threads, M * V));
  threads.each(M, [=](int64_t m) { rank(V, logits + m * V, K, ids + m * K, logprobs + m * K); });
}
