// What the kernels of one instruction set compute; every variant has the same functions and gives the same bits.
#pragma once

#include <cstdint>

namespace whorl {

// Numbers as tensors hold them.
enum Type : int32_t { FP32, BF16, FP16, INT8, FP8 };

// Packed weights. Rows are interleaved in panels of 16, columns cut into blocks of 32:
//   HALF_SCALES  [scales fp16 x 16][minima fp16 x 16, if it has them][codes]  for each block
//   SUB_SCALES   as Q4_K and Q5_K: [d, dmin fp16 x 16 each], then for each of 8 blocks [scale, minimum u8 x 16][codes]
//   PAIR_SCALES  as Q6_K: [d fp16 x 16], then for each of 8 blocks two [scales i8 x 16], of 16 columns each, [codes]
// Codes of 8 bits are [8 quads of columns][16 rows][4 columns], of 4 bits [4][16][4], quad q in the low half of a byte
// and quad q + 4 in the high one. A value is scale * code + minimum, the code less `zero` (SUB_SCALES: - minimum).
enum Scales : int32_t { HALF_SCALES, SUB_SCALES, PAIR_SCALES };

struct Packing {
  int32_t bits, scales, has_minima, zero;
};

// Rows of a packed or plain matrix whose products go to columns of the output from `column` on.
struct Segment {
  const uint8_t* data;
  int64_t rows, column;
  Packing packing;
};

struct Matrix {
  const Segment* segments;
  int64_t count, columns;
  int32_t planes;  // codes of 8 bits for each number of a token: see Rounded
};

struct Plain {  // [rows, columns] of fp32, bf16 or fp16
  const uint8_t* data;
  int64_t rows, columns, stride;  // in elements
  int32_t type;
};

// Tokens in 8 bits, or in 16: a second plane of codes holds what the first has left, in steps of 1 / STEPS. A number is
// scale * code or, with two planes, scale * (STEPS * first + second). Tokens lie in groups of GROUP, the last of which
// may be smaller; a group of n tokens has, for each block of 32 columns:
//   codes   [planes][8 quads of columns][n][4]
//   scales  [n], and [n] sums of the block's numbers, for minima
//   sums    [2 halves][planes][n], of codes
struct Rounded {
  int8_t* codes;
  float* scales;
  int32_t* sums;
  int64_t columns, count;
  int32_t planes;
};
constexpr int STEPS = 254;
constexpr int64_t GROUP = 4;

struct Rows {  // fp32 [count, width], `stride` numbers from row to row
  float* data;
  int64_t count, stride;
};

struct Norm {
  const float* weight;
  float eps;
  int32_t plus_one;
};

struct Rotation {
  const float* table;  // [T, size]: cosines, then sines
  int64_t size, start;  // channels that rotate, from `start` on
  int32_t reads_pairs, writes_pairs, inverse;
};

struct Cache {
  void *k, *v;
  int64_t block_stride, slot_stride, head_stride;  // in elements
  int64_t v_block_stride, v_slot_stride, v_head_stride;
  float *k_scale, *v_scale;  // [blocks, heads, size], of INT8 and FP8
  int64_t size;  // tokens of a block
  int32_t type;
  int32_t rounding;  // what dequantised numbers are rounded to: the type of queries
};

struct Attention {
  const float* q;  // [T, heads, dim]
  int64_t q_token_stride, q_head_stride;
  Cache cache;
  const int32_t *tables, *starts, *lengths;
  int64_t table_stride;
  int64_t num_sequences, heads, kv_heads, dim, window;
  float scale, softcap;  // 0: none
  const float* sinks;  // [heads] or null
  int32_t is_contiguous;  // keys of sequence b begin at token starts[b] of k and v: there are no tables
  float *out, *lse;  // [T, heads, dim] contiguous, [T, heads] or null
};

// A product, with packed or with plain weights: one of the two is null.
struct Product {
  const Matrix* packed;
  const Plain* plain;
  const float* bias;
};

// A matrix for each expert: packed ones, or plain ones that lie `bytes` apart, of which this is the first.
struct Stack {
  const Matrix* const* packed;
  Plain first;
  int64_t bytes, columns;
};

// How the scores of experts become the choices of a token, as whorl/ops/moe/route.py has it, without groups.
struct Routing {
  const float* bias;  // [experts] or null
  int64_t experts, choices;
  int32_t is_sigmoid, renormalizes;
  float scale;
};

// A router and its experts, SwiGLU networks.
struct Mixture {
  Product router;
  Stack gate_up, down;
  Routing routing;
};

// A layer of a decoder: norm, attention and out, then norm, gate and up, activation and down, or a mixture of experts.
struct Layer {
  Norm attention_norm, q_norm, k_norm, mlp_norm;  // without weights: no norm of heads
  Product qkv, out, gate_up, down;
  const Mixture* mixture;  // or null
  Cache cache;
  int64_t heads, kv_heads, dim, window, inner;
  float scale;
};

struct Kernels {
  const char* name;
  void (*round_tokens)(Rows x, const Rounded& out, int64_t first_group, int64_t last_group);
  void (*multiply_packed)(const Segment& segment, const Rounded& x, int64_t first_panel, int64_t last_panel, Rows out);
  void (*multiply_plain)(const Plain& w, Rows x, int64_t first_row, int64_t last_row, Rows out);
  void (*unpack_row)(const Segment& segment, int64_t row, int64_t columns, float* out);
  void (*norm_row)(const float* x, const float* residual, const Norm& norm, int64_t width, float* y, float* total);
  void (*rotate_head)(const float* x, const float* row, const Rotation& rotation, int64_t dim, float* y);
  void (*attend)(const Attention& a, int64_t sequence, int64_t kv_head, int64_t first_row, int64_t last_row,
                 int64_t first_span, int64_t last_span, float* partial);
  void (*fold)(const Attention& a, int64_t sequence, int64_t kv_head, int64_t row, const float* partials, int64_t count,
               int64_t stride);
  void (*gate)(const float* gate, const float* up, int64_t stride, int64_t width, int32_t is_gelu, float* y);
  void (*log_softmax)(const float* x, int64_t width, float* y);
  void (*route)(const float* logits, const Routing& routing, float* weights, int32_t* ids);
};

extern const Kernels plain_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

constexpr int64_t PANEL = 16, BLOCK = 32, SUPER = 256;
constexpr int64_t SPAN = 256;  // keys that are added up by themselves, from a multiple of SPAN on

inline int64_t block_bytes(const Packing& p) {  // of a panel
  const int64_t codes = BLOCK * p.bits / 8 * PANEL;
  return codes + (p.scales == HALF_SCALES ? 2 * PANEL * (1 + p.has_minima) : 2 * PANEL);
}

inline int64_t panel_bytes(const Packing& p, int64_t columns) {
  const int64_t heads = p.scales == SUB_SCALES ? 4 * PANEL : p.scales == PAIR_SCALES ? 2 * PANEL : 0;
  return columns / BLOCK * block_bytes(p) + (heads ? columns / SUPER * heads : 0);
}

}  // namespace whorl
