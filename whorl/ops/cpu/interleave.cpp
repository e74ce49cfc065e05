// Rows of GGUF's blocks, interleaved in panels as the kernels read them.
#include <cstring>

#include "kernels.h"
#include "work.h"

using namespace whorl;

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
