// Attention of query rows over stored keys, in bfloat16, on the matrix unit of x86 CPUs (Intel AMX, "Intel 64 and IA-32
// Architectures Software Developer's Manual", volume 1, chapter 18).
//
// One pass of attention: the queries of all readers and of all heads of a KV head's group are the rows; K and V lie in
// the pool. Per KV head and block of keys, K and V are brought into the unit's layout once and serve every row:
//
//        rows (16 a tile)          keys (256 a block)
//      +--------+             +-----+-----+-- ... --+
//      | Q tile |      x      |  K of the block, pairs of dimensions side by side |   ->  scores, float32
//      +--------+             +-----+-----+-- ... --+
//      running softmax over the block (Milakov & Gimelshein 2018), weights rounded to bfloat16
//      +--------+             +-----------------------+
//      | weights|      x      |  V, pairs of keys side by side                     |   ->  output, float32
//      +--------+             +-----------------------+
//
// The same rounding as torch's fused attention: bfloat16 products summed in float32, weights in bfloat16.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int TILE = 16;       // rows of a tile, and 32-bit columns of a tile
constexpr int PAIR = 2 * TILE;  // rows that are asked together: a tile of K or V is then read half as often
constexpr int BLOCK = 256;     // keys of a round
constexpr int MAX_DIM = 256;
constexpr float HIDDEN = -1e30f;  // finite: no `inf - inf`
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Eight tiles of 16 rows of 64 bytes, for the calling thread, until `_tile_release`.
inline void use_tiles() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = TILE;
  _tile_loadconfig(&config);
}

struct Scratch {  // of one thread
  alignas(64) uint16_t key[BLOCK * MAX_DIM];
  alignas(64) uint16_t value[BLOCK * MAX_DIM];
  alignas(64) float score[PAIR * BLOCK];
  alignas(64) uint16_t weight[PAIR * BLOCK];
  alignas(64) uint16_t query[PAIR * MAX_DIM];
  alignas(64) float out[PAIR * MAX_DIM];
};

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

// K of `count` keys as tiles [key / 16][dim / 32] of 16 x 64 bytes; keys beyond `count` are zero.
inline void pack_keys(const Stored& key, int64_t start, int count, uint16_t* packed) {
  const int steps = key.dim / 32;
  for (int first = 0; first < count; first += TILE)
    for (int step = 0; step < steps; ++step) {
      __m512i r[16];
      for (int j = 0; j < TILE; ++j)
        r[j] = first + j < count ? _mm512_loadu_si512(key.at(start + first + j) + step * 32) : _mm512_setzero_si512();
      transpose(r);
      uint16_t* tile = packed + (int64_t(first / TILE) * steps + step) * (TILE * 32);
      for (int j = 0; j < TILE; ++j) _mm512_store_si512(tile + j * 32, r[j]);
    }
}

// V of `count` keys as tiles [key / 32][dim / 16] of 16 x 64 bytes; keys beyond `count` are zero.
inline void pack_values(const Stored& value, int64_t start, int count, uint16_t* packed) {
  alignas(64) uint16_t low[32], high[32];
  for (int j = 0; j < 16; ++j) {
    low[2 * j] = uint16_t(j), low[2 * j + 1] = uint16_t(32 + j);
    high[2 * j] = uint16_t(16 + j), high[2 * j + 1] = uint16_t(48 + j);
  }
  const __m512i take_low = _mm512_load_si512(low), take_high = _mm512_load_si512(high);
  const int columns = value.dim / 16;
  for (int first = 0; first < count; first += 32)
    for (int pair = 0; pair < TILE; ++pair) {
      const int a = first + 2 * pair;
      for (int d = 0; d < value.dim; d += 32) {
        const __m512i x = a < count ? _mm512_loadu_si512(value.at(start + a) + d) : _mm512_setzero_si512();
        const __m512i y = a + 1 < count ? _mm512_loadu_si512(value.at(start + a + 1) + d) : _mm512_setzero_si512();
        uint16_t* tile = packed + (int64_t(first / 32) * columns + d / 16) * (TILE * 32) + pair * 32;
        _mm512_store_si512(tile, _mm512_permutex2var_epi16(x, take_low, y));
        _mm512_store_si512(tile + TILE * 32, _mm512_permutex2var_epi16(x, take_high, y));
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

// 2^x for x <= 0, to 8e-5: weights are rounded to bfloat16, to 2e-3. NaN stays NaN.
inline __m512 weight_of(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // above the next lower integer
  __m512 p = _mm512_set1_ps(7.802436e-2f);  // minimax fit, relative, over [0, 1]
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.2606731e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9583352e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.9992522e-1f));
  return _mm512_scalef_ps(p, x);  // which rounds x down itself
}

// scores[16 TILES][padded] of one query tile or two; `padded` is a multiple of 32.
template <int TILES>
inline void scores_of(const uint16_t* query, const uint16_t* key, int padded, int dim, float* score) {
  const int steps = dim / 32, size = TILE * 32;
  for (int j = 0; j < padded; j += 32) {
    _tile_zero(0);
    _tile_zero(1);
    if (TILES == 2) _tile_zero(2);
    if (TILES == 2) _tile_zero(3);
    const uint16_t* tiles = key + int64_t(j / TILE) * steps * size;
    for (int step = 0; step < steps; ++step) {
      _tile_loadd(4, query + step * 32, dim * 2);
      _tile_loadd(6, tiles + step * size, 64);
      _tile_loadd(7, tiles + (steps + step) * size, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (TILES == 2) {
        _tile_loadd(5, query + TILE * dim + step * 32, dim * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, score + j, BLOCK * 4);
    _tile_stored(1, score + j + TILE, BLOCK * 4);
    if (TILES == 2) _tile_stored(2, score + TILE * BLOCK + j, BLOCK * 4);
    if (TILES == 2) _tile_stored(3, score + TILE * BLOCK + j + TILE, BLOCK * 4);
  }
}

// out[16 TILES][dim] += weights[16 TILES][padded] x values
template <int TILES>
inline void add_values(const uint16_t* weight, const uint16_t* value, int padded, int dim, float* out) {
  const int columns = dim / 16, size = TILE * 32;
  for (int c = 0; c < columns; c += 2) {
    float *left = out + c * 16, *below = left + TILE * dim;
    _tile_loadd(0, left, dim * 4);
    _tile_loadd(1, left + 16, dim * 4);
    if (TILES == 2) _tile_loadd(2, below, dim * 4);
    if (TILES == 2) _tile_loadd(3, below + 16, dim * 4);
    for (int j = 0; j < padded; j += 32) {
      const uint16_t* tiles = value + (int64_t(j / 32) * columns + c) * size;
      _tile_loadd(4, weight + j, BLOCK * 2);
      _tile_loadd(6, tiles, 64);
      _tile_loadd(7, tiles + size, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (TILES == 2) {
        _tile_loadd(5, weight + TILE * BLOCK + j, BLOCK * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, left, dim * 4);
    _tile_stored(1, left + 16, dim * 4);
    if (TILES == 2) _tile_stored(2, below, dim * 4);
    if (TILES == 2) _tile_stored(3, below + 16, dim * 4);
  }
}

// One round of the running softmax for one row: scores become weights. Returns by how much the row's earlier output
// shrinks. `top` (in powers of two) and `total` are the row's state; the first `seen` keys are visible.
inline float weigh(const float* score, int seen, int padded, float scale2, float& top, float& total, uint16_t* weight) {
  const __m512 factor = _mm512_set1_ps(scale2);
  const int whole = seen / 32 * 32;
  const uint32_t rest = (1u << (seen - whole)) - 1;
  const __mmask16 masks[2] = {__mmask16(rest), __mmask16(rest >> 16)};
  __m512 largest[2] = {_mm512_set1_ps(HIDDEN), _mm512_set1_ps(HIDDEN)};
  for (int j = 0; j < whole; j += 32)
    for (int half = 0; half < 2; ++half)
      largest[half] = _mm512_max_ps(largest[half], _mm512_load_ps(score + j + 16 * half));
  if (rest)
    for (int half = 0; half < 2; ++half)
      largest[half] = _mm512_mask_max_ps(largest[half], masks[half], largest[half], _mm512_load_ps(score + whole + 16 * half));
  const float block_top = _mm512_reduce_max_ps(_mm512_max_ps(largest[0], largest[1])) * scale2;
  const float now = block_top > top ? block_top : top;
  const __m512 minus = _mm512_set1_ps(now);
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int j = 0; j < whole; j += 32) {
    __m512 p[2];
    for (int half = 0; half < 2; ++half) {
      p[half] = weight_of(_mm512_fmsub_ps(_mm512_load_ps(score + j + 16 * half), factor, minus));
      sum[half] = _mm512_add_ps(sum[half], p[half]);
    }
    _mm512_store_si512(weight + j, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
  }
  if (rest) {
    __m512 p[2];
    for (int half = 0; half < 2; ++half) {
      const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(score + whole + 16 * half), factor, minus);
      p[half] = _mm512_maskz_mov_ps(masks[half], weight_of(x));
      sum[half] = _mm512_add_ps(sum[half], p[half]);
    }
    _mm512_store_si512(weight + whole, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
  }
  for (int j = (seen + 31) / 32 * 32; j < padded; j += 32) _mm512_store_si512(weight + j, _mm512_setzero_si512());
  const float kept = now == top ? 1.0f : _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(top - now)));
  total = total * kept + _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
  top = now;
  return kept;
}

// One pass for one KV head. `causal`: row r sees the keys 0 .. base + r / group.
struct Pass {
  const uint16_t* query;  // [rows, dim]
  Stored key, value;
  int64_t rows, keys, base;
  int dim, group, causal;
  float scale2;  // of the scores, in powers of two
  float *lse, *out;  // [rows], [rows, dim]
};

// The rows of tiles `first_tile .. last_tile - 1`. Returns false where memory is short.
inline bool attend(const Pass& c, int64_t first_tile, int64_t last_tile, Scratch& s) {
  float *out = c.out, *lse = c.lse;  // `lse` holds the largest score until the end
  const int64_t end_row = last_tile * TILE < c.rows ? last_tile * TILE : c.rows;
  float few[4 * TILE];
  const int64_t count_rows = (last_tile - first_tile) * TILE;
  float* total = count_rows <= 4 * TILE ? few : static_cast<float*>(std::malloc(sizeof(float) * count_rows));
  if (total == nullptr) return false;
  for (int64_t r = first_tile * TILE; r < end_row; ++r) {
    lse[r] = HIDDEN, total[r - first_tile * TILE] = 0.0f;
    std::memset(out + r * c.dim, 0, sizeof(float) * c.dim);
  }
  int64_t limit = c.keys;
  if (c.causal && c.base + (end_row - 1) / c.group + 1 < limit) limit = c.base + (end_row - 1) / c.group + 1;
  for (int64_t start = 0; start < limit; start += BLOCK) {
    const int count = int(limit - start < BLOCK ? limit - start : BLOCK);
    pack_keys(c.key, start, count, s.key);
    if ((count + TILE - 1) / TILE % 2)  // the last pair of key tiles is read whole
      std::memset(s.key + int64_t((count + TILE - 1) / TILE) * TILE * c.dim, 0, 2 * TILE * c.dim);
    pack_values(c.value, start, count, s.value);
    for (int64_t tile = first_tile; tile < last_tile; tile += 2) {
      const bool two = tile + 1 < last_tile;
      const int64_t row = tile * TILE;
      const int full = two ? PAIR : TILE, rows = int(c.rows - row < full ? c.rows - row : full);
      int seen_by_last = count;
      if (c.causal) {
        const int64_t seen = c.base + (row + rows - 1) / c.group + 1 - start;
        if (seen <= 0) continue;
        if (seen < count) seen_by_last = int(seen);
      }
      const int padded = (seen_by_last + 31) / 32 * 32;
      const uint16_t* q = c.query + row * c.dim;
      float* o = out + row * c.dim;
      if (rows < full) {  // a row only meets itself: what the tile's other rows hold does not matter
        std::memcpy(s.query, q, sizeof(uint16_t) * rows * c.dim);
        std::memcpy(s.out, o, sizeof(float) * rows * c.dim);
        q = s.query, o = s.out;
      }
      two ? scores_of<2>(q, s.key, padded, c.dim, s.score) : scores_of<1>(q, s.key, padded, c.dim, s.score);
      for (int i = 0; i < rows; ++i) {
        int seen = seen_by_last;
        if (c.causal) {
          const int64_t own = c.base + (row + i) / c.group + 1 - start;
          seen = int(own < 0 ? 0 : own < seen_by_last ? own : seen_by_last);
        }
        const float kept = weigh(s.score + i * BLOCK, seen, padded, c.scale2, lse[row + i],
                                 total[row + i - first_tile * TILE], s.weight + i * BLOCK);
        if (kept != 1.0f) {
          const __m512 by = _mm512_set1_ps(kept);
          for (int d = 0; d < c.dim; d += 16)
            _mm512_storeu_ps(o + i * c.dim + d, _mm512_mul_ps(by, _mm512_loadu_ps(o + i * c.dim + d)));
        }
      }
      two ? add_values<2>(s.weight, s.value, padded, c.dim, o) : add_values<1>(s.weight, s.value, padded, c.dim, o);
      if (rows < full) std::memcpy(out + row * c.dim, s.out, sizeof(float) * rows * c.dim);
    }
  }
  for (int64_t r = first_tile * TILE; r < end_row; ++r) {
    const float sum = total[r - first_tile * TILE], by = 1.0f / sum;
    for (int d = 0; d < c.dim; ++d) out[r * c.dim + d] *= by;
    lse[r] = lse[r] * LN2 + __builtin_logf(sum);
  }
  if (total != few) std::free(total);
  return true;
}

}  // namespace
