// Linear layers on the matrix unit: x [rows, in] times a weight [out, in] that lies in the unit's layout.
//
//      x: tiles of 16 rows        weight: tiles [out / 16][in / STEP] of 1 KiB
//      +--------+             +--------------------------------+
//      | 64 B   |      x      | 16 outputs, 4 (2) inputs of each side by side, 16 such rows |  -> 16 x 16, summed
//      +--------+             +--------------------------------+
//
// 8 bits: int8 by int8, summed in int32, exact; one scale an output and one a row. 16 bits: bfloat16, summed in float32.
// A weight is read from memory once for each 512 rows, in the order in which it lies there.

#pragma once

#include "amx_attention.h"

namespace {

constexpr int64_t TILE_BYTES = 1024;
constexpr int64_t ROW_BLOCK = 512;

struct Product {
  const uint8_t* weight;  // packed
  const float* scale;     // [out], 8 bits only
  const float* bias;      // [out] or null
  int64_t in, out;
  int64_t eight;
  int64_t steps() const { return in / (eight ? 64 : 32); }
};

// What becomes of a row's 32 results side by side, or (SINGLE) of 16.
struct ToBfloat16 {
  static constexpr bool SINGLE = true;
  uint16_t* y;
  int64_t width;
  void operator()(int64_t row, int64_t column, __m512 v, __m512 beside) const {
    _mm512_storeu_si512(y + row * width + column, (__m512i)_mm512_cvtne2ps_pbh(beside, v));
  }
  void operator()(int64_t row, int64_t column, __m512 v) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + row * width + column), (__m256i)_mm512_cvtneps_pbh(v));
  }
};

// SwiGLU (Shazeer 2020): x * sigmoid(x) * y. The reciprocal to 2^-14: what becomes of it is rounded more coarsely.
inline __m512 gated(__m512 x, __m512 y) {
  // The smaller operand comes second where one is NaN: `min(most, NaN)` is NaN.
  const __m512 power = exp2_of(_mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps(x, _mm512_set1_ps(-LOG2E))));
  return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), power))), y);
}

// 16 outputs of the gate and 16 of what it lets through stand side by side.
struct GateToBfloat16 {
  static constexpr bool SINGLE = false;
  uint16_t* y;
  int64_t width;  // half the product's outputs
  void operator()(int64_t row, int64_t column, __m512 v, __m512 beside) const {
    ToBfloat16{y, width}(row, column / 2, gated(v, beside));
  }
};

struct AddToFloat32 {
  static constexpr bool SINGLE = true;
  float* y;
  int64_t width;
  void operator()(int64_t row, int64_t column, __m512 v) const {
    float* at = y + row * width + column;
    _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), v));
  }
  void operator()(int64_t row, int64_t column, __m512 v, __m512 beside) const {
    (*this)(row, column, v);
    (*this)(row, column + TILE, beside);
  }
};

struct ToFloat32 {
  static constexpr bool SINGLE = true;
  float* y;
  int64_t width;
  void operator()(int64_t row, int64_t column, __m512 v) const { _mm512_storeu_ps(y + row * width + column, v); }
  void operator()(int64_t row, int64_t column, __m512 v, __m512 beside) const {
    (*this)(row, column, v);
    (*this)(row, column + TILE, beside);
  }
};

// What turns the sums of 16 outputs into results.
template <bool EIGHT>
struct Outputs {
  __m512 scale, bias;
  Outputs(const Product& p, int64_t column)
      : scale(EIGHT ? _mm512_loadu_ps(p.scale + column) : _mm512_set1_ps(1.0f)),
        bias(p.bias ? _mm512_loadu_ps(p.bias + column) : _mm512_setzero_ps()) {}
  __m512 of(const int32_t* sums, float row_scale) const {
    const __m512i raw = _mm512_load_si512(sums);
    if (!EIGHT) return _mm512_add_ps(_mm512_castsi512_ps(raw), bias);
    return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(raw), scale), _mm512_set1_ps(row_scale), bias);
  }
};

// Sums of a tile, and (if not null) of the one beside it, for `rows` rows from `row` on.
template <bool EIGHT, class Out>
inline void give(const Product& p, const int32_t* sums, const int32_t* beside, int64_t row, int64_t rows, int64_t column,
                 const float* row_scale, const Out& out) {
  const Outputs<EIGHT> left(p, column), right(p, beside ? column + TILE : column);
  for (int i = 0; i < rows; ++i) {
    const float by = EIGHT ? row_scale[row + i] : 1.0f;
    if (beside)
      out(row + i, column, left.of(sums + i * TILE, by), right.of(beside + i * TILE, by));
    else if constexpr (Out::SINGLE)
      out(row + i, column, left.of(sums + i * TILE, by));
  }
}

// Tile numbers have to be constants: macros, not functions.
#define COREAD_MULTIPLY(sum, a, b)  \
  do {                              \
    if (EIGHT)                      \
      _tile_dpbssd(sum, a, b);      \
    else                            \
      _tile_dpbf16ps(sum, a, b);    \
  } while (0)

// Weight tiles of one unit of work: three columns of tiles side by side where few rows ask (reading the weight is all
// that takes time), two columns by 512 rows where many do.
constexpr int64_t FEW_COLUMNS = 6, MANY_COLUMNS = 4;

// `block`: rows for which a weight is read once, a multiple of 32.
inline int64_t units_of(const Product& p, int64_t rows, int64_t block) {
  const int64_t tiles = p.out / TILE;
  if (rows <= TILE) return (tiles + FEW_COLUMNS - 1) / FEW_COLUMNS;
  return (tiles + MANY_COLUMNS - 1) / MANY_COLUMNS * ((rows + block - 1) / block);
}

// At most 16 rows by the tile columns `first .. last - 1`.
template <bool EIGHT, class Out>
inline void multiply_few(const Product& p, const uint8_t* x, int64_t rows, const float* row_scale, const Out& out,
                         int64_t first, int64_t last) {
  const int64_t steps = p.steps(), panel = steps * TILE_BYTES;
  alignas(64) int32_t sums[3][TILE * TILE];
  for (int64_t column = first; column < last; column += 3) {
    const int64_t count = last - column < 3 ? last - column : 3;
    const uint8_t* w = p.weight + column * panel;
    if (count == 3) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      for (int64_t s = 0; s < steps; ++s) {
        const uint8_t* b = w + s * TILE_BYTES;
        for (int line = 0; line < 16; ++line) {
          const char* ahead = reinterpret_cast<const char*>(b + 3 * panel + line * 64);
          _mm_prefetch(ahead, _MM_HINT_T0);
          _mm_prefetch(ahead + panel, _MM_HINT_T0);
          _mm_prefetch(ahead + 2 * panel, _MM_HINT_T0);
        }
        _tile_loadd(4, x + s * TILE_BYTES, 64);
        _tile_loadd(5, b, 64);
        _tile_loadd(6, b + panel, 64);
        _tile_loadd(7, b + 2 * panel, 64);
        COREAD_MULTIPLY(0, 4, 5);
        COREAD_MULTIPLY(1, 4, 6);
        COREAD_MULTIPLY(2, 4, 7);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
    } else {
      for (int64_t c = 0; c < count; ++c) {
        _tile_zero(0);
        for (int64_t s = 0; s < steps; ++s) {
          _tile_loadd(4, x + s * TILE_BYTES, 64);
          _tile_loadd(5, w + c * panel + s * TILE_BYTES, 64);
          COREAD_MULTIPLY(0, 4, 5);
        }
        _tile_stored(0, sums[c], 64);
      }
    }
    for (int64_t c = 0; c < count; ++c) give<EIGHT>(p, sums[c], nullptr, 0, rows, (column + c) * TILE, row_scale, out);
  }
}

// Rows `top .. bottom - 1` by the tile columns `first .. last - 1`.
template <bool EIGHT, class Out>
inline void multiply_many(const Product& p, const uint8_t* x, const float* row_scale, const Out& out, int64_t top,
                          int64_t bottom, int64_t first, int64_t last) {
  const int64_t steps = p.steps(), panel = steps * TILE_BYTES;
  alignas(64) int32_t sums[4][TILE * TILE];
  for (int64_t column = first; column < last; column += 2) {
    const bool wide = column + 1 < last;
    const uint8_t *w0 = p.weight + column * panel, *w1 = wide ? w0 + panel : w0;
    // The weights of the next two columns come while these are at work, some lines with each step.
    const int64_t turns = (bottom - top + 2 * TILE - 1) / (2 * TILE), lines = (2 * TILE + turns - 1) / turns;
    const char* ahead = reinterpret_cast<const char*>(w0 + 2 * panel);
    for (int64_t row = top; row < bottom; row += 2 * TILE) {
      const bool tall = row + TILE < bottom;
      const uint8_t *x0 = x + row / TILE * panel, *x1 = tall ? x0 + panel : x0;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t s = 0; s < steps; ++s) {
        for (int64_t line = 0; line < lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        _tile_loadd(4, x0 + s * TILE_BYTES, 64);
        _tile_loadd(6, w0 + s * TILE_BYTES, 64);
        COREAD_MULTIPLY(0, 4, 6);
        _tile_loadd(7, w1 + s * TILE_BYTES, 64);
        COREAD_MULTIPLY(1, 4, 7);
        _tile_loadd(5, x1 + s * TILE_BYTES, 64);
        COREAD_MULTIPLY(2, 5, 6);
        COREAD_MULTIPLY(3, 5, 7);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      for (int i = 0; i < (tall ? 2 : 1); ++i) {
        const int64_t at = row + i * TILE, count = bottom - at < TILE ? bottom - at : TILE;
        give<EIGHT>(p, sums[2 * i], wide ? sums[2 * i + 1] : nullptr, at, count, column * TILE, row_scale, out);
      }
    }
  }
}
#undef COREAD_MULTIPLY

template <bool EIGHT, class Out>
inline void multiply_as(const Product& p, const uint8_t* x, int64_t rows, const float* row_scale, const Out& out,
                        int64_t unit, int64_t block) {
  const int64_t tiles = p.out / TILE;
  if (rows <= TILE)
    return multiply_few<EIGHT>(p, x, rows, row_scale, out, unit * FEW_COLUMNS, std::min((unit + 1) * FEW_COLUMNS, tiles));
  const int64_t across = (tiles + MANY_COLUMNS - 1) / MANY_COLUMNS;
  const int64_t first = unit % across * MANY_COLUMNS, top = unit / across * block;
  multiply_many<EIGHT>(p, x, row_scale, out, top, std::min(top + block, rows), first, std::min(first + MANY_COLUMNS, tiles));
}

// One of `units_of(p, rows, block)` units, on a thread with tiles in use. `x`: rows of `p.in` int8 or bfloat16 in tiles
// [row / 16][step] of 1 KiB, readable up to the next multiple of 32 rows.
template <class Out>
inline void multiply(const Product& p, const uint8_t* x, int64_t rows, const float* row_scale, const Out& out,
                     int64_t unit, int64_t block) {
  stored();
  if (p.eight)
    multiply_as<true>(p, x, rows, row_scale, out, unit, block);
  else
    multiply_as<false>(p, x, rows, row_scale, out, unit, block);
}

// A weight [out, in] without gaps, int8 (`item` 1) or bfloat16 (2), into tiles.
inline void pack_weight(const uint8_t* weight, int64_t out, int64_t in, int item, uint8_t* packed) {
  const int64_t step = 64 / item, each = 4 / item, steps = in / step;  // inputs of a tile; of 32 bits
  for (int64_t a = 0; a < out / TILE; ++a)
    for (int64_t b = 0; b < steps; ++b) {
      uint8_t* tile = packed + (a * steps + b) * TILE_BYTES;
      for (int r = 0; r < TILE; ++r)
        for (int c = 0; c < TILE; ++c)
          std::memcpy(tile + r * 64 + c * 4, weight + ((a * TILE + c) * in + b * step + r * each) * item, 4);
    }
}

}  // namespace
