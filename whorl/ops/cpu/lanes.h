// Sixteen lanes of fp32 and of int32, in the registers of one instruction set.
//
// Every operation is one IEEE operation in each lane, rounded to nearest, so that all variants give the same bits: fma
// is written where it is meant, and nothing else may be contracted (-ffp-contract=off). `sum` adds in one tree.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(WHORL_AVX512) || defined(WHORL_AVX2)
#include <immintrin.h>
#elif defined(WHORL_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;

INLINE float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

INLINE float from_bf16(uint16_t h) { return from_bits(uint32_t(h) << 16); }

INLINE float from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, body = h & 0x7fff;
  if (body >= 0x7c00) return from_bits(sign | 0x7f800000u | (body & 0x3ff) << 13);
  if (body >= 0x400) return from_bits(sign | ((body << 13) + 0x38000000u));
  const float small = float(body) * 0x1p-24f;
  return sign ? -small : small;
}

// float8_e4m3fn: no infinities, one NaN.
INLINE float from_fp8(uint8_t c) {
  const uint32_t sign = uint32_t(c & 0x80) << 24, body = c & 0x7f;
  if (body == 0x7f) return NAN;
  if (body >= 8) return from_bits(sign | ((body << 20) + 0x3c000000u));
  const float small = float(body) * 0x1p-9f;
  return sign ? -small : small;
}

#if defined(WHORL_AVX512)

struct F { __m512 v; };
struct I { __m512i v; };
INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
INLINE F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE F load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
// Where a < b, x, else y. A NaN is not less than anything.
INLINE F if_less(F a, F b, F x, F y) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)}; }
INLINE I round_int(F x) { return {_mm512_cvtps_epi32(x.v)}; }
INLINE F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
INLINE F exponent(I n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))}; }
INLINE I halve(I n) { return {_mm512_srai_epi32(n.v, 1)}; }
INLINE I iset(int x) { return {_mm512_set1_epi32(x)}; }
INLINE I isub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
INLINE I times_power(I a, int power) { return {_mm512_slli_epi32(a.v, power)}; }
INLINE I load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
INLINE I load_i8(const uint8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
INLINE void store_i8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x.v)); }
INLINE void store_int(int32_t* p, I x) { _mm512_storeu_si512(p, x.v); }
INLINE float sum(F x) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

#elif defined(WHORL_AVX2)

struct F { __m256 a, b; };
struct I { __m256i a, b; };
INLINE F set1(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE F load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE __m256 bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE F load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F abs(F x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
INLINE F if_less(F a, F b, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
INLINE I round_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE F exponent(I n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
INLINE I halve(I n) { return {_mm256_srai_epi32(n.a, 1), _mm256_srai_epi32(n.b, 1)}; }
INLINE I iset(int x) { const __m256i v = _mm256_set1_epi32(x); return {v, v}; }
INLINE I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
INLINE I times_power(I x, int power) { return {_mm256_slli_epi32(x.a, power), _mm256_slli_epi32(x.b, power)}; }
INLINE I load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
INLINE I load_i8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
INLINE void store_i8(int8_t* p, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
INLINE void store_int(int32_t* p, I x) { _mm256_storeu_si256((__m256i*)p, x.a); _mm256_storeu_si256((__m256i*)(p + 8), x.b); }
INLINE float sum(F x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

#elif defined(WHORL_NEON)

struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
#define EACH(type, expression) type r; for (int i = 0; i < 4; i++) r.v[i] = expression; return r
INLINE F set1(float x) { EACH(F, vdupq_n_f32(x)); }
INLINE F load(const float* p) { EACH(F, vld1q_f32(p + 4 * i)); }
INLINE void store(float* p, F x) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]); }
INLINE F load_half(const uint16_t* p) { EACH(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
INLINE F load_bf16(const uint16_t* p) { EACH(F, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
INLINE F add(F x, F y) { EACH(F, vaddq_f32(x.v[i], y.v[i])); }
INLINE F sub(F x, F y) { EACH(F, vsubq_f32(x.v[i], y.v[i])); }
INLINE F mul(F x, F y) { EACH(F, vmulq_f32(x.v[i], y.v[i])); }
INLINE F div(F x, F y) { EACH(F, vdivq_f32(x.v[i], y.v[i])); }
INLINE F fma(F x, F y, F z) { EACH(F, vfmaq_f32(z.v[i], x.v[i], y.v[i])); }
INLINE F abs(F x) { EACH(F, vabsq_f32(x.v[i])); }
INLINE F if_less(F a, F b, F x, F y) { EACH(F, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), x.v[i], y.v[i])); }
INLINE I round_int(F x) { EACH(I, vcvtnq_s32_f32(x.v[i])); }
INLINE F to_float(I x) { EACH(F, vcvtq_f32_s32(x.v[i])); }
INLINE F exponent(I n) { EACH(F, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23))); }
INLINE I halve(I n) { EACH(I, vshrq_n_s32(n.v[i], 1)); }
INLINE I iset(int x) { EACH(I, vdupq_n_s32(x)); }
INLINE I isub(I x, I y) { EACH(I, vsubq_s32(x.v[i], y.v[i])); }
INLINE I times_power(I x, int power) { EACH(I, vshlq_s32(x.v[i], vdupq_n_s32(power))); }
INLINE I load_u8(const uint8_t* p) { I r; for (int i = 0; i < 16; i++) ((int32_t*)r.v)[i] = p[i]; return r; }
INLINE I load_i8(const uint8_t* p) { I r; for (int i = 0; i < 16; i++) ((int32_t*)r.v)[i] = int8_t(p[i]); return r; }
INLINE void store_i8(int8_t* p, I x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
INLINE void store_int(int32_t* p, I x) { for (int i = 0; i < 4; i++) vst1q_s32(p + 4 * i, x.v[i]); }
INLINE float sum(F x) {
  const float32x4_t a = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
#undef EACH

#else  // plain: any processor, and what the others are compared with

struct F { float v[16]; };
struct I { int32_t v[16]; };
#define EACH(type, expression) type r; for (int i = 0; i < 16; i++) r.v[i] = expression; return r
INLINE F set1(float x) { EACH(F, x); }
INLINE F load(const float* p) { EACH(F, p[i]); }
INLINE void store(float* p, F x) { memcpy(p, x.v, sizeof x.v); }
INLINE F load_half(const uint16_t* p) { EACH(F, from_half(p[i])); }
INLINE F load_bf16(const uint16_t* p) { EACH(F, from_bf16(p[i])); }
INLINE F add(F x, F y) { EACH(F, x.v[i] + y.v[i]); }
INLINE F sub(F x, F y) { EACH(F, x.v[i] - y.v[i]); }
INLINE F mul(F x, F y) { EACH(F, x.v[i] * y.v[i]); }
INLINE F div(F x, F y) { EACH(F, x.v[i] / y.v[i]); }
INLINE F fma(F x, F y, F z) { EACH(F, fmaf(x.v[i], y.v[i], z.v[i])); }
INLINE F abs(F x) { EACH(F, fabsf(x.v[i])); }
INLINE F if_less(F a, F b, F x, F y) { EACH(F, a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
INLINE I round_int(F x) { EACH(I, fabsf(x.v[i]) < 2147483648.0f ? int32_t(nearbyintf(x.v[i])) : INT32_MIN); }
INLINE F to_float(I x) { EACH(F, float(x.v[i])); }
INLINE F exponent(I n) { EACH(F, from_bits(uint32_t(n.v[i] + 127) << 23)); }
INLINE I halve(I n) { EACH(I, n.v[i] >> 1); }
INLINE I iset(int x) { EACH(I, x); }
INLINE I isub(I x, I y) { EACH(I, x.v[i] - y.v[i]); }
INLINE I times_power(I x, int power) { EACH(I, x.v[i] * (1 << power)); }
INLINE I load_u8(const uint8_t* p) { EACH(I, p[i]); }
INLINE I load_i8(const uint8_t* p) { EACH(I, int8_t(p[i])); }
INLINE void store_i8(int8_t* p, I x) { for (int i = 0; i < 16; i++) p[i] = int8_t(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]); }
INLINE void store_int(int32_t* p, I x) { memcpy(p, x.v, sizeof x.v); }
INLINE float sum(F x) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) x.v[i] = x.v[i] + x.v[i + step];
  return x.v[0];
}
#undef EACH

#endif

// ---- the same for all

INLINE F zero() { return set1(0.0f); }

INLINE F load_n(const float* p, int n) {
  if (n >= LANES) return load(p);
  float full[LANES] = {};
  memcpy(full, p, n * sizeof(float));
  return load(full);
}

INLINE void store_n(float* p, F x, int n) {
  if (n >= LANES) return store(p, x);
  float full[LANES];
  store(full, x);
  memcpy(p, full, n * sizeof(float));
}

INLINE F greater(F x, F y) { return if_less(x, y, y, x); }

INLINE float greatest(F x) {
#if defined(WHORL_AVX512)
  return _mm512_reduce_max_ps(x.v);
#elif defined(WHORL_AVX2)
  const __m256 a = _mm256_max_ps(x.a, x.b);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
#else
  float all[LANES];
  store(all, x);
  float top = all[0];
  for (int i = 1; i < LANES; i++) top = top < all[i] ? all[i] : top;
  return top;
#endif
}

// out[16 d + j] = rows[j][d] for 16 rows and as many columns.
INLINE void transpose(const float* const* rows, int64_t at, float* out) {
#if defined(WHORL_AVX512)
  for (int d = 0; d < LANES; d += 4) {
    __m512 z[4];
    for (int i = 0; i < 4; i++) {
      z[i] = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + at + d));
      z[i] = _mm512_mask_broadcast_f32x4(z[i], 0x00f0, _mm_loadu_ps(rows[i + 4] + at + d));
      z[i] = _mm512_mask_broadcast_f32x4(z[i], 0x0f00, _mm_loadu_ps(rows[i + 8] + at + d));
      z[i] = _mm512_mask_broadcast_f32x4(z[i], 0xf000, _mm_loadu_ps(rows[i + 12] + at + d));
    }
    const __m512 a = _mm512_unpacklo_ps(z[0], z[1]), b = _mm512_unpackhi_ps(z[0], z[1]);
    const __m512 c = _mm512_unpacklo_ps(z[2], z[3]), e = _mm512_unpackhi_ps(z[2], z[3]);
    _mm512_storeu_ps(out + 16 * d, _mm512_shuffle_ps(a, c, 0x44));
    _mm512_storeu_ps(out + 16 * d + 16, _mm512_shuffle_ps(a, c, 0xee));
    _mm512_storeu_ps(out + 16 * d + 32, _mm512_shuffle_ps(b, e, 0x44));
    _mm512_storeu_ps(out + 16 * d + 48, _mm512_shuffle_ps(b, e, 0xee));
  }
#elif defined(WHORL_AVX2)
  for (int d = 0; d < LANES; d += 4)
    for (int j = 0; j < LANES; j += 4) {
      __m128 r[4];
      for (int i = 0; i < 4; i++) r[i] = _mm_loadu_ps(rows[j + i] + at + d);
      _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
      for (int i = 0; i < 4; i++) _mm_storeu_ps(out + 16 * (d + i) + j, r[i]);
    }
#elif defined(WHORL_NEON)
  for (int d = 0; d < LANES; d += 4)
    for (int j = 0; j < LANES; j += 4) {
      const float* const* four = rows + j;
      const float32x4x2_t p = vtrnq_f32(vld1q_f32(four[0] + at + d), vld1q_f32(four[1] + at + d));
      const float32x4x2_t q = vtrnq_f32(vld1q_f32(four[2] + at + d), vld1q_f32(four[3] + at + d));
      for (int i = 0; i < 2; i++) {
        vst1q_f32(out + 16 * (d + i) + j, vcombine_f32(vget_low_f32(p.val[i]), vget_low_f32(q.val[i])));
        vst1q_f32(out + 16 * (d + i + 2) + j, vcombine_f32(vget_high_f32(p.val[i]), vget_high_f32(q.val[i])));
      }
    }
#else
  for (int d = 0; d < LANES; d++)
    for (int j = 0; j < LANES; j++) out[16 * d + j] = rows[j][at + d];
#endif
}

// e^x to about 1 ulp; 0 below the least normal number, infinite above the greatest.
INLINE F exp_of(F x) {
  const F low = set1(-87.33654f), high = set1(88.72283f);
  F inside = if_less(x, low, low, x);
  inside = if_less(high, inside, high, inside);
  const I n = round_int(mul(inside, set1(1.44269504f)));
  const F count = to_float(n);
  F r = fma(count, set1(-0.693145752f), inside);
  r = fma(count, set1(-1.42860682e-6f), r);
  F p = set1(1.98412698e-4f);
  p = fma(p, r, set1(1.38888889e-3f));
  p = fma(p, r, set1(8.33333333e-3f));
  p = fma(p, r, set1(4.16666667e-2f));
  p = fma(p, r, set1(1.66666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, mul(r, r), r);
  p = add(p, set1(1.0f));
  const I half = halve(n);
  p = mul(mul(p, exponent(half)), exponent(isub(n, half)));
  p = if_less(x, low, zero(), p);
  return if_less(high, x, set1(INFINITY), p);
}

INLINE float exp_of(float x) {
  float all[LANES];
  store(all, exp_of(set1(x)));
  return all[0];
}

}  // namespace
