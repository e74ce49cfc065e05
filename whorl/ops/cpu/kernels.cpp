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

template <int PLANES>
void round_group(Rows x, const Rounded& out, int64_t first) {
  const int64_t blocks = out.columns / BLOCK, size = least(out.count - first, GROUP);
  int8_t* codes = out.codes + first * out.columns * PLANES;
  float* scales = out.scales + 2 * first * blocks;
  int32_t* sums = out.sums + 2 * PLANES * first * blocks;
  for (int64_t b = 0; b < blocks; b++, codes += BLOCK * PLANES * size, scales += 2 * size, sums += 2 * PLANES * size)
    for (int64_t t = 0; t < size; t++) {
      const float* block = x.data + (first + t) * x.stride + b * BLOCK;
      const F halves[] = {load(block), load(block + LANES)};
      const float top = greatest(greater(abs(halves[0]), abs(halves[1])));
      const float broken = sum(mul(add(halves[0], halves[1]), zero()));  // NaN where a number is not finite, else 0
      const bool is_zero = !(top > 1e-30f);
      const F inverse = set1(is_zero ? 0.0f : 127.0f / top);
      const float scale = is_zero ? broken : top / 127.0f + broken;
      float total = 0;  // integers that fp32 has
      UNROLL for (int half = 0; half < 2; half++) {
        I code[2];
        code[0] = round_int(mul(halves[half], inverse));
        F whole[2] = {to_float(code[0]), zero()};
        if (PLANES == 2) {
          code[1] = round_int(mul(fma(halves[half], inverse, sub(zero(), whole[0])), set1(float(STEPS))));
          whole[1] = to_float(code[1]);
        }
        UNROLL for (int p = 0; p < PLANES; p++) {
          int8_t some[LANES];
          store_i8(some, code[p]);
          UNROLL for (int q = 0; q < 4; q++) memcpy(codes + ((p * 8 + half * 4 + q) * size + t) * 4, some + 4 * q, 4);
          const float of_plane = broken == 0 ? sum(whole[p]) : 0.0f;
          sums[(half * PLANES + p) * size + t] = int32_t(of_plane);
          total += PLANES == 2 && p == 0 ? of_plane * float(STEPS) : of_plane;
        }
      }
      scales[t] = PLANES == 2 ? scale / float(STEPS) : scale;
      scales[size + t] = scales[t] * total;
    }
}

void round_tokens(Rows x, const Rounded& out, int64_t first_group, int64_t last_group) {
  for (int64_t g = first_group; g < last_group; g++) (out.planes == 2 ? round_group<2> : round_group<1>)(x, out, g * GROUP);
}

// ---- packed weights

// The integers of the quads FIRST to LAST of a block, as fp32 of their exact sums. zero: log2 of what codes are above
// their values, or -1.
template <int BITS, int FIRST, int LAST, int COUNT, int PLANES>
INLINE void whole_product(const uint8_t* at, const int8_t* codes, const int32_t* sums, int zero, F* total) {
  I parts[COUNT * PLANES];
  block_product<BITS, FIRST, LAST, COUNT, PLANES>(at, codes, parts);
  constexpr int HALVES = LAST - FIRST == 8 ? 2 : 1;
  if (zero >= 0)
    UNROLL for (int half = 0; half < HALVES; half++)
      UNROLL for (int i = 0; i < COUNT * PLANES; i++)
        parts[i] = isub(parts[i], times_power(iset(sums[(FIRST / 4 + half) * COUNT * PLANES + i]), zero));
  UNROLL for (int t = 0; t < COUNT; t++) {
    total[t] = to_float(parts[t]);
    if (PLANES == 2) total[t] = fma(total[t], set1(float(STEPS)), to_float(parts[COUNT * (PLANES - 1) + t]));
  }
}

template <int BITS, int SCALES, bool MINIMA, int PLANES, int COUNT>
void panel_product(const uint8_t* at, int64_t blocks, int zero_code, const int8_t* codes, const float* scales,
                          const int32_t* sums, F* out) {
  F y[COUNT], d = zero(), d_min = zero();
  UNROLL for (int t = 0; t < COUNT; t++) y[t] = zero();
  const int zero_power = BITS == 8 ? (IS_SHIFTED ? 7 : -1) : zero_code ? 3 : -1;
  for (int64_t b = 0; b < blocks; b++) {
    F scale, minimum = zero(), total[COUNT];
    if (SCALES != HALF_SCALES && b % (SUPER / BLOCK) == 0) {
      d = load_half((const uint16_t*)at);
      if (SCALES == SUB_SCALES) d_min = sub(zero(), load_half((const uint16_t*)(at + 32)));
      at += SCALES == SUB_SCALES ? 64 : 32;
    }
    if (SCALES == PAIR_SCALES) {
      const F first = to_float(load_i8(at)), second = to_float(load_i8(at + 16));
      at += 32;
      F low[COUNT], high[COUNT];
      whole_product<BITS, 0, 4, COUNT, PLANES>(at, codes, sums, zero_power, low);
      whole_product<BITS, 4, 8, COUNT, PLANES>(at, codes, sums, zero_power, high);
      UNROLL for (int t = 0; t < COUNT; t++) total[t] = fma(first, low[t], mul(second, high[t]));
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
      whole_product<BITS, 0, 8, COUNT, PLANES>(at, codes, sums, zero_power, total);
    }
    at += BLOCK * BITS / 8 * PANEL;
    UNROLL for (int t = 0; t < COUNT; t++) {
      y[t] = fma(mul(scale, set1(scales[t])), total[t], y[t]);
      if (MINIMA) y[t] = fma(minimum, set1(scales[COUNT + t]), y[t]);
    }
    codes += BLOCK * PLANES * COUNT, scales += 2 * COUNT, sums += 2 * PLANES * COUNT;
  }
  UNROLL for (int t = 0; t < COUNT; t++) out[t] = y[t];
}

constexpr int64_t TILE_BYTES = 48 << 10;  // a quarter of the codes of a tile of tokens

template <int BITS, int SCALES, bool MINIMA, int PLANES>
void multiply_segment(const Segment& segment, const Rounded& x, int64_t first_panel, int64_t last_panel, Rows out) {
  const int64_t bytes = panel_bytes(segment.packing, x.columns), blocks = x.columns / BLOCK;
  const int zero_code = segment.packing.zero;
  // Tokens that stay in a cache while all panels pass.
  const int64_t tile = most(TILE_BYTES / (x.columns * PLANES), 1) * GROUP;
  for (int64_t first = 0; first < x.count; first += tile)
    for (int64_t p = first_panel; p < last_panel; p++) {
      const uint8_t* panel = segment.data + p * bytes;
      const int left = int(least(segment.rows - p * PANEL, PANEL));
      for (int64_t t = first; t < least(x.count, first + tile); t += GROUP) {
        const int8_t* codes = x.codes + t * x.columns * PLANES;
        const float* scales = x.scales + 2 * t * blocks;
        const int32_t* sums = x.sums + 2 * PLANES * t * blocks;
        F y[GROUP];
        const int count = int(least(x.count - t, GROUP));
        const auto product = count == 1   ? panel_product<BITS, SCALES, MINIMA, PLANES, 1>
                             : count == 2 ? panel_product<BITS, SCALES, MINIMA, PLANES, 2>
                             : count == 3 ? panel_product<BITS, SCALES, MINIMA, PLANES, 3>
                                          : panel_product<BITS, SCALES, MINIMA, PLANES, GROUP>;
        product(panel, blocks, zero_code, codes, scales, sums, y);
        for (int i = 0; i < count; i++)
          store_n(out.data + (t + i) * out.stride + segment.column + p * PANEL, y[i], left);
      }
    }
}

template <int PLANES>
void multiply_planes(const Segment& segment, const Rounded& x, int64_t first_panel, int64_t last_panel, Rows out) {
  const Packing& p = segment.packing;
  const bool is_small = p.bits == 4;
  const auto multiply =
      p.scales == PAIR_SCALES  ? multiply_segment<8, PAIR_SCALES, false, PLANES>
      : p.scales == SUB_SCALES ? (is_small ? multiply_segment<4, SUB_SCALES, true, PLANES> : multiply_segment<8, SUB_SCALES, true, PLANES>)
      : p.has_minima ? (is_small ? multiply_segment<4, HALF_SCALES, true, PLANES> : multiply_segment<8, HALF_SCALES, true, PLANES>)
                     : (is_small ? multiply_segment<4, HALF_SCALES, false, PLANES> : multiply_segment<8, HALF_SCALES, false, PLANES>);
  multiply(segment, x, first_panel, last_panel, out);
}

void multiply_packed(const Segment& segment, const Rounded& x, int64_t first_panel, int64_t last_panel, Rows out) {
  (x.planes == 2 ? multiply_planes<2> : multiply_planes<1>)(segment, x, first_panel, last_panel, out);
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
void multiply_rows(const Plain& w, Rows x, int64_t first_row, int64_t last_row, Rows out) {
  for (int64_t t = 0; t < x.count;) {
    const float* from[TILE_TOKENS];
    float* to[TILE_TOKENS];
    const int count = int(least(x.count - t, TILE_TOKENS));
    for (int i = 0; i < count; i++) from[i] = x.data + (t + i) * x.stride, to[i] = out.data + (t + i) * out.stride;
    if (count == TILE_TOKENS)
      multiply_tile<TYPE, TILE_TOKENS>(w, from, first_row, last_row, to);
    else
      for (int i = 0; i < count; i++) multiply_tile<TYPE, 1>(w, from + i, first_row, last_row, to + i);
    t += count;
  }
}

void multiply_plain(const Plain& w, Rows x, int64_t first_row, int64_t last_row, Rows out) {
  const auto multiply = w.type == FP32 ? multiply_rows<FP32> : w.type == BF16 ? multiply_rows<BF16> : multiply_rows<FP16>;
  multiply(w, x, first_row, last_row, out);
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

// The logarithm of x >= 1 to about 1 ulp.
float log_of(float x) {
  if (!(x < INFINITY)) return x;
  const uint32_t bits = to_bits(x);
  float power = float(int(bits >> 23) - 126), m = from_bits((bits & 0x7fffff) | 0x3f000000);  // from 1/2 to 1
  if (m < 0.70710678f) power -= 1, m = m + m;
  m -= 1;
  const float terms[] = {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                         -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  float p = terms[0];
  for (int i = 1; i < 9; i++) p = fmaf(p, m, terms[i]);
  const float square = m * m;
  float y = m * square * p;
  y = fmaf(power, -2.12194440e-4f, y);
  y = fmaf(square, -0.5f, y);
  return fmaf(power, 0.693359375f, m + y);
}

// y = (x - top) - log(sum of exp(x - top)); minus infinity stays what it is.
void log_softmax(const float* x, int64_t width, float* y) {
  float none[LANES];
  fill(none, LANES, -INFINITY);
  auto part = [&](int64_t i) {
    if (width - i >= LANES) return load(x + i);
    memcpy(none, x + i, (width - i) * sizeof(float));
    return load(none);
  };
  F highest = set1(-INFINITY), total = zero();
  for (int64_t i = 0; i < width; i += LANES) highest = greater(highest, part(i));
  const F top = set1(greatest(highest));
  for (int64_t i = 0; i < width; i += LANES) total = add(total, exp_of(sub(part(i), top)));
  const F log = set1(log_of(sum(total)));
  for (int64_t i = 0; i < width; i += LANES) {
    const F value = part(i), result = sub(sub(value, top), log);
    store_n(y + i, if_less(value, set1(-FLT_MAX), value, result), int(least(width - i, LANES)));
  }
}

// ---- router

// Chooses the experts that rank highest, ties to the lowest, and NaN above all numbers.
void route(const float* logits, const Routing& routing, float* weights, int32_t* ids) {
  static thread_local Buffer<float> memory;
  const int64_t count = routing.experts, width = (count + LANES - 1) / LANES * LANES;
  float *scores = memory.get(2 * width), *ranks = scores + width;
  fill(scores, width, -INFINITY);
  memcpy(scores, logits, count * sizeof(float));
  F highest = set1(-INFINITY), total = zero();
  for (int64_t i = 0; i < width; i += LANES) highest = greater(highest, load(scores + i));
  const F top = set1(greatest(highest)), one = set1(1.0f);
  for (int64_t i = 0; i < width; i += LANES) {
    const F x = load(scores + i);
    const F y = routing.is_sigmoid ? div(one, add(one, exp_of(sub(zero(), x)))) : exp_of(sub(x, top));
    store(scores + i, y);
    total = add(total, y);
  }
  const F divisor = set1(sum(total));
  for (int64_t i = 0; i < width && !routing.is_sigmoid; i += LANES) store(scores + i, div(load(scores + i), divisor));
  for (int64_t i = 0; i < count; i++) ranks[i] = routing.bias ? scores[i] + routing.bias[i] : scores[i];
  for (int64_t i = 0, size = 0; i < count; i++) {  // ids: the best so far, in their order
    auto is_before = [&](int64_t other) { return !(ranks[i] <= ranks[other]) && ranks[other] == ranks[other]; };
    int64_t at = size;
    while (at > 0 && is_before(ids[at - 1])) at--;
    if (at == routing.choices) continue;
    size = least(size + 1, routing.choices);
    for (int64_t c = size - 1; c > at; c--) ids[c] = ids[c - 1];
    ids[at] = int32_t(i);
  }
  float chosen = scores[ids[0]];
  for (int64_t c = 1; c < routing.choices; c++) chosen += scores[ids[c]];
  const float share = chosen < 1e-20f ? 1e-20f : chosen;
  for (int64_t c = 0; c < routing.choices; c++)
    weights[c] = (routing.renormalizes ? scores[ids[c]] / share : scores[ids[c]]) * routing.scale;
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

// Returns one key or value head of a token as fp32, padded with zeros to `width` numbers: where it lies, or a copy.
const float* read_head(const Cache& c, bool is_value, int64_t block, int64_t offset, int64_t head, int64_t kv_heads,
                       int64_t dim, int64_t width, float* copy) {
  const int64_t at = is_value ? block * c.v_block_stride + offset * c.v_slot_stride + head * c.v_head_stride
                              : block * c.block_stride + offset * c.slot_stride + head * c.head_stride;
  const void* from = is_value ? c.v : c.k;
  if (c.type == FP32 && dim == width) return (const float*)from + at;
  const float* scales = is_value ? c.v_scale : c.k_scale;
  const float scale = scales ? scales[(block * kv_heads + head) * c.size + offset] : 1.0f;
  for (int64_t i = 0; i < dim; i++) {
    const float value = element(from, at + i, c.type);
    copy[i] = scales ? rounded_to(value * scale, c.rounding) : value;
  }
  fill(copy + dim, width - dim, 0.0f);
  return copy;
}

struct Keys {  // a block of 16 keys of one head, and their values
  Buffer<float> memory;
  float* transposed;
  const float* values[LANES];
  void read(const Attention& a, int64_t sequence, int64_t head, int64_t first, int64_t count, int64_t width) {
    transposed = memory.get(width * 3 * LANES);
    float* copies = transposed + width * LANES;
    const float* rows[LANES];
    for (int64_t j = 0; j < count; j++, copies += 2 * width) {
      const int64_t key = first + j;
      int64_t block = 0, offset = a.starts[sequence] + key;
      if (!a.is_contiguous) block = a.tables[sequence * a.table_stride + key / a.cache.size], offset = key % a.cache.size;
      rows[j] = read_head(a.cache, false, block, offset, head, a.kv_heads, a.dim, width, copies);
      values[j] = read_head(a.cache, true, block, offset, head, a.kv_heads, a.dim, width, copies + width);
    }
    for (int64_t j = count; j < LANES; j++) rows[j] = rows[0];  // their scores are not used
    for (int64_t d = 0; d < width; d += LANES) transpose(rows, d, transposed + d * LANES);
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

// Adds the values from `low` to `high` to the sums of ROWS rows, `stride` numbers apart, of which it keeps a share.
template <int ROWS, int CHUNKS>
INLINE void add_values(const float (*weights)[LANES], int low, int high, const float* const* values, int64_t at,
                       const float* keep, float* out, int64_t stride) {
  F y[ROWS][CHUNKS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < CHUNKS; c++) y[r][c] = mul(load(out + r * stride + at + c * LANES), set1(keep[r]));
  for (int j = low; j < high; j++)
    UNROLL for (int c = 0; c < CHUNKS; c++) {
      const F value = load(values[j] + at + c * LANES);
      UNROLL for (int r = 0; r < ROWS; r++) y[r][c] = fma(set1(weights[r][j]), value, y[r][c]);
    }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < CHUNKS; c++) store(out + r * stride + at + c * LANES, y[r][c]);
}

#if defined(WHORL_AVX512)
constexpr int VALUE_CHUNKS = 4;
#else
constexpr int VALUE_CHUNKS = 1;
#endif

template <int ROWS>
INLINE void add_all_values(const float (*weights)[LANES], int low, int high, const float* const* values, int64_t width,
                           const float* keep, float* out, int64_t stride) {
  int64_t at = 0;
  for (; at + VALUE_CHUNKS * LANES <= width; at += VALUE_CHUNKS * LANES)
    add_values<ROWS, VALUE_CHUNKS>(weights, low, high, values, at, keep, out, stride);
  for (; at < width; at += LANES) add_values<ROWS, 1>(weights, low, high, values, at, keep, out, stride);
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

struct Bounds {  // of the keys of a block that a row attends to
  int low, high;
};

// Adds a block of keys to ROWS rows, each with the operations that it has alone.
template <int ROWS>
void add_block(const Attention& a, const float* queries, const Bounds* bounds, const Keys& keys, int64_t width,
                      RowState* states, float* sums) {
  F scores[ROWS];
  float weights[ROWS][LANES], keep[ROWS];
  const int64_t stride = 2 + width;
  bool is_alike = true;
  scores_of<ROWS>(queries, width, keys.transposed, scores);
  UNROLL for (int r = 0; r < ROWS; r++) {
    const int low = bounds[r].low, high = bounds[r].high;
    is_alike = is_alike && low == bounds[0].low && high == bounds[0].high;
    if (low >= high) continue;
    F score = scores[r];
    if (a.softcap > 0) score = mul(set1(a.softcap), tanh_of(div(score, set1(a.softcap))));
    if (low > 0 || high < LANES) {
      store(weights[r], score);
      for (int j = 0; j < LANES; j++)
        if (j < low || j >= high) weights[r][j] = -INFINITY;
      score = load(weights[r]);
    }
    RowState& state = states[r];
    const float block_top = greatest(score), top = state.top < block_top ? block_top : state.top;
    keep[r] = top == state.top ? 1.0f : exp_of(state.top - top);
    const F weight = exp_of(sub(score, set1(top)));
    store(weights[r], weight);
    store(state.weights, fma(load(state.weights), set1(keep[r]), weight));
    state.top = top;
  }
  if (is_alike) {
    if (bounds[0].low < bounds[0].high)
      add_all_values<ROWS>(weights, bounds[0].low, bounds[0].high, keys.values, width, keep, sums + 2, stride);
  } else {
    for (int r = 0; r < ROWS; r++)
      if (const Bounds b = bounds[r]; b.low < b.high)
        add_all_values<1>(weights + r, b.low, b.high, keys.values, width, keep + r, sums + r * stride + 2, stride);
  }
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
      for (int64_t r = 0; r < rows; r += 4) {
        const int64_t some = least(rows - r, 4);
        Bounds bounds[4];
        for (int64_t i = 0; i < some; i++) {
          bounds[i].high = int(least(position(r + i) + 1 - key, LANES));
          bounds[i].low = a.window ? int(most(0, position(r + i) - a.window + 1 - key)) : 0;
        }
        const auto add = some == 4 ? add_block<4> : some == 3 ? add_block<3> : some == 2 ? add_block<2> : add_block<1>;
        add(a, &queries[r * width], bounds, keys, width, states + r, &sums[r * (2 + width)]);
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
  if (a.lse) a.lse[at] = state[0] + log_of(state[1]);
}

}  // namespace

const Kernels JOIN(WHORL_VARIANT, _kernels) = {
    NAME_OF(WHORL_VARIANT), round_tokens, multiply_packed, multiply_plain, unpack_row, norm_row, rotate_head,
    attend, fold, gate, log_softmax, route,
};

}  // namespace whorl
