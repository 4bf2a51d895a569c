// Structures that Python passes in. structures.py reads their fields here; `foretell_abi` lets it compare their sizes.
// A field is declared as `type name, ...;` or `type* name, ...;`; a function pointer as `type (*name)(...);`.

#pragma once

#include <cstdint>

extern "C" {

constexpr int kMaxHeadDim = 576;
constexpr int kMaxGroup = 16;  // query heads per key-value head

constexpr int32_t kUnreadable = -3;  // what a pass returns where weights could not be read from their file

// How weights are stored: float32, bfloat16, int8 (rotated, groups of 192 inputs), as blocks of a GGUF file, as
// bfloat16 of which two in four inputs may not be zero, or by input; see by_input.h.
enum Kind : int32_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kInt8 = 2,
  kQ4_0 = 3,
  kQ4_1 = 4,
  kQ5_0 = 5,
  kQ5_1 = 6,
  kQ8_0 = 7,
  kQ4_K = 8,
  kQ5_K = 9,
  kQ6_K = 10,
  kMXFP4 = 11,
  kQ4_Z = 12,
  kNVFP4 = 13,
  kIQ4_NL = 14,
  kIQ4_XS = 15,
  kTwoOfFour = 16,
  kFloat32ByInput = 17,
  kBfloat16ByInput = 18
};
// What the inputs of a product are rounded to: float32, bfloat16, int8 as kInt8 weights need them, or int8 with one
// scale per 32 inputs. Blocks of a GGUF file are multiplied with all but the third, kTwoOfFour with the first two.
enum Operand : int32_t { kFloat32Operand = 0, kBfloat16Operand = 1, kInt8Operand = 2, kInt8BlocksOperand = 3 };
// kRelu2: relu(up)^2, without a gate.
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2, kRelu2 = 3, kRelu = 4 };
constexpr int32_t kKeysOnly = 2;
// The norms of queries and keys are over each head, over all of them, or over each head after its rotation.
enum NormedHeads : int32_t { kOneHead = 0, kAllHeads = 1, kRotatedHead = 2 };
enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

// Where the rows of the neurons of a feed-forward network lie: of hot ones in memory, of the others in a mapped file
// (PowerInfer, arXiv 2312.12456). A record holds a neuron's rows of up, down and gate, in this order.
struct NeuronPlaces {
  const int32_t *place, *neuron;                 // [ffn], the inverse of each other
  const uint32_t *hot_records, *file_records;    // [hot, record_words] and [ffn, record_words], by place
  int32_t hot, record_words;                     // places below `hot` are in memory
  int32_t file;                                  // descriptor of the mapped file
  int64_t offset;                                // bytes of the file before its records
  int64_t* counts;  // receive, added up: neurons that were read from the file, requests for them, bytes of these
};

struct Weight {           // one packed linear layer
  const uint32_t* words;  // panels of 32 outputs
  const float* bias;      // padded to whole panels, or null
  int32_t inputs, outputs;  // `outputs` counts those of gate and up, each padded to 16, when they are interleaved
  int32_t kind, operand;
  const Weight* next;  // further outputs of the same inputs, of another kind; or null
  float threshold;     // stored by input: inputs of at most this magnitude count as zero
  int32_t stored_inputs;  // inputs of the panels, of which the first `inputs` are read; 0: all
  const NeuronPlaces* places;  // stored by input, with rows that are the second ones of records; or null: all in words
  const Weight* factor;  // a layer of low rank: gives the inputs of this weight from those of the layer; or null
  // What is added to the outputs of the layer, from the same inputs: a matrix of low rank with a factor of its own, its
  // outputs padded to whole panels (LoRA, arXiv 2106.09685). Of qkv, output, gate_up, down and attention_gate; or null.
  const Weight* update;
};

// How the neurons of a token are chosen: by the magnitude of their activated gate (CATS, arXiv 2404.08763), or by the
// scores of a predictor of two matrices (Deja Vu, arXiv 2310.17157).
enum NeuronRule : int32_t { kByGate = 0, kPredicted = 1 };

struct SparseMlp {  // a gated feed-forward network that reads the neurons which each token chooses; see sparse.h
  int32_t rule, operand;       // operand: of the rows, kFloat32Operand or kBfloat16Operand
  float threshold;             // a neuron is read where its magnitude or score is greater
  int32_t row_words;           // words of a row
  Weight gate;                 // kByGate: of all neurons
  const uint32_t *gate_rows, *up_rows;  // [ffn, row_words]; gate_rows: kPredicted
  Weight predict_in, predict_out;       // kPredicted: to the predictor's latent vector, and from there to the scores
  int64_t* counts;  // receive, added up: tokens, the neurons they chose, and the neurons that were read
  const NeuronPlaces* places;  // null: all rows are in memory, in gate_rows, up_rows and `down`
};

// The units of a product that a token reads, by the scores of a predictor (Deja Vu, arXiv 2310.17157): query heads of
// attention, or runs of neurons, which are read as they are packed.
struct UnitChoice {
  int32_t unit, count;  // numbers of a unit, and units
  int32_t ahead;        // 1: the predictor reads what the layer before reads
  float threshold;      // a unit is read where its score is greater
  Weight predict_in, predict_out;
  int64_t* counts;  // as of SparseMlp
};

struct Experts {  // the mixture of experts of a layer
  Weight router;                // a logit per expert, then the gate of the shared expert where it has one
  const float* selection_bias;  // [count], added to the scores where experts are chosen; or null
  const Weight *gate_up, *down;  // [count]
  Weight shared_gate_up, shared_down;
  int32_t count, active, ffn, shared_ffn;  // shared_ffn: 0 where there is no shared expert
  int32_t shared_gate;                     // 1: the shared expert has a gate
  int32_t scoring, renormalize;
  int32_t groups, active_groups, ranked_by;  // see `MoEConfig` in config.py
  float scale;
  int32_t weighs_inputs;      // 1: an expert's weight multiplies its inputs instead of its outputs
  const float* expert_scale;  // [count], a factor on the weights of each expert; or null
  // Norms of experts that run beside the dense network of their layer, [hidden]: of the inputs of the router and of the
  // experts, and of the outputs of the experts and of the dense network. Else null.
  const float *router_norm, *input_norm, *output_norm, *dense_norm;
  // Where experts lie in a file: brings some of the layer into memory, whose numbers ascend, and returns how many of
  // the first ones are there until the next call; 0: they cannot be read. x [tokens, hidden]: the residual stream that
  // they will be added to. Null: all are in memory.
  int32_t (*load)(int32_t layer, const int32_t* experts, int32_t count, const float* x, int32_t tokens);
  int32_t layer;
};

// What a layer with a recurrent state is; see state_layers.py.
enum StateKind : int32_t { kDeltaNet = 0, kShortConvolution = 1, kMamba2 = 2 };
constexpr int kMaxTaps = 8;

struct StateLayer {  // what takes the place of a layer's attention
  int32_t kind, index;  // index: the layer's among those with a state
  const float* convolution;                        // [taps, channels]
  const float* convolution_bias;                   // [channels]; or null
  const float *rate, *time_bias;                   // [heads]
  const float* skip;                               // [heads], Mamba-2 only
  const float* norm;                               // one per number of the norm
  float eps;
};

// Recurrent states and records of drafted nodes (see state_store.py), and the order in which the tokens of a pass read
// and change them. Rows of the pass are numbered; records are numbered by cache row * nodes + node.
struct States {
  int32_t channels, taps, heads, groups, key_dim, value_dim;
  int32_t width;              // of a layer's projected input
  int32_t cache_rows, nodes;  // room in the store
  float *inputs, *state;      // [layers, cache_rows, 2, taps - 1, channels], [..., 2, heads, key_dim, value_dim]
  float *node_inputs, *node_keys, *node_values, *node_decay;  // [layers, cache_rows, nodes, ...]
  int32_t rows, depth, recorded_count;  // rows of the pass; deepest level of their trees below the root
  const int32_t *row, *start;           // [rows]: cache row, and which of its two states the pass starts from
  const int32_t *chain_begin, *chain;   // tokens of the rows' prefixes
  const int32_t *walk_begin, *walk_token, *walk_node, *walk_depth;  // drafted nodes, depth first; token -1: recorded
  const int32_t* windows;   // [tokens, taps]: inputs of the convolution: [rows, taps - 1], then recorded, then tokens
  const int32_t* tails;     // [rows, taps - 1]: the last inputs of the rows' prefixes
  const int32_t* recorded;  // records that windows read
  const int32_t* node;      // [tokens]: record of a drafted node; -1: in the prefix
};

struct Latent {  // multi-head latent attention, absorbed
  Weight query;  // from the queries' latent vector; of no use where query_rank is 0
  const float *query_norm, *key_norm;  // [query_rank], [kv_rank]
  const Weight *key, *value;  // [heads]: from nope_dim to kv_rank, from kv_rank to value_dim
  int32_t query_rank, kv_rank, nope_dim, rope_dim, value_dim;
  float eps;
};

struct Layer {
  Weight qkv, output, gate_up, down;
  Weight attention_gate;        // words null: attention is not gated
  const StateLayer* state;      // null: the layer has attention
  const Latent* latent;         // null: its attention is not latent
  int32_t store;                // index of the layer in the cache of keys and values
  const float *attention_norm, *mlp_norm;
  const float *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm;  // null where the architecture has none
  const float* sinks;  // [heads], scores that join the softmax over the keys; or null
  const Experts* experts;  // null: the layer is dense
  const float *cos, *sin;                                              // [context, rotary_dim / 2]
  int32_t window;                                                      // 0: full attention
  int32_t attention, mlp;    // 0: this sub-layer is skipped; attention kKeysOnly: it stores keys and values only
  int32_t chunked;           // 1: the window of a token begins at a multiple of its size
  int32_t reads_keys;        // 1: keys and values of the store are those of an earlier layer; qkv gives queries only
  const float* v_norm;       // [head_dim]; or null
  const float* query_scale;  // [context], a factor on the queries; or null
  // Per-layer inputs, see layer_inputs.py; words null: the layer has none. The layer's are those of a token from
  // `input_first` on.
  Weight input_gate, input_projection;
  const float* input_norm;
  int32_t input_first;
  float scale;  // multiplies the residual stream after the layer; 0: nothing does
  const SparseMlp* sparse;  // what takes the place of gate_up; `down` is then stored by input. Or null
  // Multiply the residual stream before the output of attention or of the feed-forward network is added (SliceGPT,
  // arXiv 2401.15024); words null: nothing does.
  Weight attention_shortcut, mlp_shortcut;
  const UnitChoice *heads, *neurons;  // null: tokens read all
};

struct Model {
  int32_t hidden, heads, kv_heads, head_dim, rotary_dim, ffn, context;  // the first rotary_dim of a head are rotated
  // Key-value heads in the cache: kv_heads, or 1 where that one serves several groups of query heads (latent
  // attention).
  int32_t cache_heads;
  int32_t cache_kind, activation;                                       // cache_kind: kFloat32 or kBfloat16
  float eps, scale, softcap, residual_scale;
  int32_t qk_norm_over;  // a NormedHeads
  int32_t parallel;      // 1: feed-forward networks have the input of the attention
  int32_t centered;      // 1: the mean of the residual stream is subtracted before the first layer and after each one
};

struct Stage {  // one stage of a multi-stage MLP speculator
  Weight project, token, output, head;
  const float *norm_weight, *norm_bias;
  float eps;
};

struct Embedding {
  const void* table;  // [vocab, hidden], float32 or bfloat16
  int32_t vocab, is_bfloat16;
  float scale;  // factor on every row
};

struct Fusion {  // a feature is `fuse` applied to `count` hidden states of the target, concatenated
  int32_t count;
  const float* norms;  // [count, hidden], scales of the norms of the states; null: they are not normed
  Weight fuse;
};

struct EagleInput {  // what EAGLE-3's first layer reads: token embeddings and features
  Embedding embedding;
  const float *embedding_norm, *feature_norm;
  int32_t norm_before_residual;  // 1: the residual stream starts from the normed feature
  // [hidden], the norm of the layers' output where that is the next feature and the input of the head (EAGLE-3.1); or
  // null: the output is the next feature as it is.
  const float* output_norm;
  Fusion fusion;
  // [hidden] each: the embedding and the feature of a mask, which is token -1 after feature -1 (P-EAGLE); or null.
  const float *mask, *mask_feature;
};

struct BlockInput {  // what DFlash's layers read, and its heads beside the output head
  Embedding embedding;
  const float *mask, *feature_norm;  // [hidden]: what fills the slots after the anchor; the norm of the features
  int32_t slots, depth;              // slots of a block; the last `depth` of them predict a token
  int32_t window_causal, window_from_anchor;  // of layers with a window; see `DFlashConfig`
  Fusion fusion;
  // The bias that a token gives to the scores of the next one: its row of `markov`, [vocab, inputs of markov_out],
  // through `markov_out`; table null: none.
  Embedding markov;
  Weight markov_out;
  Weight confidence;  // from a slot's normed state and the token's row of `markov` to a number; words null: none
};

struct Sampling {  // of one row of logits
  double inverse_temperature, top_p, min_p;
  uint64_t noise;  // key of the noise of all tokens at the row's position
  int32_t top_k;   // 0: all
};

struct DynamicTree {  // parameters of EAGLE-2's dynamic trees, one tree per request; keys and values up to the root are
                      // cached
  int32_t requests, depth, width, budget;
  double min_score, min_expand_score;  // least score of a node, and of a node that is expanded
  // Per request: the deepest level allowed (1 or more), its cache row, and its cached length including the root (the
  // last two only for layers with a cache).
  const int64_t *max_depth, *row, *length;
  // Null, or how the target samples: per request its parameters, whose key is not read (inverse temperature 0: not at
  // all), and the key of the noise at each level, [requests, depth]. Children are ranked as the target would choose.
  const Sampling* sampling;
  const uint64_t* noise;
  // Least confidence in a node for it to be added, and to be expanded: its probability given its parent or, if
  // `margin`, the difference of the two largest probabilities after its parent.
  double min_confidence, min_expand_confidence;
  int32_t margin;
  // Null, or receive the outputs of the layers, [requests * (1 + width * depth), hidden], the roots' first, and the row
  // of every node among them (-1: it was not run) and the confidence in it, [requests, 1 + budget] each.
  float* outputs;
  int64_t* output_row;
  double* confidence;
  // Receive per request a tree of the root and at most `budget` nodes below it: tokens, parents (-1 for the root) and
  // scores, [requests, 1 + budget] each, and the number of nodes below the root. The root's token is not written.
  int64_t *token, *parent, *sizes;
  double* score;
};

struct StatesRead {             // positions that layers read before a draft
  const float* const* states;  // hidden states of the target, [state_rows, hidden] each
  int32_t state_rows;
  // Of every position, request by request: the token after it (null for DFlash), and its row of the states.
  const int64_t *token, *place;
  const int64_t* count;  // positions per request; the token after the last one is the root
};

struct Layout {  // where the new tokens are in the cache; see `Layout` in layout.py
  int32_t count, max_extra_slots;
  const int32_t *row, *slot, *position, *visible_prefix;
  const int32_t* extra_slots;  // [count, max_extra_slots], -1 past the end of a token's list
  const float* layer_inputs;   // [count, input_width], per-layer inputs of all layers; or null
  int32_t input_width;
  float* queries;  // [layers, count, heads, head_dim], receives the queries that attention multiplies; or null
  const int32_t* in_pages;  // 1: the token attends to selected pages of the cache, if it has some; or null: none does
  const int32_t* window_end;  // windows end before this place of the visible slots; or null: after all of them
};

struct TreePass {  // a pass over token trees of `requests` requests with `nodes` nodes each; see core/tree.py
  int32_t requests, nodes;
  const int64_t* parent;                        // [requests, nodes]
  const int64_t *active, *scored;               // 1: the node is read; its logits are wanted
  const int64_t *prefix_length, *row, *length;  // per request; `length`: cached tokens
  int64_t *hidden_index, *logit_index;          // receive the number of every node among those read and scored, or -1
  int64_t* argmax;                              // receives the largest logit's index of every scored node
  // How requests sample, with the keys of their seeds as noise; an inverse temperature of 0: not. Or null: none does.
  const Sampling* sampling;
  const int64_t* token;  // of the nodes
  int64_t* sampled;      // receives what follows each node: see sample_paths
};

struct HiddenLayers {  // layers, ascending, whose input (the residual stream) is recorded in out [count, tokens,
                       // hidden]
  const int32_t* layer;
  int32_t count;
  float* out;
};

struct Cache {  // [layers, kv_heads, blocks, ...] per block of kCacheBlock slots as in cache.h
  void *k, *v;
  void *k_low, *v_low;       // the lower halves of int8 numbers in two parts; else null
  float *k_scale, *v_scale;  // [layers, kv_heads, blocks, kCacheBlock] of int8 and int4 numbers; else null
  const int32_t* table;      // [rows, row_blocks]: the block of every kCacheBlock slots of a row; -1: none
  int32_t blocks, rows, row_blocks;
  int32_t bits;    // of a number with a scale: 8 or 4
  int32_t coarse;  // whether only the upper halves of numbers in two parts are read
  // Packed groups, see packed_groups.h: [layers, kv_heads, packed_blocks, ...] per block of kCacheBlock slots
  void *k_packed, *v_packed, *k_range, *v_range;
  const int32_t* packed_table;  // [rows, packed_row_blocks]
  const int32_t* packed_slots;  // [rows]: slots from 0 on that are packed in all layers
  int32_t packed_blocks, packed_row_blocks;
  int32_t packed_bits;      // of a level: 4 or 2; 0: nothing is packed
  int32_t packed_residual;  // tokens before a token whose groups it reads whole
  const States* states;  // of the layers with a recurrent state; or null
  // Pages of keys, see pages.h: [layers, kv_heads, blocks, ...] per block; null where there are none
  void *k_least, *k_most;
  const int32_t* page_slots;  // [rows]: slots from 0 on whose bounds are known in all layers
  int32_t page_budget;        // keys that a token attends to; 0: all
};
}
