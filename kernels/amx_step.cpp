// All decoder layers of one step in one call: see kernels/amx_step.py and engine/matrix_llama.py.
//
//   h ─ norm ─ [q k v] ─ rotate, write pages ─ attend ─ merge ─ [o] ─ + norm ─ [gate up] silu·mul ─ [down] ─ +
//
// `[…]` are products (amx_products.h), `attend` are passes (amx_attention.h): every stretch of the pool is read once for
// all rows that see it, shared document and own tail alike, and a row's partial results are merged by their log-sum-exp
// (Dao et al. 2022). Nothing of Python runs in between, and no thread waits for one that has taken no work (amx_team.h).

#include <new>
#include <vector>

#include "amx_products.h"
#include "amx_team.h"

namespace {

// Mirrored by ctypes structures in kernels/amx_step.py.
struct Layer {
  Product qkv, o, gate_up, down;  // outputs of `gate_up`: 16 of the gate, 16 of what it lets through, in turns
  const float *norm_attention, *norm_mlp;  // [width]
};

struct Model {
  int64_t layers, width, q_heads, kv_heads, head_dim, inner;
  float eps, scale;
  const Layer* layer;
  const float* norm;
  Product head;
};

// Rows of the batch that are asked together, and the passes `first_pass .. first_pass + passes - 1` that serve them.
struct Group {
  int64_t rows, first_pass, passes;
};

struct Keys {  // of one pass
  const int64_t* slots;
  int64_t count, base, causal;
};

struct Batch {
  int64_t tokens;
  float* hidden;           // [tokens, width], in and out
  const float *cos, *sin;  // [tokens, head_dim]
  const int64_t* slots;    // [tokens], -1: written nowhere
  int64_t groups, passes;
  const Group* group;
  const Keys* keys;
  const int64_t* first;     // [tokens + 1]: row t stands in the groups `in_group[first[t] .. first[t + 1])`
  const int64_t* in_group;  // ... there as row `as_row`
  const int64_t* as_row;
  const int64_t* wanted;  // [wanted_count]: rows whose logits are asked for
  int64_t wanted_count;
  float* last;    // [tokens, width]: the normed states before the head
  float* logits;  // [wanted_count, head.out]
};

struct Pool {
  uint16_t* const* key;  // one pointer a layer: [kv_heads, slots, head_dim] bfloat16
  uint16_t* const* value;
  int64_t head_stride;  // elements
};

struct Unit {  // of attention: some rows of one pass for one KV head
  int64_t pass, head, first_tile, last_tile;
};

// Tiles of rows of a unit of attention. Each unit brings its values into the matrix unit's layout: long parts do that less
// often, and short ones leave no thread without work at the end.
constexpr int64_t PART_TILES = 8, LONG_PART_TILES = 16, MANY_TILES = 96;
// Rows of a unit of the operations between two products: where there are many, whole tiles of the next product's input,
// so that two threads do not write the same lines; twice as many where every thread still has some units.
constexpr int64_t FEW_ROWS = 4, MANY_ROWS = 128, UNITS_EACH = 4;
// Up to so many threads a weight is read once for as many rows as there are in most steps; more need more units.
constexpr int FEW_THREADS = 4;

inline float wide(uint16_t bits) {
  uint32_t x = uint32_t(bits) << 16;
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline __m512 wide(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline __m512 wide_at(const uint16_t* p) { return wide(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void narrow_to(uint16_t* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

// Memory handed out piece by piece, each on a cache line; with `base` null only counted.
struct Memory {
  uint8_t* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* at = reinterpret_cast<T*>(base + used);
    used += (count * int64_t(sizeof(T)) + 127) / 64 * 64;
    return at;
  }
};

// Rows on their way into a product: int8 with a scale, or bfloat16.
struct Ready {
  uint8_t* values;
  float* scale;
};

// `row` (n float32, a multiple of 64) as row `t` of a product's input, in tiles [row / 16][64 bytes of it] of 16 rows. A
// NaN or infinity makes the whole scale NaN, so that a broken row stays visible behind its integers.
inline void make_ready(const float* row, int64_t n, const Ready& to, int64_t t, bool eight) {
  const int64_t steps = n * (eight ? 1 : 2) / 64;
  uint8_t* out = to.values + t / TILE * steps * TILE_BYTES + t % TILE * 64;
  if (!eight) {
    for (int64_t s = 0; s < steps; ++s)
      for (int64_t i = 0; i < 32; i += 16)
        narrow_to(reinterpret_cast<uint16_t*>(out + s * TILE_BYTES) + i, _mm512_loadu_ps(row + s * 32 + i));
    return;
  }
  __m512i top = _mm512_setzero_si512();  // magnitudes compare like their bits; NaN and infinity come out on top
  for (int64_t i = 0; i < n; i += 16)
    top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_loadu_si512(row + i), _mm512_set1_epi32(0x7FFFFFFF)));
  const uint32_t bits = _mm512_reduce_max_epu32(top);
  if (bits >= 0x7F800000u) {
    to.scale[t] = __builtin_nanf("");
    for (int64_t s = 0; s < steps; ++s) std::memset(out + s * TILE_BYTES, 0, 64);
    return;
  }
  float largest;
  std::memcpy(&largest, &bits, 4);
  if (largest < 1e-10f) largest = 1e-10f;
  to.scale[t] = largest / 127.0f;
  const __m512 by = _mm512_set1_ps(127.0f / largest);
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t i = 0; i < 64; i += 16)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + s * TILE_BYTES + i),
                       _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + s * 64 + i), by))));
}

// RMSNorm (Zhang & Sennrich 2019).
inline void norm_row(const float* x, const float* weight, int64_t n, float eps, float* y) {
  __m512 square = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    square = _mm512_fmadd_ps(v, v, square);
  }
  const __m512 by = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(square) / float(n) + eps));
  for (int64_t i = 0; i < n; i += 16)
    _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), by), _mm512_loadu_ps(weight + i)));
}

// RoPE (Su et al. 2021) over the whole head.
inline void turn(const uint16_t* x, const float* cos, const float* sin, int64_t dim, uint16_t* y) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __m512 a = wide_at(x + i), b = wide_at(x + half + i);
    narrow_to(y + i, _mm512_fmsub_ps(a, _mm512_loadu_ps(cos + i), _mm512_mul_ps(b, _mm512_loadu_ps(sin + i))));
    narrow_to(y + half + i,
              _mm512_fmadd_ps(b, _mm512_loadu_ps(cos + half + i), _mm512_mul_ps(a, _mm512_loadu_ps(sin + half + i))));
  }
}

class Step {
 public:
  Step(const Model& model, const Batch& batch, const Pool& pool, uint8_t* memory, int threads)
      : m(model), b(batch), pool(pool), threads(threads) {
    Memory space{memory};
    const int64_t padded = (b.tokens + 31) / 32 * 32, attended = m.q_heads * m.head_dim;
    group_size = m.q_heads / m.kv_heads;
    const int64_t widest = std::max(std::max(m.width, attended), m.inner);
    ready.values = space.take<uint8_t>(padded * widest * 2);
    ready.scale = space.take<float>(padded);
    qkv = space.take<uint16_t>(b.tokens * (attended + 2 * m.kv_heads * m.head_dim));
    gate_up = space.take<uint16_t>(few() ? 0 : b.tokens * m.inner);
    few_gate_up = space.take<float>(few() ? b.tokens * 2 * m.inner : 0);
    head_ready.values = space.take<uint8_t>((b.wanted_count + 31) / 32 * 32 * m.width * 2);
    head_ready.scale = space.take<float>(b.wanted_count + 32);
    rows = space.take<float>(int64_t(threads) * (widest + 16));
    row_stride = widest + 16;
    for (int worker = 0; worker < threads; ++worker) scratch.push_back(space.take<Scratch>(1));
    query.resize(b.groups), lse.resize(b.passes), out.resize(b.passes);
    for (int64_t g = 0; g < b.groups; ++g) {
      const int64_t asked = b.group[g].rows * group_size;
      query[g] = space.take<uint16_t>(m.kv_heads * asked * m.head_dim);
      const int64_t tiles = (asked + TILE - 1) / TILE, part_tiles = tiles < MANY_TILES ? PART_TILES : LONG_PART_TILES,
                    parts = (tiles + part_tiles - 1) / part_tiles;
      for (int64_t p = b.group[g].first_pass; p < b.group[g].first_pass + b.group[g].passes; ++p) {
        lse[p] = space.take<float>(m.kv_heads * asked);
        out[p] = space.take<float>(m.kv_heads * asked * m.head_dim);
        group_of.push_back(g);
        for (int64_t part = parts - 1; part >= 0; --part)  // the longest causal parts first
          for (int64_t head = 0; head < m.kv_heads; ++head)
            units.push_back({p, head, tiles * part / parts, tiles * (part + 1) / parts});
      }
    }
    needed = space.used;
  }

  int64_t needed;

  void run() {
    use_tiles();
    {
      Team::Hold team(threads);
      hold = &team;
      for (int64_t layer = 0; layer < m.layers; ++layer) compute(layer);
      finish();
    }
    _tile_release();
  }

 private:
  // Every unit of an operation; `each(unit, worker)` in any order, on any thread.
  template <class Each>
  void all(int64_t units, Each each) {
    hold->run(units, [](void* it, int64_t unit, int worker) { (*static_cast<Each*>(it))(unit, worker); }, &each);
  }

  // The same for rows: `each(t, row)` with scratch memory for one row.
  template <class Each>
  void each_row(int64_t count, Each each) {
    const int64_t some = count < MANY_ROWS ? FEW_ROWS : count < 2 * TILE * UNITS_EACH * threads ? TILE : 2 * TILE;
    all((count + some - 1) / some, [&](int64_t unit, int worker) {
      const int64_t end = std::min((unit + 1) * some, count);
      for (int64_t t = unit * some; t < end; ++t) each(t, rows + worker * row_stride);
    });
  }

  template <class Out>
  void product(const Product& p, const Ready& x, int64_t count, const Out& out) {
    if (count == 0) return;
    const int64_t block = threads > FEW_THREADS ? ROW_BLOCK / 2 : ROW_BLOCK;
    all(units_of(p, count, block), [&](int64_t unit, int) { multiply(p, x.values, count, x.scale, out, unit, block); });
  }

  void compute(int64_t layer) {
    const Layer& l = m.layer[layer];
    norm_all(l.norm_attention, l.qkv.eight);
    product(l.qkv, ready, b.tokens, ToBfloat16{qkv, l.qkv.out});
    each_row(b.tokens, [&](int64_t t, float*) { place(layer, t, l.qkv.out); });
    all(int64_t(units.size()), [&](int64_t unit, int worker) {
      attend_unit(layer, units[unit], *scratch[worker]);
    });
    each_row(b.tokens, [&](int64_t t, float* row) {
      merge(t, row);
      make_ready(row, m.q_heads * m.head_dim, ready, t, l.o.eight);
    });
    product(l.o, ready, b.tokens, AddToFloat32{b.hidden, m.width});
    norm_all(l.norm_mlp, l.gate_up.eight);
    if (few())
      product(l.gate_up, ready, b.tokens, ToFloat32{few_gate_up, 2 * m.inner});
    else
      product(l.gate_up, ready, b.tokens, GateToBfloat16{gate_up, m.inner});
    each_row(b.tokens, [&](int64_t t, float* row) {
      gate(t, row);
      make_ready(row, m.inner, ready, t, l.down.eight);
    });
    product(l.down, ready, b.tokens, AddToFloat32{b.hidden, m.width});
  }

  void norm_all(const float* weight, bool eight) {
    each_row(b.tokens, [&](int64_t t, float* row) {
      norm_row(b.hidden + t * m.width, weight, m.width, m.eps, row);
      make_ready(row, m.width, ready, t, eight);
    });
  }

  // Row `t`: q into every group that it stands in, k and v into the pool.
  void place(int64_t layer, int64_t t, int64_t width) {
    const uint16_t* x = qkv + t * width;
    const float *cos = b.cos + t * m.head_dim, *sin = b.sin + t * m.head_dim;
    const int64_t dim = m.head_dim;
    alignas(64) uint16_t turned[MAX_DIM];
    for (int64_t head = 0; head < m.q_heads; ++head) {
      turn(x + head * dim, cos, sin, dim, turned);
      const int64_t kv = head / group_size, g = head % group_size;
      for (int64_t i = b.first[t]; i < b.first[t + 1]; ++i) {
        const int64_t asked = b.group[b.in_group[i]].rows * group_size;
        std::memcpy(query[b.in_group[i]] + (kv * asked + b.as_row[i] * group_size + g) * dim, turned, dim * 2);
      }
    }
    if (b.slots[t] < 0) return;
    for (int64_t kv = 0; kv < m.kv_heads; ++kv) {
      const int64_t at = kv * pool.head_stride + b.slots[t] * dim;
      turn(x + (m.q_heads + kv) * dim, cos, sin, dim, pool.key[layer] + at);
      std::memcpy(pool.value[layer] + at, x + (m.q_heads + m.kv_heads + kv) * dim, dim * 2);
    }
  }

  void attend_unit(int64_t layer, const Unit& u, Scratch& scratch) {
    const Keys& keys = b.keys[u.pass];
    const int64_t g = group_of[u.pass], asked = b.group[g].rows * group_size, dim = m.head_dim;
    const Pass pass{query[g] + u.head * asked * dim,
                    {pool.key[layer] + u.head * pool.head_stride, keys.slots, int(dim)},
                    {pool.value[layer] + u.head * pool.head_stride, keys.slots, int(dim)},
                    asked, keys.count, keys.base, int(dim), int(group_size), int(keys.causal), m.scale * LOG2E,
                    lse[u.pass] + u.head * asked, out[u.pass] + u.head * asked * dim};
    attend(pass, u.first_tile, u.last_tile, scratch);
  }

  // What all passes of row `t` found, by their log-sum-exp, as [q_heads, head_dim].
  void merge(int64_t t, float* row) {
    const int64_t dim = m.head_dim;
    for (int64_t head = 0; head < m.q_heads; ++head) {
      const int64_t kv = head / group_size, g = head % group_size;
      float* to = row + head * dim;
      float top = -__builtin_inff(), total = 0.0f;
      for (int64_t i = b.first[t]; i < b.first[t + 1]; ++i) {
        const Group& group = b.group[b.in_group[i]];
        const int64_t at = kv * group.rows * group_size + b.as_row[i] * group_size + g;
        for (int64_t p = group.first_pass; p < group.first_pass + group.passes; ++p) {
          const float here = lse[p][at];
          // `!(here <= top)`: a NaN is taken over, and stays.
          const float now = !(here <= top) ? here : top;
          const float kept = total == 0.0f ? 0.0f : __builtin_expf(top - now), added = __builtin_expf(here - now);
          const __m512 k = _mm512_set1_ps(kept), a = _mm512_set1_ps(added);
          const float* from = out[p] + at * dim;
          for (int64_t d = 0; d < dim; d += 16) {
            const __m512 old = total == 0.0f ? _mm512_setzero_ps() : _mm512_mul_ps(k, _mm512_loadu_ps(to + d));
            _mm512_storeu_ps(to + d, _mm512_fmadd_ps(a, _mm512_loadu_ps(from + d), old));
          }
          total = total * kept + added;
          top = now;
        }
      }
      const __m512 by = _mm512_set1_ps(1.0f / total);
      for (int64_t d = 0; d < dim; d += 16) _mm512_storeu_ps(to + d, _mm512_mul_ps(by, _mm512_loadu_ps(to + d)));
    }
  }

  // Whether products take the way of few rows, on which gate and what it lets through do not meet.
  bool few() const { return b.tokens <= TILE; }

  // What the gate has let through of row `t`.
  void gate(int64_t t, float* row) {
    if (!few()) {
      for (int64_t i = 0; i < m.inner; i += 16) _mm512_storeu_ps(row + i, wide_at(gate_up + t * m.inner + i));
      return;
    }
    const float* both = few_gate_up + t * 2 * m.inner;  // 16 of each in turns
    for (int64_t i = 0; i < m.inner; i += 16) {
      const __m512 passed = gated(_mm512_loadu_ps(both + 2 * i), _mm512_loadu_ps(both + 2 * i + 16));
      _mm512_storeu_ps(row + i, wide((__m256i)_mm512_cvtneps_pbh(passed)));  // rounded as on the other way
    }
  }

  void finish() {
    each_row(b.tokens, [&](int64_t t, float*) {
      norm_row(b.hidden + t * m.width, m.norm, m.width, m.eps, b.last + t * m.width);
    });
    each_row(b.wanted_count, [&](int64_t i, float*) {
      make_ready(b.last + b.wanted[i] * m.width, m.width, head_ready, i, m.head.eight);
    });
    product(m.head, head_ready, b.wanted_count, ToFloat32{b.logits, m.head.out});
  }

  const Model& m;
  const Batch& b;
  const Pool& pool;
  int threads;
  int64_t group_size, row_stride;
  Ready ready, head_ready;
  uint16_t *qkv, *gate_up;
  float *rows, *few_gate_up;
  std::vector<uint16_t*> query;
  std::vector<float*> lse, out;
  std::vector<int64_t> group_of;
  std::vector<Unit> units;
  std::vector<Scratch*> scratch;  // of each worker
  Team::Hold* hold = nullptr;
};

}  // namespace

extern "C" {

// Bytes of a weight [out, in] in tiles are those of the weight itself.
void coread_pack_weight(const void* weight, int64_t out, int64_t in, int item, void* packed) {
  pack_weight(static_cast<const uint8_t*>(weight), out, in, item, static_cast<uint8_t*>(packed));
}

// Bytes of memory that `coread_step` needs for this batch; -1 where there is none even to count them.
int64_t coread_step_bytes(const Model* model, const Batch* batch, const Pool* pool, int threads) {
  try {
    return Step(*model, *batch, *pool, nullptr, threads).needed;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Returns 0, or 1 where memory was short: the step's results mean nothing then. `threads` >= 1, the caller's included.
int coread_step(const Model* model, const Batch* batch, const Pool* pool, void* memory, int threads) {
  try {
    Step(*model, *batch, *pool, static_cast<uint8_t*>(memory), threads).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
}
