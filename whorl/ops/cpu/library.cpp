// The functions of the shared library, as whorl/ops/cpu/library.py calls them: each divides its work among threads.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "work.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#ifndef WHORL_SOURCES
#define WHORL_SOURCES ""
#endif

using namespace whorl;

namespace {

const Kernels* kernels = &plain_kernels;

constexpr int64_t TILE_BYTES = 192 << 10;  // of weights that stay in a cache

thread_local Scratch<int8_t> codes_of_tokens;
thread_local Scratch<float> scales_of_tokens, partials_of_rows;
thread_local Scratch<int32_t> sums_of_tokens;

// Memory for tokens in 8 or 16 bits.
Rounded room_for(int64_t count, int64_t columns, int32_t planes) {
  const int64_t size = count * columns, blocks = size / BLOCK;
  return {codes_of_tokens.get(size * planes), scales_of_tokens.get(2 * blocks), sums_of_tokens.get(2 * planes * blocks),
          columns, count, planes};
}

Rounded rounded(Rows x, const Matrix& matrix) {
  const Rounded out = room_for(x.count, matrix.columns, matrix.planes);
  ranges(up(x.count, GROUP), GROUP * matrix.columns,
         [&](int64_t first, int64_t last) { kernels->round_tokens(x, out, first, last); });
  return out;
}

void add_bias(Rows out, int64_t column, int64_t count, const float* bias) {
  for (int64_t t = 0; t < out.count; t++)
    for (int64_t i = column; i < column + count; i++) out.data[t * out.stride + i] += bias[i];
}

struct Units {  // what a product is divided into: panels of packed weights, rows of plain ones
  int64_t count, work;  // of each
};

Units units_of(const Matrix& matrix, int64_t tokens) {
  int64_t panels = 0, bytes = 0;
  for (int64_t s = 0; s < matrix.count; s++) {
    const Segment& segment = matrix.segments[s];
    panels += up(segment.rows, PANEL);
    bytes += up(segment.rows, PANEL) * panel_bytes(segment.packing, matrix.columns);
  }
  return {panels, panels ? bytes / panels * std::max<int64_t>(1, tokens / 2) : 0};
}

Units units_of(const Plain& w, int64_t tokens) { return {w.rows, w.columns * std::max<int64_t>(1, tokens)}; }

void multiply_units(const Matrix& matrix, const Rounded& x, Rows out, const float* bias, int64_t first, int64_t last) {
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
}

void multiply_units(const Plain& w, Rows x, Rows out, const float* bias, int64_t first, int64_t last) {
  // A block of weights stays in the cache while all tokens pass.
  const int64_t step = std::max<int64_t>(TILE_BYTES / (w.columns * 4), 12) / 12 * 12;
  for (int64_t row = first; row < last; row += step)
    kernels->multiply_plain(w, x, row, std::min(last, row + step), out);
  if (bias) add_bias(out, first, last - first, bias);
}

template <class Weights, class Tokens>
void multiply(const Weights& weights, const Tokens& x, Rows out, const float* bias) {
  const Units units = units_of(weights, out.count);
  ranges(units.count, units.work,
         [&](int64_t first, int64_t last) { multiply_units(weights, x, out, bias, first, last); });
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
  multiply(*w, Rows{x, count, stride}, {out, count, out_stride}, bias);
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
    return multiply(*product.plain, Rows{x, count, product.plain->columns}, {out, count, rows}, product.bias);
  const int64_t columns = product.packed->columns;
  multiply(*product.packed, rounded({x, count, columns}, *product.packed), {out, count, rows}, product.bias);
}

// ---- routed experts

void route_all(const float* logits, int64_t count, const Routing& routing, float* weights, int32_t* ids) {
  ranges(count, routing.experts * (4 + routing.choices), [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      kernels->route(logits + t * routing.experts, routing, weights + t * routing.choices, ids + t * routing.choices);
  });
}

struct Share {  // an expert's rows of the choices, which are sorted by expert; `at`: the first of them among those at hand
  int64_t expert, first, count, at;
};
using Shares = std::vector<Share>;
constexpr int64_t ROWS_AT_HAND = 512;

struct Tokens {  // what experts multiply: rows, and their codes, each share's by itself
  Rows rows;
  Rounded codes;
  bool is_shared;  // one row, which every expert multiplies
};

Tokens tokens_of(Rows rows, const Stack& stack, bool is_shared) {
  if (!stack.packed) return {rows, {}, is_shared};
  return {rows, room_for(rows.count, stack.packed[0]->columns, stack.packed[0]->planes), is_shared};
}

Rounded codes_of(const Tokens& x, const Share& share) {
  const Rounded& all = x.codes;
  const int64_t at = x.is_shared ? 0 : share.at, coded = at * all.planes, blocks = all.columns / BLOCK;
  return {all.codes + coded * all.columns, all.scales + 2 * at * blocks, all.sums + 2 * coded * blocks, all.columns,
          share.count, all.planes};
}

Rows rows_of(const Tokens& x, const Share& share) {
  return {x.rows.data + (x.is_shared ? 0 : share.at * x.rows.stride), share.count, x.rows.stride};
}

void round_share(const Tokens& x, const Share& share) {
  if (x.codes.codes) kernels->round_tokens(rows_of(x, share), codes_of(x, share), 0, up(share.count, GROUP));
}

// The products of all shares side by side, in pieces of about equal work. out(share): where its rows go.
template <class Out>
void multiply_shares(const Stack& stack, const Tokens& x, const Shares& shares, const Out& out) {
  struct Piece { const Share* share; int64_t first, last; };
  std::vector<Piece> pieces;
  auto plain_of = [&](const Share& share) {
    Plain plain = stack.first;
    plain.data += share.expert * stack.bytes;
    return plain;
  };
  auto units = [&](const Share& share) {
    return stack.packed ? units_of(*stack.packed[share.expert], share.count) : units_of(stack.first, share.count);
  };
  int64_t work = 0;
  for (const Share& share : shares) work += units(share).count * units(share).work;
  const int64_t worth = std::max(WORTH, work / (num_threads() * 16));
  for (const Share& share : shares) {
    const auto [count, each] = units(share);
    const int64_t parts = std::min(count, up(count * each, worth));
    for (int64_t p = 0; p < parts; p++) pieces.push_back({&share, count * p / parts, count * (p + 1) / parts});
  }
  parallel(pieces.size(), [&](int64_t i) {
    const auto [share, first, last] = pieces[i];
    if (stack.packed)
      multiply_units(*stack.packed[share->expert], codes_of(x, *share), out(*share), nullptr, first, last);
    else
      multiply_units(plain_of(*share), rows_of(x, *share), out(*share), nullptr, first, last);
  });
}

// Writes the results of choices to `parts`, sorted by expert. tokens: of each choice in this order.
void run_shares(const Stack& gate_up, const Stack& down, const Shares& shares, Rows x, const int64_t* tokens,
                float* parts) {
  static thread_local Scratch<float> arena[2];
  const int64_t width = gate_up.columns, inner = down.columns, rows = shares.back().at + shares.back().count;
  auto each = [&](int64_t work, const auto& function) {  // work: for each row
    ranges(shares.size(), rows * work / int64_t(shares.size()), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) function(shares[i]);
    });
  };
  const bool is_alone = x.count == 1;
  float* both = arena[0].get(rows * 3 * inner);
  const Rows hidden{both + rows * 2 * inner, rows, inner};
  const Tokens inputs = tokens_of(is_alone ? x : Rows{arena[1].get(rows * width), rows, width}, gate_up, is_alone);
  if (is_alone) {
    round_share(inputs, {0, 0, 1, 0});
  } else {
    each(width * 4, [&](const Share& share) {
      for (int64_t i = 0; i < share.count; i++)
        memcpy(rows_of(inputs, share).data + i * width, x.data + tokens[share.first + i] * width, width * sizeof(float));
      round_share(inputs, share);
    });
  }
  multiply_shares(gate_up, inputs, shares, [&](const Share& share) {
    return Rows{both + share.at * 2 * inner, share.count, 2 * inner};
  });
  const Tokens between = tokens_of(hidden, down, false);
  each(inner * 8, [&](const Share& share) {
    for (int64_t i = share.at; i < share.at + share.count; i++)
      kernels->gate(both + i * 2 * inner, both + i * 2 * inner + inner, 1, inner, 0, hidden.data + i * inner);
    round_share(between, share);
  });
  multiply_shares(down, between, shares,
                  [&](const Share& share) { return Rows{parts + share.first * width, share.count, width}; });
}

void run_experts(const Stack& gate_up, const Stack& down, int64_t num_experts, float* x, int64_t count,
                 int64_t num_choices, const float* weights, const int32_t* ids, float* out) {
  static thread_local Scratch<float> arena;
  static thread_local Scratch<int64_t> memory;
  const int64_t width = gate_up.columns, total = count * num_choices;
  int64_t *starts = memory.get(num_experts + 1 + 2 * total), *places = starts + num_experts + 1, *tokens = places + total;
  std::fill(starts, places, 0);
  for (int64_t i = 0; i < total; i++) starts[ids[i] + 1]++;
  for (int64_t e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
  for (int64_t i = 0; i < total; i++) {  // afterwards starts[e] is where expert e ends
    places[i] = starts[ids[i]]++;
    tokens[places[i]] = i / num_choices;
  }
  float* parts = arena.get(total * width);
  Shares shares;
  int64_t rows = 0;
  auto run = [&] {
    if (rows) run_shares(gate_up, down, shares, {x, count, width}, tokens, parts);
    shares.clear(), rows = 0;
  };
  for (int64_t e = 0; e < num_experts; e++) {
    const int64_t first = e ? starts[e - 1] : 0, some = starts[e] - first;
    if (!some) continue;
    if (rows + some > ROWS_AT_HAND) run();
    shares.push_back({e, first, some, rows});
    rows += some;
  }
  run();
  ranges(count, num_choices * width, [&](int64_t from, int64_t to) {
    std::fill(out + from * width, out + to * width, 0.0f);
    for (int64_t i = from * num_choices; i < to * num_choices; i++) {
      const float* part = parts + places[i] * width;
      float* y = out + i / num_choices * width;
      for (int64_t j = 0; j < width; j++) y[j] += part[j] * weights[i];
    }
  });
}

void mix_experts(const Mixture& mixture, float* x, int64_t count, float* out) {
  static thread_local Scratch<float> arena;
  static thread_local Scratch<int32_t> chosen;
  const Routing& routing = mixture.routing;
  float *logits = arena.get(count * (routing.experts + routing.choices)), *weights = logits + count * routing.experts;
  int32_t* ids = chosen.get(count * routing.choices);
  multiply(mixture.router, x, count, logits);
  route_all(logits, count, routing, weights, ids);
  run_experts(mixture.gate_up, mixture.down, routing.experts, x, count, routing.choices, weights, ids, out);
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

// Scores of a router [T, experts] to the choices of each token: weights and ids [T, choices].
API void whorl_cpu_route(const float* logits, int64_t count, const Routing* routing, float* weights, int32_t* ids) {
  route_all(logits, count, *routing, weights, ids);
}

// out[t] = the sum of weights[t, c] * down(gate(gate_up(x[t]))) over the choices c of token t, in their order, with the
// matrices of expert ids[t, c]. All tensors are contiguous.
API void whorl_cpu_experts(const Stack* gate_up, const Stack* down, int64_t num_experts, float* x, int64_t count,
                           int64_t num_choices, const float* weights, const int32_t* ids, float* out) {
  run_experts(*gate_up, *down, num_experts, x, count, num_choices, weights, ids, out);
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
    if (layer.mixture) {
      mix_experts(*layer.mixture, normed, count, x);
      continue;
    }
    float* both = arena[6].get(count * 3 * layer.inner);
    multiply(layer.gate_up, normed, count, both);
    gate_all(both, both + layer.inner, count, 2 * layer.inner, 1, layer.inner, 0, both + count * 2 * layer.inner);
    multiply(layer.down, both + count * 2 * layer.inner, count, x);
  }
  normalise({x, count, width}, total, *last_norm, width, out, other);
}
