// One pass of attention over stretches of the pool, for `kernels.amx`: see amx_attention.h.

#include "amx_attention.h"

extern "C" {

// Asks the system for the use of the tiles, for the whole process. 0: granted.
int coread_amx_request() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return int(syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA));
}

// query [kv_heads, rows, dim], key and value [kv_heads, keys, dim], bfloat16, the last two dimensions without gaps;
// lse [kv_heads, rows] and out [kv_heads, rows, dim], float32, contiguous. `dim` is a multiple of 32, at most 256;
// rows, keys >= 1. Returns 0, or 1 where memory is short.
int coread_amx_attend(const void* query, int64_t query_stride, const void* key, int64_t key_stride, const void* value,
                      int64_t value_stride, int64_t kv_heads, int64_t rows, int64_t keys, int dim, int group,
                      int causal, float scale, float* lse, float* out, int threads) {
  const int64_t tiles = (rows + TILE - 1) / TILE;
  int64_t parts = (tiles + ASKED - 1) / ASKED;  // of a head's rows; a part brings V into layout anew
  if (threads > 1 && kv_heads * parts % threads && kv_heads * parts < 4 * threads) parts *= threads;
  if (parts > tiles) parts = tiles;
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch* scratch = static_cast<Scratch*>(std::aligned_alloc(64, sizeof(Scratch)));
    bool good = scratch != nullptr;
    if (good) use_tiles();
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = kv_heads * parts - 1; unit >= 0; --unit) {  // the longest causal parts first
      const int64_t head = unit % kv_heads, part = unit / kv_heads;
      const Pass pass{static_cast<const uint16_t*>(query) + head * query_stride,
                      {static_cast<const uint16_t*>(key) + head * key_stride, nullptr, dim},
                      {static_cast<const uint16_t*>(value) + head * value_stride, nullptr, dim},
                      rows, keys, 0, dim, group, causal, scale * LOG2E, lse + head * rows, out + head * rows * dim};
      if (good) attend(pass, tiles * part / parts, tiles * (part + 1) / parts, *scratch);
    }
    if (!good) {
#pragma omp atomic write
      failed = 1;
    }
    if (scratch != nullptr) _tile_release();
    std::free(scratch);
  }
  return failed;
}
}
