#pragma once
// Values of 16 bits transposed with AVX2. Included first in lanes_avx2.h.

#include <immintrin.h>

#include <cstdint>

namespace poise::cpu {
namespace {

// 16 rows of 8 columns of 16 bits: to[16 · column + row]. Each half of a register holds eight rows, so
// that no value crosses from one half to the other.
template <typename T>
inline void transpose_halves(T* to, const T* from, std::int64_t stride) {
  const auto row = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
  };
  __m256i r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(i + 8), 1);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
  }
  // t[2i + j]: columns 4j … 4j + 3 of rows 2i, 2i + 1.
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      r[4 * half + 2 * j] = _mm256_unpacklo_epi32(t[4 * half + j], t[4 * half + 2 + j]);
      r[4 * half + 2 * j + 1] = _mm256_unpackhi_epi32(t[4 * half + j], t[4 * half + 2 + j]);
    }
  }
  // r[4h + j]: columns 2j, 2j + 1 of rows 4h … 4h + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    auto* pair = reinterpret_cast<__m256i*>(to + 32 * j);
    _mm256_storeu_si256(pair, _mm256_unpacklo_epi64(r[j], r[4 + j]));
    _mm256_storeu_si256(pair + 1, _mm256_unpackhi_epi64(r[j], r[4 + j]));
  }
}

}  // namespace
}  // namespace poise::cpu
