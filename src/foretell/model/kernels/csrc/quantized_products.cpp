// Products of quantised blocks with int8 activations.

#include "panels.h"

namespace {

// How many blocks of tokens it takes that a group of K is unpacked once for all of them; 0: each block unpacks it. By
// measurement on Zen 3: worth it where scales are in units of a block's (Q6_K, NVFP4; from three blocks on Q4_K, Q5_K).
// Levels in two planes cost more stores than they spare.
template <class K>
constexpr int kUnpackedFrom =
    kWholePanels || kPlanes<K> == 2 ? 0 : K::kTwoScales ? 2 : K::kOffset && K::kInputs > 32 ? 3 : 0;

// y = x W^T for this thread's panels of blocks of kind K, with int8 activations.
template <class K>
void multiply_blocks(const Weight& w, const Rows& x, int tokens, const Output& output, const Weight* following,
                     const Team& team) {
  if constexpr (kUnpackedFrom<K> > 0)
    if (tokens > (kUnpackedFrom<K> - 1) * kHalfTokens && !output.runs)
      return multiply_widened<Unpacked<K>, K>(w, x, tokens, output, team);
  multiply_tiles<QuantizedProduct<K>>(w, x, tokens, output, following, team);
}

}  // namespace

void foretell::multiply_quantized(const Weight& w, const Rows& x, int tokens, const Output& output,
                                  const Weight* following, const Team& team) {
  with_blocks(w.kind, [&](auto k) {
    using K = typename decltype(k)::Type;
    if constexpr (!std::is_same_v<K, TwoOfFour>) multiply_blocks<K>(w, x, tokens, output, following, team);
  });
}
