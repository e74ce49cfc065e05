// The kernels, compiled once for every instruction set: WHORL_AVX512, WHORL_AVX2, WHORL_NEON or none of them.
#include "kernels.h"

#include <cstdlib>

#include "integers.h"
#include "lanes.h"

#ifndef WHORL_VARIANT
#define WHORL_VARIANT plain
#endif
#define NAME_OF_(x) #x
#define NAME_OF(x) NAME_OF_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace whorl {
namespace {

// No function of the standard library's templates is called here: a linker keeps one copy of each, which may be that
// of an instruction set that the processor lacks.

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

INLINE void fill(float* out, int64_t count, float value) {
  for (int64_t i = 0; i < count; i++) out[i] = value;
}

template <class T>
struct Buffer {  // memory of a thread, which grows and is used again
  T* data = nullptr;
  int64_t size = 0;
  T* get(int64_t count) {
    if (count > size) {
      free(data);
      data = static_cast<T*>(aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64));
      if (!data) abort();
      size = count;
    }
    return data;
  }
  ~Buffer() { free(data); }
};

// ---- tokens in 8 or 16 bits

void round_tokens(Rows x, const int32_t* indices, int64_t width, const Rounded& out, int64_t first, int64_t last) {
  const int64_t blocks = width / BLOCK;
  for (int64_t t = first; t < last; t++) {
    const float* row = x.data + (indices ? indices[t] : t) * x.stride;
    for (int64_t b = 0; b < blocks; b++) {
      const F halves[] = {load(row + b * BLOCK), load(row + b * BLOCK + LANES)};
      const float top = greatest(greater(abs(halves[0]), abs(halves[1])));
      const float broken = sum(mul(add(halves[0], halves[1]), zero()));  // NaN where a number is not finite, else 0
      const bool is_zero = !(top > 1e-30f);
      const F inverse = set1(is_zero ? 0.0f : 127.0f / top);
      const float scale = is_zero ? broken : top / 127.0f + broken;
      out.scales[t * blocks + b] = out.rest ? scale / float(STEPS) : scale;
      for (int half = 0; half < 2; half++) {
        const int64_t at = t * width + b * BLOCK + half * LANES;
        const I code = round_int(mul(halves[half], inverse));
        store_i8(out.codes + at, code);
        int32_t total = 0, left = 0;
        for (int i = 0; i < LANES; i++) total += out.codes[at + i];
        if (out.rest) {
          const F rest = fma(halves[half], inverse, sub(zero(), to_float(code)));
          store_i8(out.rest + at, round_int(mul(rest, set1(float(STEPS)))));
          for (int i = 0; i < LANES; i++) left += out.rest[at + i];
          total = total * STEPS + left;
        }
        out.sums[(t * blocks + b) * 2 + half] = total;
      }
    }
  }
}

// The integers of a block for each token, with both planes of codes.
template <int BITS, int FIRST, int LAST, int COUNT, int PLANES>
INLINE void whole_product(const uint8_t* at, const int8_t* const* codes, const int8_t* const* rest, I* whole) {
  block_product<BITS, FIRST, LAST, COUNT>(at, codes, whole);
  if (PLANES == 2) {
    I left[COUNT];
    block_product<BITS, FIRST, LAST, COUNT>(at, rest, left);
    UNROLL for (int t = 0; t < COUNT; t++) whole[t] = iadd(imul(whole[t], iset(STEPS)), left[t]);
  }
}

// ---- packed weights

template <int BITS, int SCALES, bool MINIMA, int PLANES, int COUNT>
INLINE void panel_product(const uint8_t* at, int64_t blocks, int zero_code, const Rounded& x, int64_t token, F* out) {
  const int8_t *codes[COUNT], *rest[COUNT];
  F y[COUNT];
  UNROLL for (int t = 0; t < COUNT; t++) {
    codes[t] = x.codes + (token + t) * x.columns, y[t] = zero();
    rest[t] = PLANES == 2 ? x.rest + (token + t) * x.columns : codes[t];
  }
  const float* scales = x.scales + token * blocks;
  const int32_t* sums = x.sums + token * blocks * 2;
  const int shift = zero_code + code_shift<BITS>();
  F d = zero(), d_min = zero();
  for (int64_t b = 0; b < blocks; b++) {
    F scale, minimum = zero();
    if (SCALES != HALF_SCALES && b % (SUPER / BLOCK) == 0) {
      d = load_half((const uint16_t*)at);
      if (SCALES == SUB_SCALES) d_min = load_half((const uint16_t*)(at + 32));
      at += SCALES == SUB_SCALES ? 64 : 32;
    }
    I whole[COUNT];
    F total[COUNT];
    if (SCALES == PAIR_SCALES) {
      const F first = to_float(load_i8(at)), second = to_float(load_i8(at + 16));
      at += 32;
      I low[COUNT], high[COUNT];
      whole_product<BITS, 0, 4, COUNT, PLANES>(at, codes, rest, low);
      whole_product<BITS, 4, 8, COUNT, PLANES>(at, codes, rest, high);
      UNROLL for (int t = 0; t < COUNT; t++) {
        const int32_t* pair = sums + (t * blocks + b) * 2;
        const F a = to_float(isub(low[t], iset(shift * pair[0]))), c = to_float(isub(high[t], iset(shift * pair[1])));
        total[t] = fma(first, a, mul(second, c));
      }
      scale = d;
    } else {
      if (SCALES == SUB_SCALES) {
        scale = mul(d, to_float(load_u8(at)));
        minimum = mul(d_min, to_float(load_u8(at + 16)));
        at += 32;
      } else {
        scale = load_half((const uint16_t*)at);
        if (MINIMA) minimum = load_half((const uint16_t*)(at + 32));
        at += MINIMA ? 64 : 32;
      }
      whole_product<BITS, 0, 8, COUNT, PLANES>(at, codes, rest, whole);
      UNROLL for (int t = 0; t < COUNT; t++) {
        const int32_t* pair = sums + (t * blocks + b) * 2;
        if (shift) whole[t] = isub(whole[t], iset(shift * (pair[0] + pair[1])));
        total[t] = to_float(whole[t]);
      }
    }
    at += BLOCK * BITS / 8 * PANEL;
    UNROLL for (int t = 0; t < COUNT; t++) {
      const float of_token = scales[t * blocks + b];
      y[t] = fma(mul(scale, set1(of_token)), total[t], y[t]);
      if (MINIMA) {
        const int32_t* pair = sums + (t * blocks + b) * 2;
        const float of_sum = of_token * float(pair[0] + pair[1]);
        y[t] = fma(minimum, set1(SCALES == SUB_SCALES ? -of_sum : of_sum), y[t]);
      }
    }
    UNROLL for (int t = 0; t < COUNT; t++) codes[t] += BLOCK, rest[t] += BLOCK;
  }
  UNROLL for (int t = 0; t < COUNT; t++) out[t] = y[t];
}

template <int BITS, int SCALES, bool MINIMA, int PLANES>
void multiply_segment(const Segment& segment, const Rounded& x, int64_t first_token, int64_t last_token,
                      int64_t first_panel, int64_t last_panel, Rows out) {
  const int64_t bytes = panel_bytes(segment.packing, x.columns), blocks = x.columns / BLOCK;
  const int zero_code = segment.packing.zero;
  for (int64_t p = first_panel; p < last_panel; p++) {
    const uint8_t* panel = segment.data + p * bytes;
    const int left = int(least(segment.rows - p * PANEL, PANEL));
    for (int64_t t = first_token; t < last_token;) {
      F y[4];
      int count = int(least(last_token - t, 4));
      switch (count) {
        case 1: panel_product<BITS, SCALES, MINIMA, PLANES, 1>(panel, blocks, zero_code, x, t, y); break;
        case 2: panel_product<BITS, SCALES, MINIMA, PLANES, 2>(panel, blocks, zero_code, x, t, y); break;
        case 3: panel_product<BITS, SCALES, MINIMA, PLANES, 3>(panel, blocks, zero_code, x, t, y); break;
        default: panel_product<BITS, SCALES, MINIMA, PLANES, 4>(panel, blocks, zero_code, x, t, y);
      }
      for (int i = 0; i < count; i++)
        store_n(out.data + (t + i) * out.stride + segment.column + p * PANEL, y[i], left);
      t += count;
    }
  }
}

template <int PLANES>
void multiply_planes(const Segment& segment, const Rounded& x, int64_t first_token, int64_t last_token,
                     int64_t first_panel, int64_t last_panel, Rows out) {
  const Packing& p = segment.packing;
  const bool is_small = p.bits == 4;
  const auto multiply =
      p.scales == PAIR_SCALES  ? multiply_segment<8, PAIR_SCALES, false, PLANES>
      : p.scales == SUB_SCALES ? (is_small ? multiply_segment<4, SUB_SCALES, true, PLANES> : multiply_segment<8, SUB_SCALES, true, PLANES>)
      : p.has_minima ? (is_small ? multiply_segment<4, HALF_SCALES, true, PLANES> : multiply_segment<8, HALF_SCALES, true, PLANES>)
                     : (is_small ? multiply_segment<4, HALF_SCALES, false, PLANES> : multiply_segment<8, HALF_SCALES, false, PLANES>);
  multiply(segment, x, first_token, last_token, first_panel, last_panel, out);
}

void multiply_packed(const Segment& segment, const Rounded& x, int64_t first_token, int64_t last_token,
                     int64_t first_panel, int64_t last_panel, Rows out) {
  (x.rest ? multiply_planes<2> : multiply_planes<1>)(segment, x, first_token, last_token, first_panel, last_panel, out);
}

// Writes the values of a row. They are those of the format, rounded as llama.cpp rounds them.
void unpack_row(const Segment& segment, int64_t row, int64_t columns, float* out) {
  const Packing& p = segment.packing;
  const int64_t r = row % PANEL;
  const uint8_t* at = segment.data + row / PANEL * panel_bytes(p, columns);
  const uint8_t* head = at;
  auto half = [&](const uint8_t* from) { return from_half(((const uint16_t*)from)[r]); };
  for (int64_t b = 0; b < columns / BLOCK; b++) {
    if (p.scales != HALF_SCALES && b % (SUPER / BLOCK) == 0) head = at, at += p.scales == SUB_SCALES ? 64 : 32;
    float scale[2], minimum = 0;
    if (p.scales == PAIR_SCALES) {
      for (int i = 0; i < 2; i++) scale[i] = half(head) * float(int8_t(at[16 * i + r]));
    } else {
      scale[0] = scale[1] = p.scales == SUB_SCALES ? half(head) * float(at[r]) : half(at);
      if (p.has_minima) minimum = p.scales == SUB_SCALES ? -(half(head + 32) * float(at[16 + r])) : half(at + 32);
    }
    at += p.scales == HALF_SCALES ? 32 * (1 + p.has_minima) : 32;
    for (int i = 0; i < BLOCK; i++) {
      const int quad = i / 4, column = i % 4;
      int code;
      if (p.bits == 8)
        code = int8_t(at[(quad * PANEL + r) * 4 + column]);
      else
        code = at[(quad % 4 * PANEL + r) * 4 + column] >> (quad < 4 ? 0 : 4) & 15;
      const float value = scale[i / 16] * float(code - p.zero);
      out[b * BLOCK + i] = p.has_minima ? value + minimum : value;
    }
    at += BLOCK * p.bits / 8 * PANEL;
  }
}

// ---- plain weights: sixteen lanes along K, added in one tree

template <int TYPE>
INLINE F load_weight(const uint8_t* w, int64_t i) {
  if (TYPE == FP32) return load((const float*)w + i);
  return TYPE == BF16 ? load_bf16((const uint16_t*)w + i) : load_half((const uint16_t*)w + i);
}

template <int TYPE>
INLINE F load_weight_n(const uint8_t* w, int64_t i, int n) {
  if (TYPE == FP32) return load_n((const float*)w + i, n);
  uint16_t full[LANES] = {};
  memcpy(full, (const uint16_t*)w + i, n * 2);
  return TYPE == BF16 ? load_bf16(full) : load_half(full);
}

template <int TYPE, int ROWS, int COUNT>
INLINE void tile_product(const Plain& w, int64_t row, const float* const* x, float* const* out) {
  const int64_t width = TYPE == FP32 ? 4 : 2;
  const uint8_t* weights[ROWS];
  F y[ROWS][COUNT];
  UNROLL for (int r = 0; r < ROWS; r++) {
    weights[r] = w.data + (row + r) * w.stride * width;
    UNROLL for (int t = 0; t < COUNT; t++) y[r][t] = zero();
  }
  int64_t k = 0;
  for (; k + LANES <= w.columns; k += LANES) {
    F tokens[COUNT];
    UNROLL for (int t = 0; t < COUNT; t++) tokens[t] = load(x[t] + k);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const F values = load_weight<TYPE>(weights[r], k);
      UNROLL for (int t = 0; t < COUNT; t++) y[r][t] = fma(values, tokens[t], y[r][t]);
    }
  }
  if (const int left = int(w.columns - k)) {
    UNROLL for (int r = 0; r < ROWS; r++) {
      const F values = load_weight_n<TYPE>(weights[r], k, left);
      UNROLL for (int t = 0; t < COUNT; t++) y[r][t] = fma(values, load_n(x[t] + k, left), y[r][t]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int t = 0; t < COUNT; t++) out[t][r] = sum(y[r][t]);
}

#if defined(WHORL_AVX512) || defined(WHORL_NEON)
constexpr int TILE_ROWS = 6, TILE_TOKENS = 4;
#else
constexpr int TILE_ROWS = 3, TILE_TOKENS = 2;
#endif

template <int TYPE, int COUNT>
void multiply_tile(const Plain& w, const float* const* x, int64_t first_row, int64_t last_row, float* const* out) {
  float* to[COUNT];
  int64_t row = first_row;
  for (; row + TILE_ROWS <= last_row; row += TILE_ROWS) {
    UNROLL for (int t = 0; t < COUNT; t++) to[t] = out[t] + row;
    tile_product<TYPE, TILE_ROWS, COUNT>(w, row, x, to);
  }
  for (; row < last_row; row++) {
    UNROLL for (int t = 0; t < COUNT; t++) to[t] = out[t] + row;
    tile_product<TYPE, 1, COUNT>(w, row, x, to);
  }
}

template <int TYPE>
void multiply_rows(const Plain& w, Rows x, const int32_t* indices, int64_t first_token, int64_t last_token,
                   int64_t first_row, int64_t last_row, Rows out, int64_t column) {
  for (int64_t t = first_token; t < last_token;) {
    const float* from[TILE_TOKENS];
    float* to[TILE_TOKENS];
    const int count = int(least(last_token - t, TILE_TOKENS));
    for (int i = 0; i < count; i++) {
      from[i] = x.data + (indices ? indices[t + i] : t + i) * x.stride;
      to[i] = out.data + (t + i) * out.stride + column;
    }
    if (count == TILE_TOKENS)
      multiply_tile<TYPE, TILE_TOKENS>(w, from, first_row, last_row, to);
    else
      for (int i = 0; i < count; i++) multiply_tile<TYPE, 1>(w, from + i, first_row, last_row, to + i);
    t += count;
  }
}

void multiply_plain(const Plain& w, Rows x, const int32_t* indices, int64_t first_token, int64_t last_token,
                    int64_t first_row, int64_t last_row, Rows out, int64_t column) {
  const auto multiply = w.type == FP32 ? multiply_rows<FP32> : w.type == BF16 ? multiply_rows<BF16> : multiply_rows<FP16>;
  multiply(w, x, indices, first_token, last_token, first_row, last_row, out, column);
}

// ---- norm, rotation, gate

void norm_row(const float* x, const float* residual, const Norm& norm, int64_t width, float* y, float* total) {
  F squares = zero();
  for (int64_t i = 0; i < width; i += LANES) {
    const int n = int(least(width - i, LANES));
    F value = load_n(x + i, n);
    if (residual) {
      value = add(value, load_n(residual + i, n));
      store_n(total + i, value, n);
    }
    squares = fma(value, value, squares);
  }
  const float mean = sum(squares) / float(width);
  const F inverse = set1(1.0f / sqrtf(mean + norm.eps));
  const float* from = residual ? total : x;
  for (int64_t i = 0; i < width; i += LANES) {
    const int n = int(least(width - i, LANES));
    F scale = load_n(norm.weight + i, n);
    if (norm.plus_one) scale = add(scale, set1(1.0f));
    store_n(y + i, mul(mul(load_n(from + i, n), inverse), scale), n);
  }
}

void rotate_head(const float* x, const float* row, const Rotation& rotation, int64_t dim, float* y) {
  const int64_t half = rotation.size / 2, start = rotation.start, end = start + rotation.size;
  if (x != y) {
    memcpy(y, x, start * sizeof(float));
    memcpy(y + end, x + end, (dim - end) * sizeof(float));
  }
  static thread_local Buffer<float> own;  // pairs lie apart from halves: what is written must not be read later
  const float* from = x + start;
  if (x == y && rotation.reads_pairs != rotation.writes_pairs) {
    memcpy(own.get(rotation.size), from, rotation.size * sizeof(float));
    from = own.data;
  }
  for (int64_t i = 0; i < half; i += LANES) {
    const int n = int(least(half - i, LANES));
    float firsts[LANES] = {}, seconds[LANES] = {};
    F first, second;
    if (rotation.reads_pairs) {
      for (int j = 0; j < n; j++) firsts[j] = from[2 * (i + j)], seconds[j] = from[2 * (i + j) + 1];
      first = load(firsts), second = load(seconds);
    } else {
      first = load_n(from + i, n), second = load_n(from + half + i, n);
    }
    const F cosine = load_n(row + i, n), sine = load_n(row + half + i, n);
    const F turned = rotation.inverse ? sub(zero(), sine) : sine;
    const F a = fma(first, cosine, sub(zero(), mul(second, turned)));
    const F b = fma(second, cosine, mul(first, turned));
    if (rotation.writes_pairs) {
      store(firsts, a), store(seconds, b);
      for (int j = 0; j < n; j++) y[start + 2 * (i + j)] = firsts[j], y[start + 2 * (i + j) + 1] = seconds[j];
    } else {
      store_n(y + start + i, a, n), store_n(y + start + half + i, b, n);
    }
  }
}

INLINE F load_every(const float* p, int64_t stride, int n) {
  if (stride == 1) return load_n(p, n);
  float some[LANES] = {};
  for (int i = 0; i < n; i++) some[i] = p[i * stride];
  return load(some);
}

constexpr float SLOPE = 1.5957691216057308f, CUBE = 0.044715f;  // as in whorl/ops/_gelu.py

void gate(const float* gates, const float* up, int64_t stride, int64_t width, int32_t is_gelu, float* y) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int n = int(least(width - i, LANES));
    const F g = load_every(gates + i * stride, stride, n), u = load_every(up + i * stride, stride, n);
    F active;
    if (is_gelu) {
      const F cube = mul(mul(g, g), g);
      F power = mul(set1(-SLOPE), fma(set1(CUBE), cube, g));
      power = if_less(set1(80.0f), power, set1(80.0f), power);
      active = mul(g, div(set1(1.0f), add(set1(1.0f), exp_of(power))));
    } else {
      active = div(g, add(set1(1.0f), exp_of(sub(zero(), g))));
    }
    store_n(y + i, mul(active, u), n);
  }
}

void soften(const float* x, int64_t width, float* y) {
  float top = -INFINITY;
  for (int64_t i = 0; i < width; i++) top = top < x[i] ? x[i] : top;
  F total = zero();
  for (int64_t i = 0; i < width; i += LANES) {
    const int n = int(least(width - i, LANES));
    float some[LANES];
    fill(some, LANES, -INFINITY);
    memcpy(some, x + i, n * sizeof(float));
    const F weights = exp_of(sub(load(some), set1(top)));
    store_n(y + i, weights, n);
    total = add(total, weights);
  }
  const F whole = set1(sum(total));
  for (int64_t i = 0; i < width; i += LANES) {
    const int n = int(least(width - i, LANES));
    store_n(y + i, div(load_n(y + i, n), whole), n);
  }
}

void add_scaled(const float* x, float scale, int64_t width, float* y) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int n = int(least(width - i, LANES));
    store_n(y + i, fma(load_n(x + i, n), set1(scale), load_n(y + i, n)), n);
  }
}

// ---- attention
//
// A row is one query of one head. Its keys are cut into spans of SPAN, from multiples of SPAN on, and a span into blocks
// of 16 keys. Every span is added up from nothing; spans are folded in their order. So the bits of a row depend on its
// query and its keys alone. A row's state is [highest score, sum of weights, sum of weighted values].

int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

float element(const void* from, int64_t at, int32_t type) {
  switch (type) {
    case FP32: return ((const float*)from)[at];
    case BF16: return from_bf16(((const uint16_t*)from)[at]);
    case FP16: return from_half(((const uint16_t*)from)[at]);
    case INT8: return float(((const int8_t*)from)[at]);
    default: return from_fp8(((const uint8_t*)from)[at]);
  }
}

float rounded_to(float x, int32_t type) {
  if (type == BF16) {
    const uint32_t bits = to_bits(x);
    return from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
  }
  if (type == FP16) {  // to a multiple of the distance between neighbours, 2^-24 at the least
    const float size = fabsf(x);
    if (size >= 65520.0f) return x < 0 ? -INFINITY : INFINITY;
    const float step = from_bits(uint32_t(most(to_bits(size) & 0x7f800000u, 0x38800000u)) - (10u << 23));
    return nearbyintf(x / step) * step;
  }
  return x;
}

// Reads one key or value head of a token as fp32.
void read_head(const Cache& c, bool is_value, int64_t block, int64_t offset, int64_t head, int64_t kv_heads, int64_t dim,
               float* out) {
  const int64_t at = is_value ? block * c.v_block_stride + offset * c.v_slot_stride + head * c.v_head_stride
                              : block * c.block_stride + offset * c.slot_stride + head * c.head_stride;
  const void* from = is_value ? c.v : c.k;
  if (c.type == FP32) {
    memcpy(out, (const float*)from + at, dim * sizeof(float));
    return;
  }
  const float* scales = is_value ? c.v_scale : c.k_scale;
  const float scale = scales ? scales[(block * kv_heads + head) * c.size + offset] : 1.0f;
  for (int64_t i = 0; i < dim; i++) {
    const float value = element(from, at + i, c.type);
    out[i] = scales ? rounded_to(value * scale, c.rounding) : value;
  }
}

struct Keys {  // a block of 16 keys of one head
  Buffer<float> memory;
  float *transposed, *values;
  void read(const Attention& a, int64_t sequence, int64_t head, int64_t first, int64_t count, int64_t width) {
    transposed = memory.get(width * (2 * LANES + 1)), values = transposed + width * LANES;
    float* row = values + width * LANES;
    fill(transposed, width * LANES, 0.0f);
    for (int64_t j = 0; j < count; j++) {
      const int64_t key = first + j;
      int64_t block = 0, offset = a.starts[sequence] + key;
      if (!a.is_contiguous) block = a.tables[sequence * a.table_stride + key / a.cache.size], offset = key % a.cache.size;
      read_head(a.cache, false, block, offset, head, a.kv_heads, a.dim, row);
      for (int64_t d = 0; d < a.dim; d++) transposed[d * LANES + j] = row[d];
      float* value = values + j * width;
      read_head(a.cache, true, block, offset, head, a.kv_heads, a.dim, value);
      fill(value + a.dim, width - a.dim, 0.0f);
    }
  }
};

// Scores of the 16 keys: two chains, of even and of odd channels.
template <int ROWS>
INLINE void scores_of(const float* queries, int64_t width, const float* transposed, F* out) {
  F even[ROWS], odd[ROWS];
  UNROLL for (int r = 0; r < ROWS; r++) even[r] = odd[r] = zero();
  for (int64_t d = 0; d < width; d += 2) {
    const F k = load(transposed + d * LANES), next = load(transposed + (d + 1) * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      even[r] = fma(set1(queries[r * width + d]), k, even[r]);
      odd[r] = fma(set1(queries[r * width + d + 1]), next, odd[r]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) out[r] = add(even[r], odd[r]);
}

template <int CHUNKS>
INLINE void add_values(const float* weights, int low, int high, const float* values, int64_t width, float keep, float* out) {
  F y[CHUNKS];
  UNROLL for (int c = 0; c < CHUNKS; c++) y[c] = mul(load(out + c * LANES), set1(keep));
  for (int j = low; j < high; j++) {
    const F weight = set1(weights[j]);
    UNROLL for (int c = 0; c < CHUNKS; c++) y[c] = fma(weight, load(values + j * width + c * LANES), y[c]);
  }
  UNROLL for (int c = 0; c < CHUNKS; c++) store(out + c * LANES, y[c]);
}

// tanh to about 1 ulp: a polynomial where a difference of exponentials would cancel.
INLINE F tanh_of(F x) {
  const F z = mul(x, x);
  F p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  p = fma(mul(p, z), x, x);
  const F size = abs(x), twice = add(size, size);
  const F far = sub(set1(1.0f), div(set1(2.0f), add(exp_of(twice), set1(1.0f))));
  return if_less(size, set1(0.625f), p, if_less(x, zero(), sub(zero(), far), far));
}

struct RowState {
  float top;
  float weights[LANES];  // sums by lane
};

INLINE void add_block(F scores, int low, int high, const Keys& keys, int64_t width, RowState& state, float* out) {
  if (low > 0 || high < LANES) {
    float some[LANES];
    store(some, scores);
    for (int j = 0; j < LANES; j++)
      if (j < low || j >= high) some[j] = -INFINITY;
    scores = load(some);
  }
  const float block_top = greatest(scores), top = state.top < block_top ? block_top : state.top;
  const float keep = top == state.top ? 1.0f : exp_of(state.top - top);
  const F weights = exp_of(sub(scores, set1(top)));
  float some[LANES];
  store(some, weights);
  store(state.weights, fma(load(state.weights), set1(keep), weights));
  state.top = top;
  int64_t c = 0;
  for (; c + 4 * LANES <= width; c += 4 * LANES)
    add_values<4>(some, low, high, keys.values + c, width, keep, out + c);
  for (; c < width; c += LANES) add_values<1>(some, low, high, keys.values + c, width, keep, out + c);
}

// Folds a span's state into that of the spans before it.
void fold_state(float* state, const float* next, int64_t width) {
  if (next[1] == 0 && next[0] == -INFINITY) return;
  if (state[1] == 0 && state[0] == -INFINITY) {
    memcpy(state, next, (2 + width) * sizeof(float));
    return;
  }
  const float top = state[0] < next[0] ? next[0] : state[0];
  const float a = exp_of(state[0] - top), b = exp_of(next[0] - top);
  state[0] = top, state[1] = fmaf(next[1], b, state[1] * a);
  for (int64_t c = 2; c < 2 + width; c += LANES)
    store(state + c, fma(load(next + c), set1(b), mul(load(state + c), set1(a))));
}

void attend(const Attention& a, int64_t sequence, int64_t kv_head, int64_t first_row, int64_t last_row,
            int64_t first_span, int64_t last_span, float* partial) {
  const int64_t group = a.heads / a.kv_heads, rows = last_row - first_row, width = padded(a.dim);
  const int64_t start = a.starts[sequence], count = a.starts[sequence + 1] - start, length = a.lengths[sequence];
  static thread_local Buffer<float> query_memory, sum_memory;
  static thread_local Buffer<RowState> state_memory;
  static thread_local Keys keys;
  float *queries = query_memory.get(rows * width), *sums = sum_memory.get(rows * (2 + width));
  RowState* states = state_memory.get(rows);
  fill(queries, rows * width, 0.0f);
  auto position = [&](int64_t row) { return length - count + (first_row + row) / group; };
  for (int64_t r = 0; r < rows; r++) {
    const int64_t row = first_row + r, head = kv_head * group + row % group;
    const float* q = a.q + (start + row / group) * a.q_token_stride + head * a.q_head_stride;
    for (int64_t d = 0; d < a.dim; d++) queries[r * width + d] = q[d] * a.scale;
    float* state = partial + r * (2 + width);
    state[0] = -INFINITY;
    fill(state + 1, 1 + width, 0.0f);
  }
  const int64_t last_key = position(rows - 1) + 1;
  const int64_t first_key = a.window ? most(0, position(0) - a.window + 1) : 0;
  for (int64_t span = first_span; span < last_span; span++) {
    for (int64_t r = 0; r < rows; r++) {
      states[r].top = -INFINITY;
      fill(states[r].weights, LANES, 0.0f);
    }
    fill(sums, rows * (2 + width), 0.0f);
    const int64_t end = least(last_key, (span + 1) * SPAN);
    for (int64_t key = most(span * SPAN, first_key / LANES * LANES); key < end; key += LANES) {
      keys.read(a, sequence, kv_head, key, least(end - key, LANES), width);
      for (int64_t r = 0; r < rows;) {
        F scores[2];
        const int pair = r + 2 <= rows ? 2 : 1;
        if (pair == 2)
          scores_of<2>(&queries[r * width], width, keys.transposed, scores);
        else
          scores_of<1>(&queries[r * width], width, keys.transposed, scores);
        for (int i = 0; i < pair; i++, r++) {
          const int high = int(least(position(r) + 1 - key, LANES));
          const int low = a.window ? int(most(0, position(r) - a.window + 1 - key)) : 0;
          const F capped = a.softcap > 0 ? mul(set1(a.softcap), tanh_of(div(scores[i], set1(a.softcap)))) : scores[i];
          if (low < high) add_block(capped, low, high, keys, width, states[r], &sums[r * (2 + width) + 2]);
        }
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      float* next = &sums[r * (2 + width)];
      next[0] = states[r].top, next[1] = sum(load(states[r].weights));
      fold_state(partial + r * (2 + width), next, width);
    }
  }
}

// Folds the states of a row's spans, `stride` numbers apart, and writes its result.
void fold(const Attention& a, int64_t sequence, int64_t kv_head, int64_t row, const float* partials, int64_t count,
          int64_t stride) {
  const int64_t group = a.heads / a.kv_heads, width = padded(a.dim);
  const int64_t at = (a.starts[sequence] + row / group) * a.heads + kv_head * group + row % group;
  static thread_local Buffer<float> memory;
  float* state = memory.get(2 + width);
  memcpy(state, partials, (2 + width) * sizeof(float));
  for (int64_t i = 1; i < count; i++) fold_state(state, partials + i * stride, width);
  if (a.sinks) {  // as a key without a value
    const float sink = a.sinks[kv_head * group + row % group], top = state[0] < sink ? sink : state[0];
    const float keep = exp_of(state[0] - top);
    state[0] = top, state[1] = fmaf(state[1], keep, exp_of(sink - top));
    for (int64_t d = 0; d < width; d += LANES) store(state + 2 + d, mul(load(state + 2 + d), set1(keep)));
  }
  const F total = set1(state[1]);
  for (int64_t d = 0; d < a.dim; d += LANES)
    store_n(a.out + at * a.dim + d, div(load(&state[2 + d]), total), int(least(a.dim - d, LANES)));
  if (a.lse) a.lse[at] = state[0] + logf(state[1]);
}

}  // namespace

const Kernels JOIN(WHORL_VARIANT, _kernels) = {
    NAME_OF(WHORL_VARIANT), round_tokens, multiply_packed, multiply_plain, unpack_row, norm_row, rotate_head,
    attend, fold, gate, soften, add_scaled,
};

}  // namespace whorl
