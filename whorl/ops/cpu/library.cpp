// The functions of the shared library, as whorl/ops/cpu/library.py calls them: each divides its work among threads.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#ifndef WHORL_SOURCES
#define WHORL_SOURCES ""
#endif
#define API extern "C" __attribute__((visibility("default")))

using namespace whorl;

namespace {

const Kernels* kernels = &plain_kernels;

// Work that is worth a thread, in products of two numbers or in bytes of weights: a few microseconds.
constexpr int64_t WORTH = 48 << 10;
constexpr int64_t TILE_BYTES = 192 << 10;  // of weights that stay in a cache

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pieces that `count` units of this much work are cut into: enough that threads end together.
int64_t pieces(int64_t count, int64_t work) {
  const int64_t most = std::max<int64_t>(1, count * work / WORTH);
  return std::min({count, most, int64_t(num_threads()) * (work * count > 64 * WORTH ? 8 : 3)});
}

// Calls function(first, last) for ranges of [0, count).
template <class Function>
void ranges(int64_t count, int64_t work, const Function& function) {
  const int64_t parts = count ? pieces(count, work) : 0;
  parallel(parts, [&](int64_t i) { function(count * i / parts, count * (i + 1) / parts); });
}

template <class T>
struct Scratch {  // memory of the calling thread, used again by the next call
  std::vector<T> memory;
  T* get(int64_t count) {
    if (int64_t(memory.size()) < count) memory.resize(count);
    return memory.data();
  }
};

thread_local Scratch<int8_t> codes_of_tokens;
thread_local Scratch<float> scales_of_tokens, partials_of_rows;
thread_local Scratch<int32_t> sums_of_tokens;

Rounded rounded(Rows x, const Matrix& matrix) {
  const int64_t size = x.count * matrix.columns, blocks = size / BLOCK, planes = matrix.planes;
  const Rounded out{codes_of_tokens.get(size * planes), scales_of_tokens.get(2 * blocks),
                    sums_of_tokens.get(2 * planes * blocks), matrix.columns, x.count, matrix.planes};
  ranges(up(x.count, GROUP), GROUP * matrix.columns,
         [&](int64_t first, int64_t last) { kernels->round_tokens(x, out, first, last); });
  return out;
}

void add_bias(Rows out, int64_t column, int64_t count, const float* bias) {
  for (int64_t t = 0; t < out.count; t++)
    for (int64_t i = column; i < column + count; i++) out.data[t * out.stride + i] += bias[i];
}

void multiply(const Matrix& matrix, const Rounded& x, Rows out, const float* bias) {
  int64_t panels = 0, bytes = 0;
  for (int64_t s = 0; s < matrix.count; s++) {
    const Segment& segment = matrix.segments[s];
    panels += up(segment.rows, PANEL);
    bytes += up(segment.rows, PANEL) * panel_bytes(segment.packing, matrix.columns);
  }
  ranges(panels, panels ? bytes / panels * std::max<int64_t>(1, out.count / 2) : 0, [&](int64_t first, int64_t last) {
    int64_t start = 0;
    for (int64_t s = 0; s < matrix.count; s++) {
      const Segment& segment = matrix.segments[s];
      const int64_t count = up(segment.rows, PANEL);
      const int64_t from = std::max<int64_t>(first - start, 0), to = std::min(last - start, count);
      if (from < to) {
        kernels->multiply_packed(segment, x, from, to, out);
        if (bias) {
          const int64_t row = from * PANEL;
          add_bias(out, segment.column + row, std::min(segment.rows, to * PANEL) - row, bias);
        }
      }
      start += count;
    }
  });
}

void multiply(const Plain& w, Rows x, Rows out, const float* bias) {
  ranges(w.rows, w.columns * std::max<int64_t>(1, out.count), [&](int64_t first, int64_t last) {
    // A block of weights stays in the cache while all tokens pass.
    const int64_t step = std::max<int64_t>(TILE_BYTES / (w.columns * 4), 12) / 12 * 12;
    for (int64_t row = first; row < last; row += step) {
      const int64_t end = std::min(last, row + step);
      kernels->multiply_plain(w, x, row, end, out);
    }
    if (bias) add_bias(out, first, last - first, bias);
  });
}

void normalise(Rows x, const float* residual, const Norm& norm, int64_t width, float* y, float* total) {
  ranges(x.count, width, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      kernels->norm_row(x.data + t * x.stride, residual ? residual + t * width : nullptr, norm, width, y + t * width,
                        total ? total + t * width : nullptr);
  });
}

}  // namespace

API const char* whorl_cpu_sources() { return WHORL_SOURCES; }

API const char* whorl_cpu_variant() { return kernels->name; }

// Chooses the kernels of an instruction set, or the best where name is empty. Returns 0 if this processor lacks it.
API int whorl_cpu_choose(const char* name) {
  std::vector<const Kernels*> here;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    here.push_back(&avx512_kernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    here.push_back(&avx2_kernels);
#elif defined(__aarch64__)
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & (1 << 20)) here.push_back(&neon_kernels);  // asimddp
#else
  here.push_back(&neon_kernels);
#endif
#endif
  here.push_back(&plain_kernels);
  for (const Kernels* each : here)
    if (!*name || !strcmp(name, each->name)) {
      kernels = each;
      return 1;
    }
  return 0;
}

API int whorl_cpu_threads() { return num_threads(); }

API void whorl_cpu_set_threads(int count) { set_num_threads(count); }

// Returns memory between what is in use to the system: a copy of each matrix has come and gone while a file is read.
API void whorl_cpu_trim() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

API int64_t whorl_cpu_panel_bytes(int32_t bits, int32_t scales, int32_t has_minima, int64_t columns) {
  return panel_bytes({bits, scales, has_minima, 0}, columns);
}

API void whorl_cpu_linear_packed(const Matrix* matrix, float* x, int64_t count, int64_t stride, float* out,
                                 int64_t out_stride, const float* bias) {
  const Rows rows{x, count, stride};
  multiply(*matrix, rounded(rows, *matrix), {out, count, out_stride}, bias);
}

// y = norm(x + residual), total = x + residual, then the product of y, if there is a matrix.
API void whorl_cpu_norm(float* x, const float* residual, const float* weight, float eps, int32_t plus_one,
                        int64_t count, int64_t width, float* y, float* total, const Matrix* matrix, float* out,
                        int64_t out_stride, const float* bias) {
  normalise({x, count, width}, residual, {weight, eps, plus_one}, width, y, total);
  if (matrix) multiply(*matrix, rounded({y, count, width}, *matrix), {out, count, out_stride}, bias);
}

API void whorl_cpu_linear_plain(const Plain* w, float* x, int64_t count, int64_t stride, float* out, int64_t out_stride,
                                const float* bias) {
  multiply(*w, {x, count, stride}, {out, count, out_stride}, bias);
}

API void whorl_cpu_unpack(const Matrix* matrix, const int64_t* indices, int64_t count, float* out) {
  ranges(count, matrix->columns * 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      int64_t row = indices ? indices[i] : i;
      for (int64_t s = 0; s < matrix->count; s++) {
        const Segment& segment = matrix->segments[s];
        if (row >= segment.column && row < segment.column + segment.rows)
          kernels->unpack_row(segment, row - segment.column, matrix->columns, out + i * matrix->columns);
      }
    }
  });
}

// x: [T, heads, dim] with these strides; out is contiguous, or is x itself.
API void whorl_cpu_rope(float* x, int64_t count, int64_t heads, int64_t dim, int64_t token_stride, int64_t head_stride,
                        const Rotation* rotation, float* out) {
  ranges(count, heads * dim * 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      for (int64_t h = 0; h < heads; h++) {
        float* from = x + t * token_stride + h * head_stride;
        kernels->rotate_head(from, rotation->table + t * rotation->size, *rotation, dim,
                             out == x ? from : out + (t * heads + h) * dim);
      }
  });
}

namespace {

void attend_all(const Attention& a) {
  const int64_t group = a.heads / a.kv_heads, width = 2 + (a.dim + 15) / 16 * 16;
  struct Item { int64_t sequence, head, first, last, first_span, last_span, at; };
  static thread_local std::vector<Item> own_items, own_folds;
  std::vector<Item>&items = own_items, &folds = own_folds;  // those of this thread, also in what other threads run
  items.clear(), folds.clear();
  int64_t work = 0, rows_in_all = 0, states = 0;
  for (int64_t b = 0; b < a.num_sequences; b++) {
    const int64_t count = a.starts[b + 1] - a.starts[b];
    rows_in_all += count * group * a.kv_heads;
    work += count * a.heads * (a.window ? std::min(a.window, int64_t(a.lengths[b])) : a.lengths[b]) * a.dim;
  }
  const int64_t threads = work < WORTH ? 1 : num_threads();
  for (int64_t b = 0; b < a.num_sequences; b++) {
    const int64_t count = a.starts[b + 1] - a.starts[b], rows = count * group, length = a.lengths[b];
    const int64_t tile = std::max<int64_t>(32 / group, 1) * group;
    for (int64_t h = 0; h < a.kv_heads; h++)
      for (int64_t row = 0; row < rows; row += tile) {
        const int64_t last = std::min(rows, row + tile);
        const int64_t low = length - count + row / group, high = length - count + (last - 1) / group;
        const int64_t first_span = a.window ? std::max<int64_t>(0, low - a.window + 1) / SPAN : 0;
        const int64_t last_span = high / SPAN + 1;
        // With few rows a span is a piece of its own, which gives the same bits.
        const bool is_cut = threads > 1 && rows_in_all <= 64 * threads;
        const int64_t step = is_cut ? 1 : last_span - first_span;
        folds.push_back({b, h, row, last, 0, (last_span - first_span) / step, states});
        for (int64_t span = first_span; span < last_span; span += step) {
          items.push_back({b, h, row, last, span, span + step, states});
          states += (last - row) * width;
        }
      }
  }
  float* partials = partials_of_rows.get(states);
  auto attend = [&](int64_t i) {
    const Item& m = items[i];
    kernels->attend(a, m.sequence, m.head, m.first, m.last, m.first_span, m.last_span, partials + m.at);
  };
  if (threads > 1)
    parallel(items.size(), attend);
  else
    for (size_t i = 0; i < items.size(); i++) attend(i);
  for (const Item& m : folds)
    for (int64_t row = m.first; row < m.last; row++)
      kernels->fold(a, m.sequence, m.head, row, partials + m.at + (row - m.first) * width, m.last_span,
                    (m.last - m.first) * width);
}

void write(const float* k, int64_t k_token, int64_t k_head, const float* v, int64_t v_token, int64_t v_head,
           int64_t count, int64_t kv_heads, int64_t dim, const Cache& cache, const int64_t* slots) {
  for (int64_t t = 0; t < count; t++) {
    if (slots[t] < 0) continue;
    const int64_t block = slots[t] / cache.size, offset = slots[t] % cache.size;
    for (int64_t h = 0; h < kv_heads; h++) {
      float* to = (float*)cache.k + block * cache.block_stride + offset * cache.slot_stride + h * cache.head_stride;
      memcpy(to, k + t * k_token + h * k_head, dim * sizeof(float));
      to = (float*)cache.v + block * cache.v_block_stride + offset * cache.v_slot_stride + h * cache.v_head_stride;
      memcpy(to, v + t * v_token + h * v_head, dim * sizeof(float));
    }
  }
}

void norm_and_rotate(const float* qkv, int64_t count, int64_t stride, int64_t heads, int64_t kv_heads, int64_t dim,
                     const Norm& q_norm, const Norm& k_norm, const Rotation& rotation, float* q, int64_t q_stride,
                     float* k, int64_t k_stride) {
  ranges(count, (heads + 2 * kv_heads) * dim * 4, [&](int64_t first, int64_t last) {
    thread_local Scratch<float> memory;
    float* normed = memory.get(dim);
    for (int64_t t = first; t < last; t++)
      for (int64_t h = 0; h < heads + kv_heads; h++) {
        const float* from = qkv + t * stride + h * dim;
        const Norm& norm = h < heads ? q_norm : k_norm;
        if (norm.weight) kernels->norm_row(from, nullptr, norm, dim, normed, nullptr), from = normed;
        float* to = h < heads ? q + t * q_stride + h * dim : k + t * k_stride + (h - heads) * dim;
        kernels->rotate_head(from, rotation.table + t * rotation.size, rotation, dim, to);
      }
  });
}

void gate_all(const float* gates, const float* up, int64_t count, int64_t stride, int64_t step, int64_t width,
              int32_t is_gelu, float* out) {
  ranges(count, width * 8, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      kernels->gate(gates + t * stride, up + t * stride, step, width, is_gelu, out + t * width);
  });
}

int64_t rows_of(const Product& product) {
  if (product.plain) return product.plain->rows;
  const Segment& last = product.packed->segments[product.packed->count - 1];
  return last.column + last.rows;
}

// x: contiguous rows of the product's columns; out: contiguous, too.
void multiply(const Product& product, float* x, int64_t count, float* out) {
  const int64_t rows = rows_of(product);
  if (product.plain)
    return multiply(*product.plain, {x, count, product.plain->columns}, {out, count, rows}, product.bias);
  const int64_t columns = product.packed->columns;
  multiply(*product.packed, rounded({x, count, columns}, *product.packed), {out, count, rows}, product.bias);
}

}  // namespace

// qkv: [T, (heads + 2 kv_heads) dim]. Queries and keys are normalised, if there are weights, and rotated.
API void whorl_cpu_norm_rope(const float* qkv, int64_t count, int64_t stride, int64_t heads, int64_t kv_heads,
                             int64_t dim, const Norm* q_norm, const Norm* k_norm, const Rotation* rotation, float* q,
                             int64_t q_stride, float* k, int64_t k_stride) {
  norm_and_rotate(qkv, count, stride, heads, kv_heads, dim, *q_norm, *k_norm, *rotation, q, q_stride, k, k_stride);
}

// k, v: fp32 [T, kv_heads, dim]; the caches hold fp32.
API void whorl_cpu_write(const float* k, int64_t k_token, int64_t k_head, const float* v, int64_t v_token,
                         int64_t v_head, int64_t count, int64_t kv_heads, int64_t dim, const Cache* cache,
                         const int64_t* slots) {
  write(k, k_token, k_head, v, v_token, v_head, count, kv_heads, dim, *cache, slots);
}

API void whorl_cpu_attention(const Attention* attention) { attend_all(*attention); }

// gates and up: [T, width] of a row of `stride` numbers, `step` apart.
API void whorl_cpu_glu(const float* gates, const float* up, int64_t count, int64_t stride, int64_t step, int64_t width,
                       int32_t is_gelu, float* out) {
  gate_all(gates, up, count, stride, step, width, is_gelu, out);
}

// Routed experts. out[t] = the sum of weights[t, c] * down(gate(gate_up(x[t]))) over the choices c of token t, in their
// order, with the matrices of expert ids[t, c]. All tensors are contiguous.
API void whorl_cpu_experts(const Matrix* const* gate_up, const Matrix* const* down, int64_t num_experts, const float* x,
                           int64_t count, int64_t num_choices, const float* weights, const int64_t* ids, float* out) {
  const int64_t width = gate_up[0]->columns, inner = down[0]->columns;
  static thread_local Scratch<float> arena[3];
  std::vector<std::vector<int64_t>> choices(num_experts);  // of each expert
  for (int64_t i = 0; i < count * num_choices; i++) choices[ids[i]].push_back(i);
  float* parts = arena[0].get(count * num_choices * width);
  for (int64_t e = 0; e < num_experts; e++) {
    const int64_t rows = int64_t(choices[e].size());
    if (!rows) continue;
    float *some = arena[1].get(rows * width), *both = arena[2].get(rows * 3 * inner), *hidden = both + rows * 2 * inner;
    for (int64_t i = 0; i < rows; i++)
      memcpy(some + i * width, x + choices[e][i] / num_choices * width, width * sizeof(float));
    multiply(*gate_up[e], rounded({some, rows, width}, *gate_up[e]), {both, rows, 2 * inner}, nullptr);
    gate_all(both, both + inner, rows, 2 * inner, 1, inner, 0, hidden);
    multiply(*down[e], rounded({hidden, rows, inner}, *down[e]), {some, rows, width}, nullptr);
    for (int64_t i = 0; i < rows; i++)
      memcpy(parts + choices[e][i] * width, some + i * width, width * sizeof(float));
  }
  std::fill(out, out + count * width, 0.0f);
  for (int64_t i = 0; i < count * num_choices; i++)
    for (int64_t j = 0; j < width; j++) out[i / num_choices * width + j] += parts[i * width + j] * weights[i];
}

// x, y: [count, width], contiguous.
API void whorl_cpu_log_softmax(const float* x, int64_t count, int64_t width, float* y) {
  ranges(count, width * 8, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) kernels->log_softmax(x + t * width, width, y + t * width);
  });
}

// Layers of a decoder, one after the other, with the bits of the calls by themselves. x: [T, width], the embeddings,
// which are overwritten; out: the last norm of the sum; step: the sequences, without q and cache.
API void whorl_cpu_layers(const Layer* layers, int64_t num_layers, const Norm* last_norm, const Attention* step,
                          const Rotation* rotation, const int64_t* slots, float* x, int64_t count, int64_t width,
                          float* out) {
  static thread_local Scratch<float> arena[7];
  float *total = arena[0].get(count * width), *other = arena[1].get(count * width);
  float* normed = arena[2].get(count * width);
  for (int64_t i = 0; i < num_layers; i++) {
    const Layer& layer = layers[i];
    const int64_t mixed = layer.heads * layer.dim, kept = layer.kv_heads * layer.dim, merged = mixed + 2 * kept;
    float* qkv = arena[3].get(count * merged);
    float* q = arena[4].get(count * 2 * mixed);
    float* k = arena[5].get(count * kept);
    // The sum of a layer is what the next one adds to: two buffers take turns.
    normalise({x, count, width}, i ? total : nullptr, layer.attention_norm, width, normed, i ? other : nullptr);
    if (i)
      std::swap(total, other);
    else
      memcpy(total, x, count * width * sizeof(float));
    multiply(layer.qkv, normed, count, qkv);
    norm_and_rotate(qkv, count, merged, layer.heads, layer.kv_heads, layer.dim, layer.q_norm, layer.k_norm, *rotation, q,
                    mixed, k, kept);
    write(k, kept, layer.dim, qkv + mixed + kept, merged, layer.dim, count, layer.kv_heads, layer.dim, layer.cache, slots);
    Attention a = *step;
    a.q = q, a.q_token_stride = mixed, a.q_head_stride = layer.dim, a.cache = layer.cache;
    a.heads = layer.heads, a.kv_heads = layer.kv_heads, a.dim = layer.dim;
    a.window = layer.window, a.scale = layer.scale, a.out = q + count * mixed;
    attend_all(a);
    multiply(layer.out, a.out, count, x);
    normalise({x, count, width}, total, layer.mlp_norm, width, normed, other);
    std::swap(total, other);
    float* both = arena[6].get(count * 3 * layer.inner);
    multiply(layer.gate_up, normed, count, both);
    gate_all(both, both + layer.inner, count, 2 * layer.inner, 1, layer.inner, 0, both + count * 2 * layer.inner);
    multiply(layer.down, both + count * 2 * layer.inner, count, x);
  }
  normalise({x, count, width}, total, *last_norm, width, out, other);
}

// ---- rows of GGUF's blocks, interleaved

namespace {

struct Kind {  // of GGUF: a row is blocks of `values` values in `bytes` bytes
  Packing packing;
  int64_t values, bytes;
};

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };
const Kind KINDS[] = {
    {{4, HALF_SCALES, 0, 8}, 32, 18},  {{4, HALF_SCALES, 1, 0}, 32, 20},    {{8, HALF_SCALES, 0, 0}, 32, 22},
    {{8, HALF_SCALES, 1, 0}, 32, 24},  {{8, HALF_SCALES, 0, 0}, 32, 34},    {{4, SUB_SCALES, 1, 0}, 256, 144},
    {{8, SUB_SCALES, 1, 0}, 256, 176}, {{8, PAIR_SCALES, 0, 0}, 256, 210},
};

// Writes the codes of a row's block of 32 to its place in a panel.
void put_codes(const int8_t* codes, int32_t bits, int64_t r, uint8_t* to) {
  for (int64_t quad = 0; quad < bits; quad++) {
    uint32_t four, later = 0;
    memcpy(&four, codes + 4 * quad, 4);
    if (bits == 4) memcpy(&later, codes + 16 + 4 * quad, 4);
    four |= later << 4;  // codes of 4 bits are not negative
    memcpy(to + (quad * PANEL + r) * 4, &four, 4);
  }
}

void put_half(const uint8_t* from, int64_t r, uint8_t* to) { memcpy(to + 2 * r, from, 2); }

// A block of 32 of a type that has its own scale.
void pack_block(int kind, const uint8_t* from, int64_t r, uint8_t* to) {
  const Packing& p = KINDS[kind].packing;
  put_half(from, r, to);
  if (p.has_minima) put_half(from + 2, r, to + 32);
  const uint8_t* at = from + (p.has_minima ? 4 : 2);
  uint32_t fifth = 0;
  if (kind == Q5_0 || kind == Q5_1) memcpy(&fifth, at, 4), at += 4;
  int8_t codes[BLOCK];
  if (kind == Q8_0) {
    memcpy(codes, at, BLOCK);
  } else {
    for (int i = 0; i < 16; i++) codes[i] = at[i] & 15, codes[16 + i] = at[i] >> 4;
    if (kind == Q5_0 || kind == Q5_1)
      for (int i = 0; i < BLOCK; i++) codes[i] = int8_t((codes[i] | (fifth >> i & 1) << 4) - (kind == Q5_0 ? 16 : 0));
  }
  put_codes(codes, p.bits, r, to + (p.has_minima ? 64 : 32));
}

// A block of 256 with scales of its sub-blocks.
void pack_super(int kind, const uint8_t* from, int64_t r, uint8_t* to) {
  const Packing& p = KINDS[kind].packing;
  int8_t codes[BLOCK];
  if (kind == Q6_K) {
    put_half(from + 208, r, to);
    to += 32;
    for (int b = 0; b < 8; b++, to += block_bytes(p)) {
      to[r] = from[192 + 2 * b], to[16 + r] = from[192 + 2 * b + 1];
      const uint8_t *low = from + b / 4 * 64 + b % 2 * 32, *high = from + 128 + b / 4 * 32;
      for (int i = 0; i < BLOCK; i++) {
        const int nibble = b % 4 < 2 ? low[i] & 15 : low[i] >> 4;
        codes[i] = int8_t((nibble | (high[i] >> (2 * (b % 4)) & 3) << 4) - 32);
      }
      put_codes(codes, 8, r, to + 32);
    }
    return;
  }
  put_half(from, r, to), put_half(from + 2, r, to + 32);
  to += 64;
  const uint8_t *s = from + 4, *fifth = from + 16, *nibbles = from + (kind == Q5_K ? 48 : 16);
  for (int b = 0; b < 8; b++, to += block_bytes(p)) {
    to[r] = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6) << 4;
    to[16 + r] = b < 4 ? s[b + 4] & 63 : s[b + 4] >> 4 | (s[b] >> 6) << 4;
    for (int i = 0; i < BLOCK; i++) {
      const uint8_t both = nibbles[b / 2 * 32 + i];
      codes[i] = int8_t((b % 2 ? both >> 4 : both & 15) | (kind == Q5_K ? (fifth[i] >> b & 1) << 4 : 0));
    }
    put_codes(codes, p.bits, r, to + 32);
  }
}

}  // namespace

// How a GGUF type is packed; 0 if it is not known. The types are those of KINDS, in their order.
API int whorl_cpu_packing(int32_t kind, Packing* packing) {
  if (kind < 0 || kind >= int(sizeof KINDS / sizeof *KINDS)) return 0;
  *packing = KINDS[kind].packing;
  return 1;
}

// blocks: `rows` rows as GGUF has them; out: panels, of zeros.
API void whorl_cpu_pack(int32_t kind, const uint8_t* blocks, int64_t rows, int64_t columns, uint8_t* out) {
  const Kind& k = KINDS[kind];
  const int64_t row_bytes = columns / k.values * k.bytes, panel = panel_bytes(k.packing, columns);
  const int64_t step = k.values == SUPER ? panel / (columns / SUPER) : block_bytes(k.packing);
  ranges(up(rows, PANEL), panel, [&](int64_t first, int64_t last) {
    for (int64_t row = first * PANEL; row < std::min(rows, last * PANEL); row++)
      for (int64_t b = 0; b < columns / k.values; b++) {
        const uint8_t* from = blocks + row * row_bytes + b * k.bytes;
        uint8_t* to = out + row / PANEL * panel + b * step;
        (k.values == SUPER ? pack_super : pack_block)(kind, from, row % PANEL, to);
      }
  });
}
