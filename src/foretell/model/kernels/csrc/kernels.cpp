// The CPU kernels: plain C++17 on raw pointers, called through ctypes. The parts are headers; matrix products are
// translation units of their own, products.cpp and quantized_products.cpp, so that processors share the compiling.
//
// All kernels are batch-invariant: what is computed for a token does not depend on the other tokens of the call. Every
// sum over an inner dimension runs in one fixed order, with the same instructions for every number of tokens, and
// attention visits a token's keys in sequence order, whatever their cache slots. So a token verified in a tree gets bit
// for bit the result of decoding it alone. For the same reason multiply-adds are explicit (`fma` in registers.h), and
// the kernels must be compiled with -ffp-contract=off.
//
// Matrix products read 32-bit *words*: one float32, two bfloat16 or four int8 numbers. Weights are packed into panels
// of 32 outputs, [word of the input][output], so that one 64-byte vector holds the same input word of 16 outputs, and
// is multiplied with one word of the activations, broadcast to all lanes. Every weight has a kind of its own, and says
// what its inputs are rounded to.

#include "abi.h"
#include "block_drafts.h"
#include "pack.h"
#include "sampler.h"
#include "speculators.h"
#include "tree_pass.h"

extern "C" {

// Runs the residual stream x [tokens, hidden] in place through layers first .. last - 1. attention_input [tokens, in of
// qkv]: input of the first layer's attention; null: the normed stream. hidden_states [count, tokens, hidden]: receives
// the stream before the layers that `hidden_layers` names, ascending. routes [last - first, tokens, active]: receives
// the experts of every token in layers that have some; or null. Returns -1, or the first token that points outside the
// cache or the rotary tables; then nothing was computed. Or kUnreadable.
int32_t foretell_stack(const Model* m, const Layer* layers, int32_t first, int32_t last, float* x,
                       const float* attention_input, const Layout* layout, const Cache* cache,
                       const int32_t* hidden_layers, int32_t count, float* hidden_states, int32_t* routes,
                       int32_t threads) {
  return stack(*m, layers, first, last, x, attention_input, *layout, *cache, {hidden_layers, count, hidden_states},
               threads, routes);
}

// Advances the recurrent states of a row, those of this side, in all layers along recorded nodes.
void foretell_keep_states(const States* s, int32_t layers, int32_t row, int32_t side, const int32_t* nodes,
                          int32_t count, int32_t threads) {
  keep_states(*s, layers, row, side, nodes, count, threads);
}

// Index of the largest number of each row of x [tokens, width], the lowest of equals.
void foretell_argmax(const float* x, int64_t* out, int32_t tokens, int32_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t) argmax_row(x + (size_t)t * width, width, out + t);
}

// A pass of a whole decoder over token trees. hidden_states [count + 1, tokens, hidden]: receives the stream before the
// layers that `hidden_layers` names, ascending; the last of them is the embeddings, and receives the output of the
// last layer. normed: receives the final norm of that output, [tokens, hidden], or, where `norm_scored_only` is set,
// [scored, hidden]. logits [scored, outputs of the head]. routes: as of foretell_stack, which it returns as.
int32_t foretell_tree_pass(const Model* m, const Layer* layers, int32_t layer_count, const Weight* head,
                           int32_t width, const float* norm, const TreePass* pass,
                           const Cache* cache, const int32_t* hidden_layers, int32_t count, float* hidden_states,
                           float* normed, int32_t norm_scored_only, float* logits, int32_t* routes,
                           int32_t threads) {
  number_nodes(*pass, [&](int i) { return pass->active[i]; }, pass->hidden_index);
  const int scored =
      number_nodes(*pass, [&](int i) { return pass->active[i] && pass->scored[i]; }, pass->logit_index);
  const TreeLayout trees(*pass);
  const size_t d = (size_t)m->hidden;
  const int tokens = trees.layout().count;
  float* x = hidden_states + (size_t)count * (size_t)tokens * d;
  const int32_t invalid = stack(*m, layers, 0, layer_count, x, nullptr, trees.layout(), *cache,
                                {hidden_layers, count, hidden_states}, threads, routes);
  if (invalid != -1) return invalid;
  Buffer<float> gathered;
  const float* head_input = normed;
  if (norm_scored_only) {
    each_scored(*pass, [&](size_t token, size_t number) {
      normalize(x + token * d, m->hidden, norm, m->eps, normed + number * d);
    });
  } else {
    norm_rows(x, norm, m->eps, normed, tokens, m->hidden, threads);
    if (scored < tokens) {
      gathered = buffer<float>((size_t)scored * d);
      each_scored(*pass, [&](size_t token, size_t number) {
        std::memcpy(gathered.get() + number * d, normed + token * d, 4 * d);
      });
      head_input = gathered.get();
    }
  }
  if (scored) linear(*head, head_input, logits, scored, width, threads);
  foretell_argmax(logits, pass->argmax, scored, width, threads);
  if (pass->sampling) sample_paths(*pass, logits, width, threads);
  return -1;
}

// y [tokens, width] = x [tokens, in] W^T + bias.
void foretell_linear(const Weight* w, const float* x, float* y, int32_t tokens, int32_t width, int32_t threads) {
  linear(*w, x, y, tokens, width, threads);
}

// One stage of an MLP speculator for `tokens` states and the embeddings of the tokens that follow them.
void foretell_mlp_speculator_stage(const Stage* s, const float* state, const float* embedded, float* next,
                                   float* logits, int32_t tokens, int32_t threads) {
  run_stage(*s, state, embedded, next, logits, tokens, threads);
}

// The k largest of each row of logits x [tokens, width], descending, as probabilities under its softmax, [tokens, k].
void foretell_topk_softmax(const float* x, float* probabilities, int64_t* indices, int32_t tokens, int32_t width,
                           int32_t k, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t)
    topk_softmax_row(x + (size_t)t * width, width, k, probabilities + (size_t)t * k, indices + (size_t)t * k);
}

// Dynamic trees, as of foretell_eagle_trees, from the stages of an MLP speculator. start [requests, in of the first
// stage]: the states that produced the root tokens root [requests].
int32_t foretell_mlp_speculator_trees(const Stage* stages, const Embedding* e,
                                      const int64_t* token_of, const float* start, const int64_t* root,
                                      const DynamicTree* b, int32_t threads) {
  std::vector<TreeBuilder> trees;
  for (int i = 0; i < b->requests; ++i) trees.emplace_back(*b, i, root[i]);
  const int inner = stages[0].project.outputs, d = stages[0].token.inputs, width = stages[0].head.outputs;
  ChildRanking ranking(*b, width, token_of, threads);
  const size_t k = (size_t)ranking.count();
  const Buffer<float> states = buffer<float>((size_t)b->requests * (1 + (size_t)b->width * b->depth) * inner);
  int64_t count = 0;
  const auto run = [&](int level, const std::vector<NodeRef>& nodes, float* probabilities, int64_t* found) {
    const size_t n = nodes.size();
    const Buffer<float> before = buffer<float>(n * (size_t)inner), embedded = buffer<float>(n * (size_t)d),
                        scores = buffer<float>(n * (size_t)width);
    for (size_t i = 0; i < n; ++i) {
      TreeBuilder& tree = trees[(size_t)nodes[i].request];
      tree.assign(nodes[i].node, count + (int64_t)i);
      const TreeBuilder::Node& node = tree[nodes[i].node];
      embed(*e, node.token, d, embedded.get() + i * (size_t)d);
      if (level)
        std::memcpy(before.get() + i * (size_t)inner, states.get() + (size_t)tree[node.parent].number * inner,
                    4 * (size_t)inner);
    }
    foretell_mlp_speculator_stage(stages + level, level ? before.get() : start, embedded.get(),
                                  states.get() + (size_t)count * inner, scores.get(), (int)n, threads);
#pragma omp parallel for num_threads(threads) if (n > 1)
    for (size_t i = 0; i < n; ++i)
      ranking.rank(nodes[i].request, scores.get() + i * (size_t)width, probabilities + i * k, found + i * k);
    count += (int64_t)n;
    return -1;
  };
  return grow_trees(*b, trees, ranking, run);
}

void foretell_rms_norm(const float* x, const float* weight, float eps, float* y, int32_t tokens, int32_t width,
                       int32_t threads) {
  norm_rows(x, weight, eps, y, tokens, width, threads);
}

// EAGLE-3's layers on tokens that follow features [feature_count, hidden], token t feature parent[t] (null: feature t).
// Writes x [tokens, hidden]. Returns as foretell_stack, or -2: a token or a parent does not exist.
int32_t foretell_eagle_forward(const Model* m, const Layer* layers, int32_t count, const EagleInput* e,
                               const int64_t* token, const float* features, int32_t feature_count,
                               const int64_t* parent, float* x, const Layout* layout, const Cache* cache,
                               int32_t threads) {
  for (int t = 0; t < layout->count; ++t) {
    const int64_t feature = parent ? parent[t] : t;
    if (token[t] < 0 || token[t] >= e->embedding.vocab || feature < 0 || feature >= feature_count) return -2;
  }
  return eagle_forward(*m, layers, count, *e, token, features, parent, x, *layout, *cache, threads);
}

// The same on tokens that follow hidden states of the target: token t those at row place[t] of every states[j]
// [state_rows, hidden].
int32_t foretell_eagle_forward_from_target(const Model* m, const Layer* layers, int32_t count, const EagleInput* e,
                                           const int64_t* token, const float* const* states, int32_t state_rows,
                                           const int64_t* place, float* x, const Layout* layout, const Cache* cache,
                                           int32_t threads) {
  for (int t = 0; t < layout->count; ++t)
    if (place[t] < 0 || place[t] >= state_rows) return -2;
  const Buffer<float> features = fuse_states(*m, e->fusion, states, place, layout->count, threads);
  return foretell_eagle_forward(m, layers, count, e, token, features.get(), layout->count, nullptr, x, layout, cache,
                                threads);
}

// Dynamic trees (EAGLE-2, arXiv 2406.16858) from EAGLE-3's layers, which first read the positions of `read`. token_of:
// the token of every output of the head; null: the output's number. Returns as foretell_eagle_forward.
int32_t foretell_eagle_trees(const Model* m, const Layer* layers, int32_t count, const EagleInput* e,
                             const Weight* head, const float* norm, const int64_t* token_of, const StatesRead* read,
                             const DynamicTree* b, const Cache* cache, int32_t threads) {
  std::vector<int32_t> row, slot, visible_prefix, last;
  for (int i = 0; i < b->requests; ++i) {
    for (int64_t position = b->length[i] - read->count[i]; position < b->length[i]; ++position)
      row.push_back((int32_t)b->row[i]), slot.push_back((int32_t)position),
          visible_prefix.push_back((int32_t)position + 1);
    last.push_back((int32_t)row.size() - 1);
  }
  const Layout layout = {(int32_t)row.size(), 0, row.data(), slot.data(), slot.data(), visible_prefix.data(), nullptr};
  const size_t d = (size_t)m->hidden;
  const Buffer<float> x = buffer<float>(row.size() * d), roots = buffer<float>((size_t)b->requests * d);
  const int32_t invalid = foretell_eagle_forward_from_target(m, layers, count, e, read->token, read->states,
                                                             read->state_rows, read->place, x.get(), &layout, cache,
                                                             threads);
  if (invalid != -1) return invalid;
  for (size_t i = 0; i < last.size(); ++i)
    std::memcpy(roots.get() + i * d, x.get() + (size_t)last[i] * d, 4 * d);
  const auto run = [&](const Layout& level, const int64_t* tokens, const int64_t* parents, const float* outputs,
                       float* next) {
    return eagle_forward(*m, layers, count, *e, tokens, outputs, parents, next, level, *cache, threads);
  };
  if (e->output_norm) norm = nullptr;  // the outputs are normed already
  return grow_trees_with_cache(*m, {norm, head, token_of}, roots.get(), *b, run, threads);
}

// Dynamic trees from the distributions of DFlash's blocks (arXiv 2602.06036, 2604.12989) below the tokens root
// [requests]; `length` of the trees counts the positions before the root. The positions of `read` are read first, by
// `injecting`: the layers, reduced to storing the keys and values of their input. Returns as foretell_eagle_forward.
int32_t foretell_block_trees(const Model* m, const Layer* layers, int32_t count, const Layer* injecting,
                             const BlockInput* e, const Weight* head, const float* norm, const int64_t* token_of,
                             const StatesRead* read, const int64_t* root, const DynamicTree* b, const Cache* cache,
                             int32_t threads) {
  return block_trees(*m, layers, injecting, count, *e, {norm, head, token_of}, *read, root, *b, *cache, threads);
}

// Dynamic trees as of foretell_eagle_trees, all levels from one pass over the positions of `read` and `masks` masks
// after those of every request (P-EAGLE, arXiv 2602.01469). Returns as foretell_eagle_forward.
int32_t foretell_mask_trees(const Model* m, const Layer* layers, int32_t count, const EagleInput* e,
                            const Weight* head, const float* norm, const int64_t* token_of, const StatesRead* read,
                            int32_t masks, const DynamicTree* b, const Cache* cache, int32_t threads) {
  return mask_trees(*m, layers, count, *e, masks, {norm, head, token_of}, *read, *b, *cache, threads);
}

// Dynamic trees as of foretell_eagle_trees from the layers of a decoder, below roots whose layer outputs [requests,
// hidden] are given.
int32_t foretell_decoder_trees(const Model* m, const Layer* layers, int32_t count, const Embedding* e,
                               const Weight* head, const float* norm, const int64_t* token_of, const float* roots,
                               const DynamicTree* b, const Cache* cache, int32_t threads) {
  const auto run = [&](const Layout& layout, const int64_t* tokens, const int64_t*, const float*, float* next) {
    for (int t = 0; t < layout.count; ++t) embed(*e, tokens[t], m->hidden, next + (size_t)t * m->hidden);
    return stack(*m, layers, 0, count, next, nullptr, layout, *cache, {nullptr, 0, nullptr}, threads);
  };
  return grow_trees_with_cache(*m, {norm, head, token_of}, roots, *b, run, threads);
}

// The k largest outputs of a linear layer for each row of x [tokens, in], descending, as probabilities under their
// softmax.
void foretell_linear_topk_softmax(const Weight* w, const float* x, float* probabilities,
                                  int64_t* indices, int32_t tokens, int32_t k, int32_t threads) {
  linear_topk_softmax(*w, x, probabilities, indices, tokens, k, threads);
}

// The k largest numbers of each row of x and their indices, [tokens, k], descending.
void foretell_topk(const float* x, float* values, int64_t* indices, int32_t tokens, int32_t width, int32_t k,
                   int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t)
    topk_row(x + (size_t)t * width, width, k, values + (size_t)t * k, indices + (size_t)t * k);
}

// Packs rows as `panels` panels of 32 outputs of a kind: 32 addresses per panel, null for a row of zeros. A kind of
// GGUF blocks needs rows of such blocks, the others rows of floats of a `RowType`. through_bfloat16: floats are rounded
// to bfloat16 first.
void foretell_pack_rows(int32_t kind, int32_t type, int32_t through_bfloat16, const void* const* rows, int32_t panels,
                        int32_t in, uint32_t* words) {
  if (kind > kInt8)
    pack_blocks(kind, (const uint8_t* const*)rows, panels, in, words);
  else
    pack_floats(kind, type, through_bfloat16, rows, panels, in, words);
}

// Some rows of a matrix of GGUF blocks of a kind, `stride` bytes apart, as float32, [count, in]; `rounded`: to the
// nearest bfloat16 numbers.
void foretell_widen_rows(int32_t kind, const uint8_t* matrix, int64_t stride, const int64_t* rows, int32_t count,
                         int32_t in, int32_t rounded, float* out) {
  std::vector<const uint8_t*> places;
  for (int i = 0; i < count; ++i) places.push_back(matrix + rows[i] * stride);
  widen_blocks(kind, places.data(), count, in, out);
  if (rounded) round_to_bfloat16(out, (size_t)count * in);
}

// Rounds rows of floats of a `RowType` to blocks of Q4_1 or Q8_0, row by row.
void foretell_round_rows(int32_t kind, int32_t type, const void* const* rows, int32_t count, int32_t in, uint8_t* out) {
  round_rows(kind, type, rows, count, in, out);
}

// Words of a panel.
int64_t foretell_panel_words(int32_t kind, int32_t in) { return (int64_t)panel_words(kind, in); }

// A token from each of the rows x + place[i] * width; -1 where no logit is above -infinity.
void foretell_sample(const float* x, const int64_t* place, const Sampling* sampling, int64_t* out, int32_t rows,
                     int32_t width, int32_t threads) {
  sample_rows(x, place, sampling, rows, width, out, threads);
}

// Gumbel noise [rows, width] at positions with these keys; see gumbel_noise.
void foretell_gumbel_noise(const uint64_t* keys, const int64_t* token_of, float* out, int32_t rows, int32_t width,
                           int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int i = 0; i < rows; ++i) gumbel_noise(keys[i], 1, token_of, 0, width, out + (size_t)i * (size_t)width);
}

// The tokens of a row x [width] that sampling keeps, by rising id, and their integer weights; returns how many.
int32_t foretell_kept_tokens(const float* x, const Sampling* sampling, int32_t* tokens, int64_t* weights,
                             int32_t width, int32_t threads) {
  return keep_row(x, *sampling, width, tokens, weights, threads);
}

// Copies slots source[0 .. count - 1] of a cache row to target, target + 1, ... in all layers; the slots ascend, and
// none is copied to a later one. kind: kFloat32 or kBfloat16.
void foretell_cache_move(int32_t kind, const Cache* cache, int32_t layers, int32_t kv_heads, int32_t head_dim,
                         int32_t row, const int32_t* source, int32_t count, int32_t target) {
  if (kind == kFloat32)
    move_slots(CacheLayout<Float32>(*cache, kv_heads, head_dim), layers, kv_heads, row, source, count, target);
  else
    move_slots(CacheLayout<Bfloat16>(*cache, kv_heads, head_dim), layers, kv_heads, row, source, count, target);
}

// Copies slots of a row of one cache to target, target + 1, ... of a row of another one of the same kind. source
// [layers, kv_heads, count]. Within one row of one cache the slots of a head ascend, and none is copied to a later one.
void foretell_cache_copy(int32_t kind, const Cache* from, int32_t from_row, const int32_t* source, int32_t count,
                         const Cache* to, int32_t to_row, int32_t target, int32_t layers, int32_t kv_heads,
                         int32_t head_dim) {
  const auto copy = [&](const auto& of, const auto& other) {
    copy_slots(of, from_row, source, count, other, to_row, target, layers, kv_heads);
  };
  if (kind == kFloat32)
    copy(CacheLayout<Float32>(*from, kv_heads, head_dim), CacheLayout<Float32>(*to, kv_heads, head_dim));
  else
    copy(CacheLayout<Bfloat16>(*from, kv_heads, head_dim), CacheLayout<Bfloat16>(*to, kv_heads, head_dim));
}

// Vector instructions that the kernels were compiled for.
const char* foretell_instructions() { return kInstructions; }

// The interface as text, a line per constant and per structure with its size; `structures.interface()` writes the same.
const char* foretell_abi() {
  static const std::string text = [] {
    std::string out;
    describe(out, "panel", kPanel);
    describe(out, "lanes", kLanes);
    describe(out, "max_head_dim", kMaxHeadDim);
    describe(out, "max_group", kMaxGroup);
    describe(out, "int8_block", Int8::kBlock);
    describe(out, "int8_group", Int8::kGroup);
#define S(Struct) describe(out, #Struct, sizeof(Struct))
    S(NeuronPlaces), S(Weight), S(SparseMlp), S(UnitChoice), S(Experts), S(StateLayer), S(States);
    S(Latent), S(Layer), S(Model), S(Stage), S(Embedding), S(Fusion), S(EagleInput), S(BlockInput), S(Sampling);
    S(DynamicTree), S(StatesRead), S(Layout), S(TreePass), S(Cache);
#undef S
    return out;
  }();
  return text.c_str();
}
}
