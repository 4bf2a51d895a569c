// What Python passes in; structures.py mirrors these structures field by field. `foretell_abi` tells whether it does.

#pragma once

#include <cstdint>

extern "C" {

constexpr int kAbiVersion = 1;  // raised when the meaning of something here changes and its form does not

enum Precision : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct Weight {           // one packed linear layer
  const uint32_t* words;  // panels of 32 outputs
  const float* bias;      // padded to whole panels, or null
  int32_t in, out;        // out counts gate and up outputs, each padded to 16, when the two are interleaved
};

struct Layer {
  Weight qkv, output, gate_up, down;
  const float *attention_norm, *mlp_norm;
  const float *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm;  // null where the architecture has none
  const float *cos, *sin;                                              // [context, head_dim / 2]
  int32_t window;                                                      // 0: full attention
  int32_t attention, mlp;                                              // 0: the residual passes this half by
};

struct Model {
  int32_t hidden, heads, kv_heads, head_dim, ffn, context;
  int32_t precision, activation;
  float eps, scale, softcap;
};

struct Stage {  // of a multi-stage MLP speculator
  Weight project, token, output, head;
  const float *norm_weight, *norm_bias;
  float eps;
};

struct Embedding {
  const void* table;      // [vocab, hidden], float32 or, as `halves`, the upper halves of it
  int32_t vocab, halves;
  float scale;  // what rows are multiplied by
};

struct Entry {  // how EAGLE-3's layers begin: with embeddings of tokens and features of positions
  Embedding embedding;
  const float *embedding_norm, *feature_norm;
  int32_t normed;  // the residual stream starts from the normed feature
  // Features from `kinds` states of the target side by side: each normed with its own scale (null: as it is), then through `fuse`.
  int32_t kinds;
  const float* state_norms;
  Weight fuse;
};

struct Beam {  // a tree by confidence for each of some texts, which the layers have read up to the root
  int32_t texts, depth, width, budget;
  double least, stop;  // a node's score at least; that of one that is gone on from
  // Of every text: tokens that it has room for, 1 or more; where its keys are, and how many, for layers that have some.
  const int64_t *room, *row, *length;
};

struct Tokens {  // see `Layout` in Python
  int32_t count, extras;
  const int32_t *row, *slot, *position, *prefix;
  const int32_t* extra;  // [count, extras], -1 past the end of a token's list
};

struct Taps {  // layers, ascending, before which the residual stream is wanted: out [count, tokens, hidden]
  const int32_t* layer;
  int32_t count;
  float* out;
};

struct Cache {  // [layers, rows, kv_heads, slots, head_dim]
  uint32_t *k, *v;
  int32_t rows, slots;
};
}
