// Runs the kernels without Python: reads the arguments of calls from a file and writes their results to standard
// output. For tests of processors that are emulated. Numbers are int32; arrays are their size in bytes and the bytes.

#include <cstdio>

#include "kernels.cpp"
#include "products.cpp"
#include "quantized_products.cpp"

namespace {

FILE* input;

template <class T>
T number() {
  T value;
  if (std::fread(&value, sizeof value, 1, input) != 1) std::exit(2);
  return value;
}

// An array; null if it is empty. It is never freed.
template <class T>
T* array() {
  const size_t size = (size_t)number<int32_t>();
  if (!size) return nullptr;
  T* data = buffer<T>(size / sizeof(T) + 64).release();
  if (std::fread(data, 1, size, input) != size) std::exit(2);
  return data;
}

Weight weight() {
  Weight w = {};
  w.inputs = number<int32_t>(), w.outputs = number<int32_t>(), w.kind = number<int32_t>();
  w.operand = number<int32_t>();
  w.words = array<uint32_t>();
  return w;
}

void write(const float* x, size_t count) { std::fwrite(x, sizeof(float), count, stdout); }

void run_linear() {
  const Weight w = weight();
  const int tokens = number<int32_t>();
  const float* x = array<float>();
  const Buffer<float> y = buffer<float>((size_t)tokens * w.outputs);
  foretell_linear(&w, x, y.get(), tokens, w.outputs, 1);
  write(y.get(), (size_t)tokens * w.outputs);
}

void run_stack() {
  const Model* model = array<Model>();
  const int count = number<int32_t>();
  std::vector<Layer> layers((size_t)count);
  for (Layer& layer : layers) {
    layer = {};
    for (Weight* w : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) *w = weight();
    for (const float** field : {&layer.attention_norm, &layer.mlp_norm, &layer.q_norm, &layer.k_norm,
                                &layer.post_attention_norm, &layer.post_mlp_norm, &layer.sinks, &layer.cos, &layer.sin})
      *field = array<float>();
    layer.window = number<int32_t>(), layer.store = number<int32_t>(), layer.attention = layer.mlp = 1;
  }
  float* x = array<float>();
  Layout layout = {};
  layout.count = number<int32_t>(), layout.max_extra_slots = number<int32_t>();
  for (const int32_t** field :
       {&layout.row, &layout.slot, &layout.position, &layout.visible_prefix, &layout.extra_slots})
    *field = array<int32_t>();
  Cache cache = {};
  cache.k = array<uint32_t>(), cache.v = array<uint32_t>();
  cache.k_scale = array<float>(), cache.v_scale = array<float>();
  cache.table = array<int32_t>();
  cache.blocks = number<int32_t>(), cache.rows = number<int32_t>(), cache.row_blocks = number<int32_t>();
  if (foretell_stack(model, layers.data(), 0, count, x, nullptr, &layout, &cache, nullptr, 0, nullptr, nullptr,
                     1) != -1)
    std::exit(3);
  write(x, (size_t)layout.count * model->hidden);
}

}  // namespace

// kernel_driver FILE; without a file it prints the instructions it was compiled for.
int main(int count, char** arguments) {
  if (count < 2) return std::puts(foretell_instructions()) < 0;
  input = std::fopen(arguments[1], "rb");
  if (!input) return 2;
  for (int calls = number<int32_t>(); calls > 0; --calls) number<int32_t>() ? run_stack() : run_linear();
  return 0;
}
