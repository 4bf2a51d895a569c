// Feed-forward networks that read the neurons which each token chooses.
//
// Gate and up are stored as rows, one per neuron, and down by input, so that a neuron is three rows. A pass reads the
// neurons that one of its tokens has chosen, and the numbers of a token depend on its own choice alone. Where some rows
// lie in a file, these are asked for first, and the neurons in memory are multiplied while they are read.

#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"
#include "places.h"
#include "row_products.h"

namespace {

class SparsePass {
 public:
  SparsePass(const Model& model, int tokens, int rank, int stride)
      : m_(model),
        tokens_(tokens),
        rank_(rank),
        stride_(stride),
        chosen_(buffer<int32_t>((size_t)stride)),
        scores_(buffer<float>((size_t)tokens * (size_t)stride)),
        latent_(buffer<float>((size_t)tokens * (size_t)rank)) {}

  // Writes what `down` multiplies, [tokens, stride], zero where a neuron is not chosen.
  void run(const Layer& layer, const float* x, float* inner, const Operands& operands, const Team& team) const {
    const SparseMlp& s = *layer.sparse;
    const auto product = [&](const Weight& w, const float* from, int from_stride, const float* norm, float* to,
                             int to_stride) {
      operands.multiply(w, from, from_stride, norm, m_.eps, {to, to_stride, w.outputs, Epilogue::kStore, 0, 0}, nullptr,
                        team);
      team.barrier();
    };
    if (s.rule == kPredicted) {
      product(s.predict_in, x, m_.hidden, layer.mlp_norm, latent_.get(), rank_);
      product(s.predict_out, latent_.get(), rank_, nullptr, scores_.get(), stride_);
    } else {
      product(s.gate, x, m_.hidden, layer.mlp_norm, scores_.get(), stride_);
    }
    const Rows rows = operands.prepare(s.operand, x, m_.hidden, m_.hidden, layer.mlp_norm, m_.eps, team);
    if (s.operand == kFloat32Operand)
      multiply_chosen<Float32>(s, rows, inner, team);
    else
      multiply_chosen<Bfloat16>(s, rows, inner, team);
    team.barrier();
  }

 private:
  template <class P>
  void multiply_chosen(const SparseMlp& s, const Rows& x, float* inner, const Team& team) const {
    const auto [first, last] = team.share(stride_ / kLanes);
    const int from = kLanes * first, to = std::min(kLanes * last, m_.ffn);
    const int words = (int)FloatProduct<P>::row_words(m_.hidden);
    for_numbers(from, to, [&](size_t at) {
      const Float score = load<Float>(scores_.get() + at);
      const Float size = s.rule == kByGate ? activate(score, m_.activation) : score;
      const Float magnitude = s.rule == kByGate ? larger(size, -size) : size;
      store(inner + at, select(magnitude > splat(s.threshold), splat(1.0f), Float{}));
    });
    std::vector<int> read;
    int64_t chosen = 0;
    for (int j = from; j < to; ++j) {
      int own = 0;
      for (int t = 0; t < tokens_; ++t) own += inner[place(t, j)] != 0;
      chosen += own;
      if (own) read.push_back(j);
      if (s.places) chosen_[j] = own;
    }
    if (s.places) fetch(*s.places, read, team);
    multiply_read<P>(read, kUpRow, s, x, words, [&](size_t at, float product) {
      inner[at] = inner[at] == 0 ? 0 : product;
    });
    if (s.rule == kPredicted)
      multiply_read<P>(read, kGateRow, s, x, words, [&](size_t at, float product) { scores_[at] = product; });
    for_numbers(from, to, [&](size_t at) {
      store(inner + at, gated(load<Float>(scores_.get() + at), load<Float>(inner + at), m_.activation));
    });
    count(s.counts, team.thread ? 0 : tokens_, chosen, (int64_t)read.size());
  }

  // Asks for the rows of all chosen neurons that lie in the file, and puts those in memory first in this thread's list.
  void fetch(const NeuronPlaces& places, std::vector<int>& read, const Team& team) const {
    team.barrier();
    const auto [from, to] = team.share(m_.ffn - places.hot);
    ask_for_chosen(places, chosen_.get(), places.hot + from, places.hot + to);
    std::stable_partition(read.begin(), read.end(), [&](int j) { return !is_in_file(places, j); });
  }

  // Calls take(place, product) for every token and every one of some neurons.
  template <class P, class Take>
  void multiply_read(const std::vector<int>& neurons, RecordRow which, const SparseMlp& s, const Rows& x, int words,
                     const Take& take) const {
    const int count = (int)neurons.size();
    const auto row = [&](int n) {
      const int j = neurons[(size_t)std::min(n, count - 1)];
      if (s.places) return record_row(*s.places, j, which, (size_t)s.row_words);
      return (which == kUpRow ? s.up_rows : s.gate_rows) + (size_t)j * (size_t)s.row_words;
    };
    for (int n = 0; n < count; n += kRowsAtOnce) {
      const uint32_t *rows[kRowsAtOnce], *soon[kRowsAtOnce];
      for (int i = 0; i < kRowsAtOnce; ++i) rows[i] = row(n + i), soon[i] = row(n + kRowsAtOnce + i);
      for (int t = 0; t < tokens_; ++t) {
        float out[kRowsAtOnce];
        multiply_rows<P>(rows, soon, x.words + (size_t)t * x.stride, words, out);
        for (int i = 0; i < std::min(kRowsAtOnce, count - n); ++i) take(place(t, neurons[(size_t)(n + i)]), out[i]);
      }
    }
  }

  size_t place(int token, int neuron) const { return (size_t)token * (size_t)stride_ + (size_t)neuron; }

  // Calls run(place) for every 16 neurons of from .. to - 1 of every token.
  template <class Run>
  void for_numbers(int from, int to, const Run& run) const {
    for (int t = 0; t < tokens_; ++t)
      for (int j = from; j < to; j += kLanes) run(place(t, j));
  }

  static void count(int64_t* counts, int64_t tokens, int64_t chosen, int64_t read) {
    const int64_t numbers[] = {tokens, chosen, read};
    for (int i = 0; i < 3; ++i) __atomic_fetch_add(counts + i, numbers[i], __ATOMIC_RELAXED);
  }

  const Model& m_;
  const int tokens_, rank_, stride_;
  const Buffer<int32_t> chosen_;  // per neuron of a network with rows in a file: by how many tokens
  const Buffer<float> scores_, latent_;
};

}  // namespace
