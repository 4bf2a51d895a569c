// The matrix products, but for those of quantised blocks with int8 activations.

#include "amx.h"
#include "by_input.h"
#include "panels.h"

namespace {

inline bool uses_tiles(const Weight& w, int tokens) {
  if (!kHasTiles || w.operand == kFloat32Operand) return false;
  return w.operand == kBfloat16Operand || tokens >= kTileTokens;
}

// y = x W^T for this thread's panels, with AMX's tiles.
inline void multiply_in_tiles(const Weight& w, const Rows& x, int tokens, const Output& output, const Team& team) {
  const size_t size = panel_words(w);
  const auto [from, to] = team.share((w.outputs + kPanel - 1) / kPanel);
  const TileRows tiles(tokens);
  const TileScope scope(tiles.rows, w.operand == kInt8BlocksOperand ? kGroupWords : kTileWords);
  alignas(64) float sums[kTilesAtOnce * kTileSums];
  alignas(64) uint32_t widened[kTileChunkWords * kPanel];
  for (int p = from; p < to; ++p) {
    if (output.skips(p)) continue;
    const uint32_t* panel = w.words + p * size;
    const auto finish = [&](int token, const Float* out) { apply_epilogue(output, w, out, p, token); };
    if (w.operand == kInt8Operand) {
      multiply_panel_int8(panel, w.inputs, x.words, x.stride, tiles, sums, finish);
    } else if (!has_blocks(w)) {
      const auto words = [&](int first, int) { return panel + kPanel * first; };
      multiply_panel_bfloat16(w.inputs, x.words, x.stride, tiles, sums, words, finish);
    } else {
      with_blocks(w.kind, [&](auto k) {
        using K = typename decltype(k)::Type;
        if constexpr (!std::is_same_v<K, TwoOfFour>)
          if (w.operand == kInt8BlocksOperand)
            return multiply_panel_quantized<K>(panel, w.inputs, x.words, x.stride, tiles, sums, finish);
        constexpr int kWords = kGroupInputs / Bfloat16::kDepth, kGroups = K::kInputs / kGroupInputs;
        const auto words = [&](int first, int count) {
          for (int group = first / kWords; group < (first + count) / kWords; ++group)
            widen_words<Bfloat16, K>(panel + group / kGroups * K::kWords, group % kGroups,
                                     widened + (group * kWords - first) * kPanel);
          return (const uint32_t*)widened;
        };
        multiply_panel_bfloat16(w.inputs, x.words, x.stride, tiles, sums, words, finish);
      });
    }
  }
}

// y = x W^T for this thread's panels of a weight that is stored by input; inputs that are zero, or count as zero, are
// not read.
template <class R>
void multiply_by_input(const Weight& w, const Rows& x, int tokens, const Output& output, const Team& team) {
  const int panels = (w.outputs + kPanel - 1) / kPanel;
  const auto [from, to] = team.share(panels);
  InputSums<R> sums(w.words, w.places, (size_t)panels * R::kPanelWords, w.inputs, tokens);
  for (int start = 0; start < tokens; start += sums.block) {
    const int some = std::min(sums.block, tokens - start);
    sums.choose((const float*)x.words + (size_t)start * x.stride, x.stride, some, w.threshold);
    for (int first = from; first < to; first += sums.width) {
      const int last = std::min(first + sums.width, to);
      sums.add(first, last);
      for (int p = first; p < last; ++p)
        for (int t = 0; t < some; ++t) apply_epilogue(output, w, sums.tile(p - first, t), p, start + t);
    }
  }
}

}  // namespace

void foretell::multiply(const Weight& w, const Rows& x, int tokens, const Output& output, const Weight* following,
                        const Team& team) {
  if (w.kind == kFloat32ByInput) return multiply_by_input<Float32Rows>(w, x, tokens, output, team);
  if (w.kind == kBfloat16ByInput) return multiply_by_input<Bfloat16Rows>(w, x, tokens, output, team);
  if (uses_tiles(w, tokens)) return multiply_in_tiles(w, x, tokens, output, team);
  if (!has_blocks(w))
    return with_operand(w.operand, [&](auto o) {
      using P = typename decltype(o)::Type;
      if constexpr (!std::is_same_v<P, Int8Blocks>) multiply_tiles<P>(w, x, tokens, output, following, team);
    });
  with_blocks(w.kind, [&](auto k) {
    using K = typename decltype(k)::Type;
    if (w.operand == kFloat32Operand)
      multiply_widened<Widened<Float32, K>, K>(w, x, tokens, output, team);
    else if (std::is_same_v<K, TwoOfFour> && tokens <= TwoOfFourProduct::kMaxTokens)
      multiply_tiles<TwoOfFourProduct>(w, x, tokens, output, following, team);
    else if constexpr (std::is_same_v<K, TwoOfFour>)
      multiply_widened<Widened<Bfloat16, K>, K>(w, x, tokens, output, team);
    else if (w.operand == kBfloat16Operand)
      multiply_widened<Widened<WidenedWords, K>, K>(w, x, tokens, output, team);
    else
      multiply_quantized(w, x, tokens, output, following, team);
  });
}
