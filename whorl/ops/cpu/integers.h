// Products of codes of 4 and 8 bits: exact integers, so their order is free.
#pragma once

#include "lanes.h"

namespace {

// Codes of 8 bits are multiplied with an unsigned operand, which holds code + 128.
#if defined(WHORL_AVX512)
constexpr bool IS_SHIFTED = true;
#else
constexpr bool IS_SHIFTED = false;
#endif

// Counts are known when this is compiled, and sums stay in registers.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#define ROLL _Pragma("GCC unroll 1")  // else additions are put off until everything has been multiplied, and spilled
#endif

INLINE int32_t quad_at(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return quad;
}

// Each plane of a block: out[t][row] = sum of code[row][k] * x[t][k] over the quads FIRST to LAST; 4 bits: over all.
// x: [8 quads][COUNT tokens][4] of each plane; out: [PLANES][COUNT].
#if defined(WHORL_AVX512)
template <int BITS, int FIRST, int LAST, int COUNT, int PLANES>
INLINE void block_product(const uint8_t* codes, const int8_t* x, I* out) {
  constexpr int CHAINS = COUNT * PLANES;
  __m512i sums[CHAINS];
  const auto quad = [&](int q, int i) { return _mm512_set1_epi32(quad_at(x + ((i / COUNT * 8 + q) * COUNT + i % COUNT) * 4)); };
  UNROLL for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_setzero_si512();
  if (BITS == 4) {
    const __m512i mask = _mm512_set1_epi8(15);
    UNROLL for (int c = 0; c < 4; c++) {
      const __m512i both = _mm512_loadu_si512(codes + 64 * c);
      const __m512i low = _mm512_and_si512(both, mask), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
      UNROLL for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], low, quad(c, i));
      UNROLL for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], high, quad(c + 4, i));
    }
  } else {
    const __m512i shift = _mm512_set1_epi8(-128);
    UNROLL for (int q = FIRST; q < LAST; q++) {
      const __m512i shifted = _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * q), shift);
      UNROLL for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], shifted, quad(q, i));
    }
  }
  UNROLL for (int i = 0; i < CHAINS; i++) out[i].v = sums[i];
}
#else
template <int BITS, int FIRST, int LAST, int COUNT>
INLINE void plane_product(const uint8_t* codes, const int8_t* x, I* out) {
#if defined(WHORL_AVX2)
  const __m256i ones = _mm256_set1_epi16(1);
  if (BITS == 4) {  // |code| <= 15: eight products of pairs fit 16 bits
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i a[COUNT], b[COUNT];
    UNROLL for (int t = 0; t < COUNT; t++) a[t] = b[t] = _mm256_setzero_si256();
    ROLL for (int c = 0; c < 4; c++) {
      const __m256i first = _mm256_loadu_si256((const __m256i*)(codes + 64 * c));
      const __m256i second = _mm256_loadu_si256((const __m256i*)(codes + 64 * c + 32));
      const __m256i low0 = _mm256_and_si256(first, mask), low1 = _mm256_and_si256(second, mask);
      const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(first, 4), mask);
      const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(second, 4), mask);
      UNROLL for (int t = 0; t < COUNT; t++) {
        const __m256i here = _mm256_set1_epi32(quad_at(x + (c * COUNT + t) * 4)), there = _mm256_set1_epi32(quad_at(x + ((c + 4) * COUNT + t) * 4));
        a[t] = _mm256_add_epi16(a[t], _mm256_maddubs_epi16(low0, here));
        b[t] = _mm256_add_epi16(b[t], _mm256_maddubs_epi16(low1, here));
        a[t] = _mm256_add_epi16(a[t], _mm256_maddubs_epi16(high0, there));
        b[t] = _mm256_add_epi16(b[t], _mm256_maddubs_epi16(high1, there));
      }
    }
    UNROLL for (int t = 0; t < COUNT; t++) out[t] = {_mm256_madd_epi16(a[t], ones), _mm256_madd_epi16(b[t], ones)};
  } else {  // |code| <= 128 and |x| <= 127: a pair fits 16 bits
    UNROLL for (int t = 0; t < COUNT; t++) out[t].a = out[t].b = _mm256_setzero_si256();
    ROLL for (int q = FIRST; q < LAST; q++) {
      const __m256i first = _mm256_loadu_si256((const __m256i*)(codes + 64 * q));
      const __m256i second = _mm256_loadu_si256((const __m256i*)(codes + 64 * q + 32));
      const __m256i size0 = _mm256_abs_epi8(first), size1 = _mm256_abs_epi8(second);
      UNROLL for (int t = 0; t < COUNT; t++) {
        const __m256i here = _mm256_set1_epi32(quad_at(x + (q * COUNT + t) * 4));
        const __m256i pairs0 = _mm256_maddubs_epi16(size0, _mm256_sign_epi8(here, first));
        const __m256i pairs1 = _mm256_maddubs_epi16(size1, _mm256_sign_epi8(here, second));
        out[t].a = _mm256_add_epi32(out[t].a, _mm256_madd_epi16(pairs0, ones));
        out[t].b = _mm256_add_epi32(out[t].b, _mm256_madd_epi16(pairs1, ones));
      }
    }
  }
#elif defined(WHORL_NEON)
  UNROLL for (int t = 0; t < COUNT; t++)
    UNROLL for (int i = 0; i < 4; i++) out[t].v[i] = vdupq_n_s32(0);
  if (BITS == 4) {
    ROLL for (int c = 0; c < 4; c++)
      UNROLL for (int i = 0; i < 4; i++) {
        const uint8x16_t both = vld1q_u8(codes + 64 * c + 16 * i);
        const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
        const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        UNROLL for (int t = 0; t < COUNT; t++) {
          const int8x16_t here = vreinterpretq_s8_s32(vdupq_n_s32(quad_at(x + (c * COUNT + t) * 4)));
          const int8x16_t there = vreinterpretq_s8_s32(vdupq_n_s32(quad_at(x + ((c + 4) * COUNT + t) * 4)));
          out[t].v[i] = vdotq_s32(vdotq_s32(out[t].v[i], low, here), high, there);
        }
      }
  } else {
    ROLL for (int q = FIRST; q < LAST; q++)
      UNROLL for (int i = 0; i < 4; i++) {
        const int8x16_t code = vreinterpretq_s8_u8(vld1q_u8(codes + 64 * q + 16 * i));
        UNROLL for (int t = 0; t < COUNT; t++)
          out[t].v[i] = vdotq_s32(out[t].v[i], code, vreinterpretq_s8_s32(vdupq_n_s32(quad_at(x + (q * COUNT + t) * 4))));
      }
  }
#else
  for (int t = 0; t < COUNT; t++)
    for (int row = 0; row < LANES; row++) {
      int32_t total = 0;
      for (int k = 4 * FIRST; k < 4 * LAST; k++) {
        const int quad = k / 4;
        const int code = BITS == 8 ? int8_t(codes[(quad * LANES + row) * 4 + k % 4])
                                   : codes[(quad % 4 * LANES + row) * 4 + k % 4] >> (quad < 4 ? 0 : 4) & 15;
        total += code * x[(quad * COUNT + t) * 4 + k % 4];
      }
      out[t].v[row] = total;
    }
#endif
}

template <int BITS, int FIRST, int LAST, int COUNT, int PLANES>
INLINE void block_product(const uint8_t* codes, const int8_t* x, I* out) {
  UNROLL for (int p = 0; p < PLANES; p++)
    plane_product<BITS, FIRST, LAST, COUNT>(codes, x + p * 32 * COUNT, out + p * COUNT);
}
#endif

}  // namespace
