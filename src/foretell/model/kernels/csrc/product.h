// A matrix product and its epilogue: what products.cpp and quantized_products.cpp do for the other translation unit.

#pragma once

#include "interface.h"
#include "threads.h"

namespace foretell __attribute__((visibility("hidden"))) {

// What is done with a product: it is stored, added to what is there, or becomes an operand of the next product: gated,
// activation(gate) * up, or squared, relu(up)^2.
enum class Epilogue { kStore, kAdd, kGate, kSquare };

// Units of a product's inputs that are read, in runs of consecutive ones; the other inputs are zero.
struct Runs {
  int unit, count;
  const int32_t* bounds;  // [count, 2]: first unit, and the one after the last
};

struct Output {
  float* y;
  int stride;
  int width;  // numbers per row of y
  Epilogue epilogue;
  int32_t activation;
  int32_t operand;  // kGate, kSquare: of the next product
  const uint8_t* panels = nullptr;  // 0: this panel is not read, and its outputs are not written; null: all are
  const Runs* runs = nullptr;       // null: all inputs are read
  const float* added = nullptr;     // [tokens, added_width], what is added to the outputs; or null
  int added_width = 0;
  bool skips(int panel) const { return panels && !panels[panel]; }
};

// Rows of words.
struct Rows {
  const uint32_t* words;
  size_t stride;
};

// y = x W^T for this thread's panels of one weight; its `next` is not read.
void multiply(const Weight& w, const Rows& x, int tokens, const Output& output, const Weight* following,
              const Team& team);

// The same of quantised blocks with int8 activations.
void multiply_quantized(const Weight& w, const Rows& x, int tokens, const Output& output, const Weight* following,
                        const Team& team);

}  // namespace foretell

using namespace foretell;
