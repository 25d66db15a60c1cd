// Attention of query rows over stored keys, in bfloat16, on the matrix unit of x86 CPUs (Intel AMX, "Intel 64 and IA-32
// Architectures Software Developer's Manual", volume 1, chapter 18).
//
// One pass of attention: the queries of all readers and of all heads of a KV head's group are the rows; K and V lie in
// the pool. Everything is computed with rows and columns swapped, so that a vector holds one key's scores of 16 rows: the
// running softmax (Milakov & Gimelshein 2018) then goes down the keys, a row a lane, and nothing is summed across lanes.
//
//     keys (256 a block)     rows (16 a tile)
//      +--------+             +--------+
//      | K, row |      x      | Q, its |   ->  scores, float32: 16 keys x 16 rows a tile
//      | by row |             | pairs  |                |  softmax, down the keys
//      +--------+             +--------+                v
//     V, rows and columns     weights, bfloat16: two keys of a row side by side
//      +--------+             +--------+
//      | dims   |      x      | pairs  |   ->  output, float32: 16 dimensions x 16 rows a tile
//      +--------+             +--------+
//
// Products are of bfloat16 and summed in float32. A weight is rounded twice, its logarithm to 1/128 of a power of two and
// then itself to bfloat16: at most 0.66 %, and what is summed are the rounded ones.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int TILE = 16;           // rows of a tile, and 32-bit columns of a tile
constexpr int ITEMS = TILE * TILE;  // of 32 bits, of a tile
constexpr int BLOCK = 256;      // keys of a round
constexpr int LOOK = 64;        // keys whose scores are looked at together: stores then stay within the first cache
constexpr int ASKED = 16;       // tiles of rows that are asked in a round
constexpr int MAX_DIM = 256;
constexpr float SLACK = 8.0f;  // powers of two by which a score may be above what is taken for the largest
constexpr float HIDDEN = -1e30f;  // finite: no `inf - inf`
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// The compiler does not know what a tile load reads: stores before this come before it.
inline void stored() { __asm__ volatile("" ::: "memory"); }

// Eight tiles of 16 rows of 64 bytes, for the calling thread, until `_tile_release`.
inline void use_tiles() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = TILE;
  stored();
  _tile_loadconfig(&config);
}

// Rows and columns of 16 x 16 32-bit items swapped.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Rows of K or V of one KV head in the pool: one after another from `first` on, or row `j` at slot `slots[j]`.
struct Stored {
  const uint16_t* first;
  const int64_t* slots;
  int dim;
  const uint16_t* at(int64_t j) const { return first + (slots ? slots[j] : j) * dim; }
};

// Query rows (`count` of 16; the others are zero) as tiles [dim / 32] of 16 pairs of dimensions x 16 rows.
inline void pack_query(const uint16_t* query, int64_t count, int dim, uint16_t* packed) {
  for (int step = 0; step < dim / 32; ++step) {
    __m512i r[16];
    for (int i = 0; i < TILE; ++i)
      r[i] = i < count ? _mm512_loadu_si512(query + i * dim + step * 32) : _mm512_setzero_si512();
    transpose(r);
    for (int i = 0; i < TILE; ++i) _mm512_store_si512(packed + step * 2 * ITEMS + i * 32, r[i]);
  }
}

// K of `count` keys as rows one after another, readable up to the next multiple of 32; there zeros. Where they lie in
// the pool like that they are taken from there.
inline const uint16_t* rows_of(const Stored& key, int64_t start, int count, uint16_t* copied) {
  if (key.slots == nullptr && count % 32 == 0) return key.first + start * key.dim;
  for (int j = 0; j < count; ++j) std::memcpy(copied + j * key.dim, key.at(start + j), 2 * key.dim);
  std::memset(copied + count * key.dim, 0, (count + 31) / 32 * 32 * 2 * key.dim - count * 2 * key.dim);
  return copied;
}

// V of `count` keys as tiles [dim / 32][key / 32][2] of 16 dimensions x 32 keys; keys beyond `count` are zero.
inline void pack_values(const Stored& value, int64_t start, int count, uint16_t* packed) {
  for (int d = 0; d < value.dim; d += 32)
    for (int first = 0; first < count; first += 32) {
      __m512i low[16], high[16];  // pairs of keys; of each 8 dimensions the first, and the last, 4
      for (int pair = 0; pair < TILE; ++pair) {
        const int a = first + 2 * pair;
        const __m512i x = a < count ? _mm512_loadu_si512(value.at(start + a) + d) : _mm512_setzero_si512();
        const __m512i y = a + 1 < count ? _mm512_loadu_si512(value.at(start + a + 1) + d) : _mm512_setzero_si512();
        low[pair] = _mm512_unpacklo_epi16(x, y);
        high[pair] = _mm512_unpackhi_epi16(x, y);
      }
      transpose(low);
      transpose(high);
      uint16_t* tiles = packed + (int64_t(d / 32) * (BLOCK / 32) + first / 32) * 2 * (2 * ITEMS);
      for (int i = 0; i < TILE; ++i) {
        uint16_t* to = tiles + (i / 4 * 8 + i % 4) * 32;  // two tiles of 16 lines: dimension 0 .. 31
        _mm512_store_si512(to, low[i]);
        _mm512_store_si512(to + 4 * 32, high[i]);
      }
    }
}

// 2^x for x <= 126, to 1e-7; NaN stays NaN.
inline __m512 exp2_of(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.340043217e-3f);  // Chebyshev fit over [-0.5, 0.5]
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.676037098e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550327214e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402210736e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931472067e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.000000075e+0f));
  return _mm512_scalef_ps(p, whole);
}

constexpr int SCORES = TILE * LOOK, WEIGHTS = TILE * BLOCK;  // of a tile of rows, in `Scratch`

// Scores [TILES][count][16] of one tile of query rows or two; `count` keys, a multiple of 32, at most `LOOK`.
template <int TILES>
inline void scores_of(const uint16_t* query, const uint16_t* key, int count, int dim, float* score) {
  const int steps = dim / 32;
  const uint16_t* beside = query + TILE * dim;  // the second tile of rows
  stored();
  if (steps == 2) {  // the queries stay in the unit
    _tile_loadd(2, query, 64);
    _tile_loadd(3, query + 2 * ITEMS, 64);
    if (TILES == 2) _tile_loadd(4, beside, 64);
    if (TILES == 2) _tile_loadd(5, beside + 2 * ITEMS, 64);
    for (int j = 0; j < count; j += TILE, key += TILE * dim, score += ITEMS) {
      _tile_zero(0);
      if (TILES == 2) _tile_zero(1);
      _tile_loadd(6, key, 128);
      _tile_loadd(7, key + 32, 128);
      _tile_dpbf16ps(0, 6, 2);
      if (TILES == 2) _tile_dpbf16ps(1, 6, 4);
      _tile_dpbf16ps(0, 7, 3);
      if (TILES == 2) _tile_dpbf16ps(1, 7, 5);
      _tile_stored(0, score, 64);
      if (TILES == 2) _tile_stored(1, score + SCORES, 64);
    }
    return;
  }
  for (int j = 0; j < count; j += 32, key += 32 * dim, score += 2 * ITEMS) {
    _tile_zero(0);
    _tile_zero(1);
    if (TILES == 2) _tile_zero(2);
    if (TILES == 2) _tile_zero(3);
    for (int step = 0; step < steps; ++step) {
      _tile_loadd(4, key + step * 32, dim * 2);
      _tile_loadd(5, key + TILE * dim + step * 32, dim * 2);
      _tile_loadd(6, query + step * 2 * ITEMS, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if (TILES == 2) {
        _tile_loadd(7, beside + step * 2 * ITEMS, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, score, 64);
    _tile_stored(1, score + ITEMS, 64);
    if (TILES == 2) _tile_stored(2, score + SCORES, 64);
    if (TILES == 2) _tile_stored(3, score + SCORES + ITEMS, 64);
  }
}

// out[TILES][dim][16] += values x weights[TILES][key / 2][16][2] of the keys `from .. to - 1`, multiples of 32.
template <int TILES>
inline void add_values(const uint16_t* weight, const uint16_t* value, int from, int to, int dim, float* out) {
  if (from == to) return;
  stored();
  for (int d = 0; d < dim; d += 32, value += BLOCK * 32, out += 2 * ITEMS) {
    float* beside = out + TILE * dim;
    _tile_loadd(0, out, 64);
    _tile_loadd(1, out + ITEMS, 64);
    if (TILES == 2) _tile_loadd(2, beside, 64);
    if (TILES == 2) _tile_loadd(3, beside + ITEMS, 64);
    for (int j = from; j < to; j += 32) {
      const uint16_t *tiles = value + j * 32, *pairs = weight + j * TILE;
      _tile_loadd(4, tiles, 64);
      _tile_loadd(6, pairs, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, tiles + 2 * ITEMS, 64);
      _tile_dpbf16ps(1, 5, 6);
      if (TILES == 2) {
        _tile_loadd(7, pairs + WEIGHTS, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + ITEMS, 64);
    if (TILES == 2) _tile_stored(2, beside, 64);
    if (TILES == 2) _tile_stored(3, beside + ITEMS, 64);
  }
}

// Which of the keys that are looked at 16 rows see: row `i` the first `each[i]`, every row the first `all`, none more
// than `any`.
struct Seen {
  __m512i each;
  int all, any;
  __mmask16 of(int key) const { return _mm512_cmpgt_epi32_mask(each, _mm512_set1_epi32(key)); }
};

// 2^x in bfloat16 comes out of bfloat16's own form: exponent and fraction of the number x + 127, in steps of 1/128, are
// its bits but for the bend of 2^f over a fraction f. This is by how many 1/128 that lies below 1 + f; exact, since there
// are 128 fractions.
struct Bend {
  alignas(64) uint8_t below[128];
  Bend() {
    for (int i = 0; i < 128; ++i) below[i] = uint8_t(i - int(__builtin_lrint((__builtin_exp2(i / 128.0) - 1.0) * 128.0)));
  }
};
const Bend BEND;

// The running softmax of 16 rows. What counts as a row's largest score, `top`, in powers of two, may lie `SLACK` below
// it: then what was summed need not shrink for every new record. The sum is that of the rounded weights, so that what
// rounding adds to one key is taken from the others.
struct Softmax {
  alignas(64) float top[TILE], total[TILE];

  void begin() {
    for (int i = 0; i < TILE; ++i) top[i] = HIDDEN, total[i] = 0.0f;
  }

  // Looks at the scores that come next. True where what was summed has to shrink, by `kept`, before `weigh`.
  bool rises(const float* score, const Seen& seen, __m512 factor, __m512& kept) {
    const auto of = [score](int key) { return _mm512_load_ps(score + key * TILE); };
    __m512 largest[4];
    for (auto& x : largest) x = _mm512_set1_ps(HIDDEN);
    __mmask16 broken = 0;  // rows that see a NaN: their weights would hide it
    int j = 0;
    for (; j + 4 <= seen.all; j += 4) {
      for (int i = 0; i < 4; ++i) largest[i] = _mm512_max_ps(largest[i], of(j + i));
      for (int i = 0; i < 4; i += 2) broken |= _mm512_cmp_ps_mask(of(j + i), of(j + i + 1), _CMP_UNORD_Q);
    }
    for (; j < seen.any; ++j) {
      largest[0] = _mm512_mask_max_ps(largest[0], seen.of(j), largest[0], of(j));
      broken |= _mm512_mask_cmp_ps_mask(seen.of(j), of(j), of(j), _CMP_UNORD_Q);
    }
    if (broken)
      _mm512_store_ps(total, _mm512_mask_mov_ps(_mm512_load_ps(total), broken, _mm512_set1_ps(__builtin_nanf(""))));
    const __m512 most = _mm512_mul_ps(
        factor, _mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3])));
    const __m512 old = _mm512_load_ps(top);
    // Each row for itself: what another row of the tile asks must not move a bit of its answer.
    const __mmask16 up = _mm512_cmp_ps_mask(most, _mm512_add_ps(old, _mm512_set1_ps(SLACK)), _CMP_GT_OQ);
    if (!up) return false;
    const __m512 now = _mm512_mask_mov_ps(old, up, most);
    kept = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), up, exp2_of(_mm512_sub_ps(old, now)));
    _mm512_store_ps(top, now);
    _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), kept));
    return true;
  }

  // Weights of `count` keys, an even number, two of a row side by side; those of keys that are not seen are 0.
  void weigh(const float* score, const Seen& seen, int count, __m512 factor, uint16_t* weight) {
    const __m512 by = _mm512_mul_ps(factor, _mm512_set1_ps(128.0f));
    const __m512 plus = _mm512_fnmadd_ps(_mm512_load_ps(top), _mm512_set1_ps(128.0f), _mm512_set1_ps(127.0f * 128.0f));
    const __m512i below[2] = {_mm512_load_si512(BEND.below), _mm512_load_si512(BEND.below + 64)};
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    const auto straight = [&](int key) {
      const __m512 x = _mm512_fmadd_ps(_mm512_load_ps(score + key * TILE), by, plus);
      return _mm512_max_epi32(_mm512_cvtps_epi32(x), _mm512_setzero_si512());
    };
    __m512 sum[2] = {_mm512_load_ps(total), _mm512_setzero_ps()};
    const auto store = [&](int key, __m512i first, __m512i second, __m512& into) {
      const __m512i both = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
      const __m512i bend = _mm512_maskz_permutex2var_epi8(0x5555555555555555, below[0], both, below[1]);
      const __m512i weights = _mm512_sub_epi16(both, bend);
      into = _mm512_dpbf16_ps(into, (__m512bh)weights, ones);
      _mm512_store_si512(weight + key * TILE, weights);
    };
    int j = 0;
    for (; j + 4 <= seen.all; j += 4) {
      store(j, straight(j), straight(j + 1), sum[0]);
      store(j + 2, straight(j + 2), straight(j + 3), sum[1]);
    }
    for (; j < seen.any; j += 2)
      store(j, _mm512_maskz_mov_epi32(seen.of(j), straight(j)), _mm512_maskz_mov_epi32(seen.of(j + 1), straight(j + 1)),
            sum[0]);
    for (; j < count; j += 2) _mm512_store_si512(weight + j * TILE, _mm512_setzero_si512());
    _mm512_store_ps(total, _mm512_add_ps(sum[0], sum[1]));
  }
};

// One pass for one KV head. `causal`: row r sees the keys 0 .. base + r / group.
struct Pass {
  const uint16_t* query;  // [rows, dim]
  Stored key, value;
  int64_t rows, keys, base;
  int dim, group, causal;
  float scale2;  // of the scores, in powers of two; positive
  float *lse, *out;  // [rows], [rows, dim]
};

struct Scratch {  // of one thread
  alignas(64) uint16_t key[BLOCK * MAX_DIM];           // [key][dim]
  alignas(64) uint16_t value[BLOCK * MAX_DIM];         // tiles [dim / 32][key / 32][2]: 16 dimensions x 32 keys
  alignas(64) uint16_t query[ASKED * TILE * MAX_DIM];  // tiles [row / 16][dim / 32]: 16 pairs of dimensions x 16 rows
  alignas(64) float score[2 * TILE * LOOK];            // [row / 16][key][row % 16]
  alignas(64) uint16_t weight[2 * TILE * BLOCK];       // [row / 16][key / 2][row % 16][2]
  alignas(64) float out[ASKED * TILE * MAX_DIM];       // [row / 16][dim][row % 16]
  Softmax softmax[ASKED];
};

// One round, `keys` keys from `start` on, of which `key` are the rows and `s.value` the values, for the rows from `row`
// on (none after `last_row` counts): the tiles `t` and, with TILES 2, `t + 1` of `s`.
template <int TILES>
inline void ask(const Pass& c, int64_t row, int64_t last_row, int64_t start, int keys, const uint16_t* key, int t,
                Scratch& s) {
  const __m512 factor = _mm512_set1_ps(c.scale2);
  const int line = TILE * c.dim;
  const auto sees = [&](int64_t r) {  // how many of the round's keys
    return c.causal ? int(std::clamp<int64_t>(c.base + std::min(r, last_row) / c.group + 1 - start, 0, keys)) : keys;
  };
  const int padded = (sees(row + TILES * TILE - 1) + 31) / 32 * 32;
  float* out = s.out + t * line;
  int added = 0;  // of the keys from 0 on: their values are in `out`
  for (int from = 0; from < padded; from += LOOK) {
    const int count = std::min(padded - from, LOOK);
    scores_of<TILES>(s.query + t * line, key + from * c.dim, count, c.dim, s.score);
    Seen seen[TILES];
    bool rises[TILES];
    __m512 kept[TILES];
    for (int i = 0; i < TILES; ++i) {
      alignas(64) int each[TILE];
      for (int r = 0; r < TILE; r += c.causal ? 1 : TILE - 1) each[r] = std::clamp(sees(row + i * TILE + r) - from, 0, count);
      seen[i].all = each[0], seen[i].any = each[TILE - 1];
      seen[i].each = seen[i].all < seen[i].any ? _mm512_load_si512(each) : _mm512_set1_epi32(seen[i].all);
      rises[i] = s.softmax[t + i].rises(s.score + i * SCORES, seen[i], factor, kept[i]);
    }
    if (rises[0] || rises[TILES - 1]) {
      add_values<TILES>(s.weight, s.value, added, from, c.dim, out);
      added = from;
      for (int i = 0; i < TILES; ++i)
        if (rises[i])
          for (float* o = out + i * line; o < out + (i + 1) * line; o += TILE)
            _mm512_store_ps(o, _mm512_mul_ps(kept[i], _mm512_load_ps(o)));
    }
    for (int i = 0; i < TILES; ++i)
      s.softmax[t + i].weigh(s.score + i * SCORES, seen[i], count, factor, s.weight + i * WEIGHTS + from * TILE);
  }
  add_values<TILES>(s.weight, s.value, added, padded, c.dim, out);
}

// Some of a pass's rows: the tiles `first .. first + count - 1`, at most `ASKED` of them.
inline void attend_some(const Pass& c, int64_t first, int count, Scratch& s) {
  const int64_t top_row = first * TILE, last_row = std::min(c.rows, (first + count) * TILE) - 1;
  const int line = TILE * c.dim;  // items of a tile of rows, packed
  for (int t = 0; t < count; ++t)
    pack_query(c.query + (first + t) * line, std::min<int64_t>(c.rows - (first + t) * TILE, TILE), c.dim, s.query + t * line);
  std::memset(s.out, 0, sizeof(float) * count * line);
  for (int t = 0; t < count; ++t) s.softmax[t].begin();
  const int64_t limit = c.causal ? std::min(c.keys, c.base + last_row / c.group + 1) : c.keys;
  for (int64_t start = 0; start < limit; start += BLOCK) {
    const int keys = int(std::min<int64_t>(limit - start, BLOCK));
    const uint16_t* key = rows_of(c.key, start, keys, s.key);
    pack_values(c.value, start, keys, s.value);
    for (int t = 0; t < count; t += 2) {
      const int64_t row = top_row + t * TILE;
      t + 1 < count ? ask<2>(c, row, last_row, start, keys, key, t, s)
                    : ask<1>(c, row, last_row, start, keys, key, t, s);
    }
  }
  for (int t = 0; t < count; ++t) {
    const int64_t row = top_row + t * TILE;
    const int rows = int(std::min<int64_t>(last_row + 1 - row, TILE));
    const __m512 by = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(s.softmax[t].total));
    for (int d = 0; d < c.dim; d += TILE) {
      __m512i r[16];
      for (int i = 0; i < TILE; ++i)
        r[i] = _mm512_castps_si512(_mm512_mul_ps(by, _mm512_load_ps(s.out + t * line + (d + i) * TILE)));
      transpose(r);
      for (int i = 0; i < rows; ++i) _mm512_storeu_si512(c.out + (row + i) * c.dim + d, r[i]);
    }
    for (int i = 0; i < rows; ++i) c.lse[row + i] = s.softmax[t].top[i] * LN2 + __builtin_logf(s.softmax[t].total[i]);
  }
}

// The rows of tiles `first_tile .. last_tile - 1`.
inline void attend(const Pass& c, int64_t first_tile, int64_t last_tile, Scratch& s) {
  for (int64_t tile = first_tile; tile < last_tile; tile += ASKED)
    attend_some(c, tile, int(std::min<int64_t>(last_tile - tile, ASKED)), s);
}

}  // namespace
