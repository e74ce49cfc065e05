// Prints a digest of what the kernels compute from fixed inputs, for each instruction set that its arguments name: the
// same on every machine. Built with sanitizers, it is also where they look.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

using namespace whorl;

extern "C" {
int whorl_cpu_choose(const char*);
void whorl_cpu_set_threads(int);
int64_t whorl_cpu_panel_bytes(int32_t, int32_t, int32_t, int64_t);
int whorl_cpu_packing(int32_t, Packing*);
void whorl_cpu_pack(int32_t, const uint8_t*, int64_t, int64_t, uint8_t*);
void whorl_cpu_linear_packed(const Matrix*, float*, int64_t, int64_t, float*, int64_t, const float*);
void whorl_cpu_linear_plain(const Plain*, float*, int64_t, int64_t, float*, int64_t, const float*);
void whorl_cpu_unpack(const Matrix*, const int64_t*, int64_t, float*);
void whorl_cpu_glu(const float*, const float*, int64_t, int64_t, int64_t, int64_t, int32_t, float*);
void whorl_cpu_route(const float*, int64_t, const Routing*, float*, int32_t*);
void whorl_cpu_log_softmax(const float*, int64_t, int64_t, float*);
void whorl_cpu_layers(const Layer*, int64_t, const Norm*, const Attention*, const Rotation*, const int64_t*, float*,
                      int64_t, int64_t, float*);
}

namespace {

uint64_t state = 1;

uint32_t next() { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }

std::vector<float> numbers(size_t count, float scale = 1) {
  std::vector<float> x(count);
  for (float& each : x) each = (float(next() & 0xffff) / 32768.0f - 1.0f) * scale;
  return x;
}

void print(const std::string& name, const std::vector<float>& x) {
  uint64_t digest = 1469598103934665603u;
  for (float each : x) {
    uint32_t bits;
    memcpy(&bits, &each, 4);
    digest = (digest ^ bits) * 1099511628211u;
  }
  printf("%s %016llx\n", name.c_str(), (unsigned long long)digest);
}

struct Weights {
  std::vector<uint8_t> panels;
  Segment segment;
  Matrix matrix;
};

const int64_t BYTES[] = {18, 20, 22, 24, 34, 144, 176, 210};

void pack(int kind, int64_t rows, int64_t columns, Weights& out) {
  const int64_t values = kind < 5 ? 32 : 256;
  std::vector<uint8_t> blocks(rows * columns / values * BYTES[kind]);
  for (uint8_t& each : blocks) each = uint8_t(next());
  const uint16_t small[] = {0x1c00, 0x2000, 0x9c00, 0x2400};  // fp16: 2^-8, 2^-7, -2^-8, 2^-6
  for (size_t b = 0; b < blocks.size(); b += BYTES[kind])
    for (int half : {0, 2}) {
      if (half == 2 && (kind == 0 || kind == 2 || kind == 4 || kind == 7)) continue;
      memcpy(&blocks[b + (kind == 7 ? 208 : half)], &small[next() % 4], 2);
    }
  Packing p;
  whorl_cpu_packing(kind, &p);
  out.panels.assign((rows + 15) / 16 * whorl_cpu_panel_bytes(p.bits, p.scales, p.has_minima, columns), 0);
  whorl_cpu_pack(kind, blocks.data(), rows, columns, out.panels.data());
  out.segment = {out.panels.data(), rows, 0, p};
  out.matrix = {&out.segment, 1, columns, 2};
}

void products(const std::string& name) {
  for (int kind = 0; kind < 8; kind++) {
    Weights w;
    pack(kind, 75, 512, w);
    std::vector<float> x = numbers(11 * 512), y(11 * 75), values(75 * 512), bias = numbers(75);
    whorl_cpu_linear_packed(&w.matrix, x.data(), 11, 512, y.data(), 75, bias.data());
    whorl_cpu_unpack(&w.matrix, nullptr, 75, values.data());
    print(name + " packed " + std::to_string(kind), y);
    w.matrix.planes = 1;
    whorl_cpu_linear_packed(&w.matrix, x.data(), 11, 512, y.data(), 75, bias.data());
    print(name + " packed in 8 bits " + std::to_string(kind), y);
    print(name + " values " + std::to_string(kind), values);
  }
  for (int64_t columns : {1, 70, 576}) {
    std::vector<float> weight = numbers(37 * columns), x = numbers(5 * columns), y(5 * 37);
    const Plain plain{(const uint8_t*)weight.data(), 37, columns, columns, FP32};
    whorl_cpu_linear_plain(&plain, x.data(), 5, columns, y.data(), 37, nullptr);
    print(name + " plain " + std::to_string(columns), y);
    std::vector<uint16_t> narrow(37 * columns);
    for (uint16_t& each : narrow) each = uint16_t(next() % 2 << 15 | (0x3c00 + next() % 0x300));
    for (int type : {BF16, FP16}) {
      const Plain half{(const uint8_t*)narrow.data(), 37, columns, columns, type};
      whorl_cpu_linear_plain(&half, x.data(), 5, columns, y.data(), 37, nullptr);
      print(name + " of 16 bits " + std::to_string(columns) + " " + std::to_string(type), y);
    }
  }
  std::vector<float> gates = numbers(3 * 74, 9), y(3 * 37);
  for (int gelu : {0, 1}) {
    whorl_cpu_glu(gates.data(), gates.data() + 37, 3, 74, 1, 37, gelu, y.data());
    print(name + " glu " + std::to_string(gelu), y);
  }
}

void logprobs(const std::string& name) {
  std::vector<float> x = numbers(3 * 1037, 9), y(x.size());
  for (size_t i = 0; i < x.size(); i += 5) x[i] = -__builtin_inff();
  whorl_cpu_log_softmax(x.data(), 3, 1037, y.data());
  print(name + " log_softmax", y);
}

void routes(const std::string& name) {
  const int64_t tokens = 5, experts = 37, choices = 6;
  std::vector<float> logits = numbers(tokens * experts, 4), bias = numbers(experts), weights(tokens * choices);
  std::vector<int32_t> ids(tokens * choices);
  for (int sigmoid : {0, 1}) {
    const Routing routing{sigmoid ? bias.data() : nullptr, experts, choices, sigmoid, 1 - sigmoid, 1.5f};
    whorl_cpu_route(logits.data(), tokens, &routing, weights.data(), ids.data());
    for (size_t i = 0; i < ids.size(); i++) weights[i] += float(ids[i]);
    print(name + " route " + std::to_string(sigmoid), weights);
  }
}

// Two layers, the second with experts, and two prompts: the second is so long that its keys are several spans.
void layers(const std::string& name, int64_t window, float softcap) {
  const int64_t width = 96, heads = 4, kv = 2, dim = 40, inner = 64, lengths[] = {7, 530}, count = 537, size = 16;
  std::vector<float> norm = numbers(width), head_norm = numbers(dim), cache_k(40 * size * kv * dim), cache_v(cache_k);
  const float scale = 0.15f;
  std::vector<float> qkv = numbers((heads + 2 * kv) * dim * width, scale), out = numbers(width * heads * dim, scale);
  std::vector<float> sinks = numbers(heads), table = numbers(count * dim), x = numbers(count * width), y(count * width);
  Weights gate_up, down, gate_ups[3], downs[3];
  pack(1, 2 * inner, width, gate_up);
  pack(4, width, inner, down);
  const Matrix *gate_up_of[3], *down_of[3];
  for (int e = 0; e < 3; e++) {
    pack(e, 2 * inner, width, gate_ups[e]), pack(4 - e, width, inner, downs[e]);
    gate_up_of[e] = &gate_ups[e].matrix, down_of[e] = &downs[e].matrix;
  }
  std::vector<float> router = numbers(3 * width, scale), plain_down = numbers(3 * width * inner, scale);
  const Plain plain_router{(const uint8_t*)router.data(), 3, width, width, FP32};
  const Plain first_down{(const uint8_t*)plain_down.data(), width, inner, inner, FP32};
  Mixture mixture{{nullptr, &plain_router, nullptr}, {gate_up_of, {}, 0, width}, {down_of, {}, 0, inner}, {}};
  if (window) mixture.down = {nullptr, first_down, width * inner * 4, inner};
  mixture.routing = {nullptr, 3, 2, 0, 1, 1.0f};
  const Plain plain_qkv{(const uint8_t*)qkv.data(), (heads + 2 * kv) * dim, width, width, FP32};
  const Plain plain_out{(const uint8_t*)out.data(), width, heads * dim, heads * dim, FP32};
  Layer layer{};
  layer.attention_norm = layer.mlp_norm = {norm.data(), 1e-6f, 0};
  layer.q_norm = layer.k_norm = {head_norm.data(), 1e-6f, 1};
  layer.qkv = {nullptr, &plain_qkv, nullptr}, layer.out = {nullptr, &plain_out, nullptr};
  layer.gate_up = {&gate_up.matrix, nullptr, nullptr}, layer.down = {&down.matrix, nullptr, nullptr};
  layer.cache = {cache_k.data(), cache_v.data(), size * kv * dim, kv * dim, dim, size * kv * dim, kv * dim, dim,
                 nullptr, nullptr, size, FP32, FP32};
  layer.heads = heads, layer.kv_heads = kv, layer.dim = dim, layer.window = window, layer.inner = inner;
  layer.scale = 0.2f;
  Layer both[] = {layer, layer};
  both[1].mixture = &mixture;
  std::vector<int32_t> tables, starts{0, 7, 537}, context{7, 530};
  std::vector<int64_t> slots;
  for (int b = 0; b < 2; b++)
    for (int i = 0; i < 35; i++) tables.push_back(b ? i + 1 : 0);
  for (int64_t i = 0; i < lengths[0]; i++) slots.push_back(i);
  for (int64_t i = 0; i < lengths[1]; i++) slots.push_back(size + i);
  Attention step{};
  step.tables = tables.data(), step.starts = starts.data(), step.lengths = context.data(), step.table_stride = 35;
  step.num_sequences = 2, step.softcap = softcap, step.sinks = softcap > 0 ? sinks.data() : nullptr;
  const Rotation rotation{table.data(), dim, 0, 0, 0, 0};
  const Norm last{norm.data(), 1e-6f, 0};
  whorl_cpu_layers(both, 2, &last, &step, &rotation, slots.data(), x.data(), count, width, y.data());
  print(name + " layers " + std::to_string(window), y);
}

}  // namespace

int main(int count, char** names) {
  for (int i = 1; i < count; i++) {
    if (!whorl_cpu_choose(names[i])) continue;
    for (int threads : {1, 3}) {
      state = 1;
      whorl_cpu_set_threads(threads);
      const std::string name = std::string(names[i]) + " " + std::to_string(threads);
      products(name), logprobs(name), routes(name), layers(name, 0, 0), layers(name, 100, 5);
    }
  }
}
