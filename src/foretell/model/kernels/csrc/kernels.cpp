// The CPU kernels: plain C++17 on raw pointers, called through ctypes. One source, with a header for each room.
//
// One promise shapes everything here: what is computed for a token never depends on its company. Every sum over an
// inner dimension runs in one fixed order, with the same instructions for every number of tokens, and attention walks
// a token's visible keys in the order of the text, wherever in the cache they lie. So a token verified in a tree gets,
// bit for bit, what it would have got decoded alone. For the same reason multiply-adds are explicit (`fma` below) and
// this must be compiled with -ffp-contract=off.
//
// Everything a matrix product reads is a 32-bit *word*: one float32, two bfloat16 or four int8. Weights are packed into
// panels of 32 outputs, [word of the input][output], so that one 64-byte vector holds the same input word of 16 outputs
// and meets one word of the activations, copied to all lanes. Precisions differ in `step` alone.

#include "abi.h"
#include "speculators.h"

extern "C" {

// x [tokens, hidden], the residual stream, in place through layers first .. last - 1. What the first layer's attention reads is
// entry [tokens, in of its qkv], or, where that is null, the normed stream. tapped [count, tokens, hidden]: the stream before the layers
// that `hidden_layers` names, ascending. Returns -1, or the first token that points outside the cache or the rotary tables; then nothing was done.
int32_t foretell_stack(const Model* m, const Layer* layers, int32_t first, int32_t last, float* x, const float* entry,
                       const Tokens* tokens, const Cache* cache, const int32_t* taps, int32_t count, float* tapped, int32_t threads) {
  return stack(*m, layers, first, last, x, entry, *tokens, *cache, {taps, count, tapped}, threads);
}

// y [tokens, width] = x [tokens, in] W^T + bias.
void foretell_linear(int32_t precision, const Weight* w, const float* x, float* y, int32_t tokens, int32_t width, int32_t threads) {
  linear(precision, *w, x, y, tokens, width, threads);
}

// A stage over `tokens` states and the embeddings of the tokens that follow them.
void foretell_stage(int32_t precision, const Stage* s, const float* state, const float* embedded, float* next, float* logits, int32_t tokens,
                    int32_t threads) {
  in_precision(precision, [&](auto p) { run_stage<typename decltype(p)::Product>(*s, state, embedded, next, logits, tokens, threads); });
}

// The k likeliest entries of each row of scores x [tokens, width], descending, and their probabilities under its softmax, [tokens, k].
void foretell_likeliest(const float* x, float* chances, int64_t* indices, int32_t tokens, int32_t width, int32_t k, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t)
    likeliest_row(x + (size_t)t * width, width, k, chances + (size_t)t * k, indices + (size_t)t * k);
}

// Trees as of foretell_beam from the stages of an MLP speculator. start [texts, in of the first]; token `root[i]` follows text i.
int32_t foretell_stages_beam(int32_t precision, const Stage* stages, const Embedding* e, const int64_t* token_of, const float* start, const int64_t* root,
                             const Beam* b, int64_t* token, int64_t* parent, int64_t* sizes, int32_t threads) {
  std::vector<Growth> trees;
  for (int i = 0; i < b->texts; ++i) trees.emplace_back(*b, i, root[i]);
  const int inner = stages[0].project.out, d = stages[0].token.in, width = stages[0].head.out, k = std::min(b->width, width);
  const Buffer<float> states = buffer<float>((size_t)b->texts * (1 + (size_t)b->width * b->depth) * inner);
  int64_t known = 0;
  const auto read = [&](int level, const std::vector<Place>& places, float* chances, int64_t* found) {
    const size_t n = places.size();
    const Buffer<float> before = buffer<float>(n * (size_t)inner), embedded = buffer<float>(n * (size_t)d), scores = buffer<float>(n * (size_t)width);
    for (size_t i = 0; i < n; ++i) {
      Growth& tree = trees[(size_t)places[i].text];
      tree.read(places[i].node, known + (int64_t)i);
      const Growth::Node& node = tree[places[i].node];
      embed(*e, node.token, d, embedded.get() + i * (size_t)d);
      if (level) std::memcpy(before.get() + i * (size_t)inner, states.get() + (size_t)tree[node.parent].number * inner, 4 * (size_t)inner);
    }
    foretell_stage(precision, stages + level, level ? before.get() : start, embedded.get(), states.get() + (size_t)known * inner, scores.get(), (int)n,
                   threads);
    foretell_likeliest(scores.get(), chances, found, (int)n, width, k, threads);
    known += (int64_t)n;
    return -1;
  };
  return grow(*b, trees, k, token_of, read, token, parent, sizes);
}

void foretell_rms_norm(const float* x, const float* weight, float eps, float* y, int32_t tokens, int32_t width, int32_t threads) {
  norm_rows(x, weight, eps, y, tokens, width, threads);
}

// EAGLE-3's layers on tokens and the `known` features before them: as foretell_stack, with x [tokens, hidden] only written. -2: a
// token or a parent is not there.
int32_t foretell_eagle(const Model* m, const Layer* layers, int32_t count, const Entry* e, const int64_t* token, const float* features,
                       int32_t known, const int64_t* parent, float* x, const Tokens* tokens, const Cache* cache, int32_t threads) {
  for (int t = 0; t < tokens->count; ++t) {
    const int64_t above = parent ? parent[t] : t;
    if (token[t] < 0 || token[t] >= e->embedding.vocab || above < 0 || above >= known) return -2;
  }
  return eagle(*m, layers, count, *e, token, features, parent, x, *tokens, *cache, threads);
}

// The same on tokens that follow states of the target: token t those at place[t] of each of the kinds' states [known, hidden].
int32_t foretell_eagle_read(const Model* m, const Layer* layers, int32_t count, const Entry* e, const int64_t* token, const float* const* states,
                            int32_t known, const int64_t* place, float* x, const Tokens* tokens, const Cache* cache, int32_t threads) {
  for (int t = 0; t < tokens->count; ++t)
    if (place[t] < 0 || place[t] >= known) return -2;
  const Buffer<float> features = fused(*m, *e, states, place, tokens->count, threads);
  return foretell_eagle(m, layers, count, e, token, features.get(), tokens->count, nullptr, x, tokens, cache, threads);
}

// Trees by confidence below roots whose outputs [texts, hidden] are given, of texts with room for a token: per text at most `budget`
// tokens and the places of their parents, [texts, budget] each, and how many there are. token_of: the token of every output of the head;
// null: its number. Here from EAGLE-3's layers.
int32_t foretell_beam(const Model* m, const Layer* layers, int32_t count, const Entry* e, const Weight* head, const float* norm, const int64_t* token_of,
                      const float* roots, const Beam* b, const Cache* cache, int64_t* token, int64_t* parent, int64_t* sizes, int32_t threads) {
  const auto run = [&](const Tokens& at, const int64_t* tokens, const int64_t* parents, const float* outputs, float* next) {
    return eagle(*m, layers, count, *e, tokens, outputs, parents, next, at, *cache, threads);
  };
  return grow_by_layers(*m, {norm, head, token_of}, roots, *b, run, token, parent, sizes, threads);
}

// The same from a decoder: outputs are those of its last layer.
int32_t foretell_decoder_beam(const Model* m, const Layer* layers, int32_t count, const Embedding* e, const Weight* head, const float* norm,
                              const int64_t* token_of, const float* roots, const Beam* b, const Cache* cache, int64_t* token, int64_t* parent,
                              int64_t* sizes, int32_t threads) {
  const auto run = [&](const Tokens& at, const int64_t* tokens, const int64_t*, const float*, float* next) {
    for (int t = 0; t < at.count; ++t) embed(*e, tokens[t], m->hidden, next + (size_t)t * m->hidden);
    return stack(*m, layers, 0, count, next, nullptr, at, *cache, {nullptr, 0, nullptr}, threads);
  };
  return grow_by_layers(*m, {norm, head, token_of}, roots, *b, run, token, parent, sizes, threads);
}

// The k likeliest outputs of a linear layer for each row of x [tokens, in].
void foretell_guess(int32_t precision, const Weight* w, const float* x, float* chances, int64_t* indices, int32_t tokens, int32_t k, int32_t threads) {
  guess(precision, *w, x, nullptr, 0, chances, indices, tokens, k, threads);
}

// Lowest index of the largest number of each row of x [tokens, width].
void foretell_argmax(const float* x, int64_t* out, int32_t tokens, int32_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t) argmax_row(x + (size_t)t * width, width, out + t);
}

// The k largest numbers of each row of x and where they are, [tokens, k], descending.
void foretell_topk(const float* x, float* values, int64_t* indices, int32_t tokens, int32_t width, int32_t k, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t)
    top_row(x + (size_t)t * width, width, k, values + (size_t)t * k, indices + (size_t)t * k);
}

// The Hadamard rotation of int8 weights, in place: x [count], a multiple of the block.
void foretell_rotate(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += Int8::kBlock) Int8::rotate(x + i);
}

// The vector instructions that this was compiled for.
const char* foretell_instructions() {
#if FORETELL_AVX512
  return "avx512"
#if FORETELL_BF16
         "+bf16"
#endif
#if FORETELL_VNNI
         "+vnni"
#endif
      ;
#elif defined(__FMA__) && defined(__AVX2__) && !defined(FORETELL_PORTABLE)
  return "avx2";
#else
  return "portable";
#endif
}

// The interface in text, a line for each constant, structure and function; structures.py writes the same.
const char* foretell_abi() {
  static const std::string text = [] {
    std::string out;
    describe_constant(out, "version", kAbiVersion);
    describe_constant(out, "panel", kPanel);
    describe_constant(out, "lanes", kLanes);
    describe_constant(out, "int8_block", Int8::kBlock);
    describe_constant(out, "int8_group", Int8::kGroup);
#define F FORETELL_FIELD
#define S(Struct, ...) describe_struct(out, #Struct, sizeof(Struct), {__VA_ARGS__})
    S(Weight, F(Weight, words), F(Weight, bias), F(Weight, in), F(Weight, out));
    S(Layer, F(Layer, qkv), F(Layer, output), F(Layer, gate_up), F(Layer, down), F(Layer, attention_norm), F(Layer, mlp_norm), F(Layer, q_norm),
      F(Layer, k_norm), F(Layer, post_attention_norm), F(Layer, post_mlp_norm), F(Layer, cos), F(Layer, sin), F(Layer, window), F(Layer, attention),
      F(Layer, mlp));
    S(Model, F(Model, hidden), F(Model, heads), F(Model, kv_heads), F(Model, head_dim), F(Model, ffn), F(Model, context), F(Model, precision),
      F(Model, activation), F(Model, eps), F(Model, scale), F(Model, softcap));
    S(Stage, F(Stage, project), F(Stage, token), F(Stage, output), F(Stage, head), F(Stage, norm_weight), F(Stage, norm_bias), F(Stage, eps));
    S(Embedding, F(Embedding, table), F(Embedding, vocab), F(Embedding, halves), F(Embedding, scale));
    S(Entry, F(Entry, embedding), F(Entry, embedding_norm), F(Entry, feature_norm), F(Entry, normed), F(Entry, kinds), F(Entry, state_norms),
      F(Entry, fuse));
    S(Beam, F(Beam, texts), F(Beam, depth), F(Beam, width), F(Beam, budget), F(Beam, least), F(Beam, stop), F(Beam, room), F(Beam, row),
      F(Beam, length));
    S(Tokens, F(Tokens, count), F(Tokens, extras), F(Tokens, row), F(Tokens, slot), F(Tokens, position), F(Tokens, prefix), F(Tokens, extra));
    S(Cache, F(Cache, k), F(Cache, v), F(Cache, rows), F(Cache, slots));
#undef S
#undef F
#define S(function) describe_function(out, #function, function)
    S(foretell_stack);
    S(foretell_eagle);
    S(foretell_eagle_read);
    S(foretell_beam);
    S(foretell_decoder_beam);
    S(foretell_stages_beam);
    S(foretell_linear);
    S(foretell_stage);
    S(foretell_guess);
    S(foretell_rms_norm);
    S(foretell_argmax);
    S(foretell_topk);
    S(foretell_likeliest);
    S(foretell_rotate);
    S(foretell_instructions);
#undef S
    return out;
  }();
  return text.c_str();
}
}
