// Products that read the units which each token chooses: query heads, and runs of neurons.
//
// A pass reads the panels and inputs that one of its tokens has chosen. What a token has not chosen is zero to it, so
// that its numbers depend on its own choice alone. Weights are read as they are packed, in all storage types.

#pragma once

#include <vector>

#include "linear.h"

namespace {

// The choices of the tokens of a pass among the units of a layer.
class Units {
 public:
  // most: units of the layer that has most of them.
  Units(int tokens, int most, int rank)
      : tokens_(tokens),
        rank_(rank),
        scores_(buffer<float>((size_t)tokens * (size_t)round_up(most, kPanel))),
        latent_(buffer<float>((size_t)tokens * (size_t)rank)),
        chosen_((size_t)tokens * (size_t)most) {}

  // Scores of the units from the stream x, normed. Threads do not wait at the end.
  void score(const UnitChoice& c, const float* x, int hidden, const float* norm, float eps, const Operands& operands,
             const Team& team) {
    const int stride = round_up(c.count, kPanel);
    operands.multiply(c.predict_in, x, hidden, norm, eps,
                      {latent_.get(), rank_, c.predict_in.outputs, Epilogue::kStore, 0, 0}, nullptr, team);
    team.barrier();
    operands.multiply(c.predict_out, latent_.get(), rank_, nullptr, 0,
                      {scores_.get(), stride, c.count, Epilogue::kStore, 0, 0}, nullptr, team);
  }

  // Chooses by the scores; all: every unit. Of the product whose outputs the units are, a unit has so many panels, and
  // `further` panels after them are always read.
  void choose(const UnitChoice& c, bool all, int panels_per_unit, int further, const Team& team) {
    team.barrier();
    if (!team.thread) {
      const int stride = round_up(c.count, kPanel);
      int64_t chosen = 0;
      panels_.assign((size_t)(c.count * panels_per_unit + further), 0);
      std::fill_n(panels_.end() - further, further, (uint8_t)1);
      bounds_.clear();
      int read = 0;
      for (int u = 0; u < c.count; ++u) {
        bool any = false;
        for (int t = 0; t < tokens_; ++t) {
          const bool own = all || scores_[(size_t)(t * stride + u)] > c.threshold;
          chosen_[(size_t)(t * c.count + u)] = own;
          chosen += own, any |= own;
        }
        if (!any) continue;
        ++read;
        std::fill_n(panels_.begin() + u * panels_per_unit, panels_per_unit, (uint8_t)1);
        if (bounds_.empty() || bounds_.back() != u) bounds_.insert(bounds_.end(), {u, u});
        bounds_.back() = u + 1;
      }
      runs_ = {c.unit, (int)bounds_.size() / 2, bounds_.data()};
      c.counts[0] += tokens_, c.counts[1] += chosen, c.counts[2] += read;
    }
    team.barrier();
  }

  // The panels that are read; null where units are no whole panels, and all are.
  const uint8_t* panels(int outputs_per_unit) const { return outputs_per_unit % kPanel ? nullptr : panels_.data(); }
  const Runs* runs() const { return &runs_; }

  // Sets what the tokens have not chosen to zero, in rows of `stride` words with so many words per unit.
  void clear(const UnitChoice& c, float* rows, size_t stride, int words, const Team& team) const {
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t)
      for (int u = 0; u < c.count; ++u)
        if (!chosen_[(size_t)(t * c.count + u)])
          std::fill_n(rows + (size_t)t * stride + (size_t)(u * words), words, 0.0f);
  }

 private:
  const int tokens_, rank_;
  const Buffer<float> scores_, latent_;
  std::vector<uint8_t> chosen_, panels_;
  std::vector<int32_t> bounds_;
  Runs runs_ = {};
};

}  // namespace
