#pragma once
// Sixteen float32 in two 256-bit registers; what each operation means is said in lanes_portable.h.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/dtype.h"
#include "common/formats/bfloat12.h"
#include "kernels/cpu/lane_kernels.h"
#include "kernels/cpu/transpose_halves.h"

namespace poise::cpu {
namespace {

struct Lanes {
  static constexpr int kCount = 16;
  static constexpr int kTileRows = tile_rows(6);
  static constexpr int kTilePanels = 1;

  __m256 lo, hi;

  // All ones in the first `count` of eight lanes.
  static __m256i first_mask(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Lanes zero() { return all(0.0f); }

  static __m256 widen(__m128i bits, const Half*) { return _mm256_cvtph_ps(bits); }
  static __m256 widen(__m128i bits, const BFloat16*) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Lanes load(const float* from) {
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
  }
  template <typename T>
  static Lanes load(const T* from) {
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    return {widen(_mm_loadu_si128(halves), from), widen(_mm_loadu_si128(halves + 1), from)};
  }
  static Lanes load_first(const float* from, int count) {
    return {_mm256_maskload_ps(from, first_mask(count)),
            count > 8 ? _mm256_maskload_ps(from + 8, first_mask(count - 8)) : _mm256_setzero_ps()};
  }
  template <typename T>
  static Lanes load_first(const T* from, int count) {
    T copy[kCount] = {};
    std::memcpy(copy, from, sizeof(T) * static_cast<std::size_t>(count < 16 ? count : 16));
    return load(copy);
  }

  static __m256i eight_pairs(const std::uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  // The low halves of eight numbers of 32 bits.
  static __m128i low_halves(__m256i pairs) {
    const __m256i alone = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
    return _mm_packus_epi32(_mm256_castsi256_si128(alone), _mm256_extracti128_si256(alone, 1));
  }
  static void load_pairs(const std::uint32_t* from, const Half* type, Lanes& firsts,
                         Lanes& seconds) {
    const __m256i lo = eight_pairs(from), hi = eight_pairs(from + 8);
    firsts = {widen(low_halves(lo), type), widen(low_halves(hi), type)};
    seconds = {widen(low_halves(_mm256_srli_epi32(lo, 16)), type),
               widen(low_halves(_mm256_srli_epi32(hi, 16)), type)};
  }
  static void load_pairs(const std::uint32_t* from, const BFloat16*, Lanes& firsts,
                         Lanes& seconds) {
    const __m256i lo = eight_pairs(from), hi = eight_pairs(from + 8);
    const __m256i high = _mm256_set1_epi32(-0x10000);
    firsts = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
              _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
    seconds = {_mm256_castsi256_ps(_mm256_and_si256(lo, high)),
               _mm256_castsi256_ps(_mm256_and_si256(hi, high))};
  }

  static Lanes of_bytes(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  static Lanes of_bytes(const std::uint8_t* from) {
    return of_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Lanes of_half_bytes(const std::uint8_t* from) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m128i low = _mm_and_si128(pairs, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi8(15));
    return of_bytes(_mm_unpacklo_epi8(low, high));
  }

  static __m128i narrow(__m256 v, Half*) {
    const __m128i rounded = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // The hardware keeps a NaN's payload, to_half does not.
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m128i nan16 =
        _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    const __m128i quiet =
        _mm_or_si128(_mm_and_si128(rounded, _mm_set1_epi16(-0x8000)), _mm_set1_epi16(0x7e00));
    return _mm_blendv_epi8(rounded, quiet, nan16);
  }
  static __m128i narrow(__m256 v, BFloat16*) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i kept =
        _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    const __m256i high = _mm256_srli_epi32(kept, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  void store(float* to) const {
    _mm256_storeu_ps(to, lo);
    _mm256_storeu_ps(to + 8, hi);
  }
  template <typename T>
  void store(T* to) const {
    auto* halves = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(halves, narrow(lo, to));
    _mm_storeu_si128(halves + 1, narrow(hi, to));
  }
  template <typename T>
  void store_number(T* to) const {
    store(to);
  }
  void store_number(Half* to) const {
    auto* halves = reinterpret_cast<__m128i*>(to);
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(halves, _mm256_cvtps_ph(lo, kNearest));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(hi, kNearest));
  }
  template <typename T>
  void store_first(T* to, int count) const {
    T copy[kCount];
    store(copy);
    std::memcpy(to, copy, sizeof(T) * static_cast<std::size_t>(count < 16 ? count : 16));
  }

  Lanes rounded(const float*) const { return *this; }
  template <typename T>
  Lanes rounded(const T* type) const {
    return {widen(narrow(lo, static_cast<T*>(nullptr)), type),
            widen(narrow(hi, static_cast<T*>(nullptr)), type)};
  }
  template <typename T>
  Lanes rounded_number(const T* type) const {
    return rounded(type);
  }
  Lanes rounded_number(const Half* type) const {
    return {widen(_mm256_cvtps_ph(lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), type),
            widen(_mm256_cvtps_ph(hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), type)};
  }

  static __m128i sixteen_bytes(const void* from) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  }
  static Lanes int8s(const std::int8_t* from) {
    const __m128i bytes = sixteen_bytes(from);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  // Bytes whose low halves count.
  static Lanes int4s(__m128i bytes) {
    const __m128i codes = _mm_sub_epi8(_mm_and_si128(bytes, _mm_set1_epi8(15)), _mm_set1_epi8(8));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
  }
  static Lanes low_int4s(const std::uint8_t* from) { return int4s(sixteen_bytes(from)); }
  static Lanes high_int4s(const std::uint8_t* from) {
    return int4s(_mm_srli_epi16(sixteen_bytes(from), 4));
  }

  static Lanes exponents(const std::uint8_t* from) {
    const __m128i bytes = sixteen_bytes(from);
    const auto eight = [](__m128i some) {
      const __m256i low = _mm256_slli_epi32(_mm256_cvtepu8_epi32(some), 7);
      return _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_slli_epi32(low, 16)));
    };
    return {eight(bytes), eight(_mm_srli_si128(bytes, 8))};
  }
  // Two bfloat16 in each of eight lanes, the even input's the lower one. `codes`: eight bytes, in both halves.
  static __m256i pairs_of_bfloat12(const std::uint8_t* rest, __m256i codes, __m256 bases) {
    const __m256i spread =
        _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1,  //
                         4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
    // Either half of a byte to where an exponent lies: times 2⁷, times 2³.
    const __m256i below = _mm256_and_si256(
        _mm256_mullo_epi16(_mm256_shuffle_epi8(codes, spread), _mm256_set1_epi32(0x80080)),
        _mm256_set1_epi16(0x780));
    const __m256i coded = _mm256_cmpgt_epi16(_mm256_set1_epi16(kBfloat12Escape << 7), below);
    const __m256i exponents =
        _mm256_and_si256(coded, _mm256_sub_epi16(_mm256_castps_si256(bases), below));
    const __m256i others =
        _mm256_and_si256(_mm256_cvtepi8_epi16(sixteen_bytes(rest)), _mm256_set1_epi16(-0x7f81));
    return _mm256_or_si256(exponents, others);
  }
  static void bfloat12s(const std::uint8_t* rest, const std::uint8_t* codes, Lanes bases,
                        Lanes& even, Lanes& odd) {
    const __m128i bytes = sixteen_bytes(codes);
    const __m256i low = pairs_of_bfloat12(rest, _mm256_broadcastsi128_si256(bytes), bases.lo);
    const __m256i high = pairs_of_bfloat12(
        rest + 16, _mm256_broadcastsi128_si256(_mm_srli_si128(bytes, 8)), bases.hi);
    const __m256i upper = _mm256_set1_epi32(-0x10000);
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(low, upper)),
           _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
  }
  void store_exact(BFloat16* to) const {
    const auto eight = [](__m256 v) {
      const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
      return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    };
    auto* halves = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(halves, eight(lo));
    _mm_storeu_si128(halves + 1, eight(hi));
  }

  template <typename T>
  static bool numbers_of_int4s(T*, const std::byte*, int, Lanes, Lanes) {
    return false;
  }

  static Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static Lanes max(Lanes a, Lanes b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
  }
  static Lanes abs(Lanes a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
  }
  static Lanes where_less(Lanes a, Lanes b, Lanes yes, Lanes no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
  }
  static Lanes first(int count, Lanes yes, Lanes no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(first_mask(count))),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(first_mask(count - 8)))};
  }
  static __m256 power_of_two(__m256 n) {
    const __m256 shifted = _mm256_add_ps(n, _mm256_set1_ps(8388608.0f + 127.0f));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23));
  }
  static Lanes power_of_two(Lanes n) { return {power_of_two(n.lo), power_of_two(n.hi)}; }
  static std::uint32_t at_least(Lanes a, Lanes b) {
    const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ));
    const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
    return static_cast<std::uint32_t>(lo | (hi << 8));
  }

  float sum() const {
    const __m256 eight = _mm256_add_ps(lo, hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static Lanes sums(const Lanes (&of)[16]) { return {sums_of_eight(of), sums_of_eight(of + 8)}; }
  static __m256 sums_of_eight(const Lanes* of) {
    // 128 bits of two at a time: i and i + 4 lie in the order of lanes then.
    __m256 four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 a = _mm256_add_ps(of[i].lo, of[i].hi);
      const __m256 b = _mm256_add_ps(of[i + 4].lo, of[i + 4].hi);
      four[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    const __m256 a = pairs(four[0], four[1]), b = pairs(four[2], four[3]);
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  }
  static __m256 pairs(__m256 a, __m256 b) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                         _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  float largest() const {
    const __m256 eight = _mm256_max_ps(lo, hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
};

// Not friends within the class: g++ 12 compiles those without the target this file is under.
inline Lanes operator+(Lanes a, Lanes b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline Lanes operator-(Lanes a, Lanes b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline Lanes operator*(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline Lanes operator/(Lanes a, Lanes b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

inline float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// Transposes 8 rows of 8 values of 32 bits in registers.
inline void transpose_registers(__m256i (&r)[8]) {
  __m256i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    r[4 * i + 0] = _mm256_unpacklo_epi64(t[4 * i + 0], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i + 0], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4g + j] holds, in its 128-bit half l, column 4l + j of rows 4g … 4g + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm256_permute2x128_si256(r[j], r[4 + j], 0x20);
    t[4 + j] = _mm256_permute2x128_si256(r[j], r[4 + j], 0x31);
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    r[j] = t[j];
  }
}

template <typename From, typename To>
inline __m256i load_columns(const From* from, int count) {
  if constexpr (sizeof(From) == 4) {
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(from), Lanes::first_mask(count));
  } else {
    From copy[8] = {};
    const From* whole = from;
    if (count < 8) {
      std::memcpy(copy, from, sizeof(From) * static_cast<std::size_t>(count));
      whole = copy;
    }
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(whole));
    if constexpr (sizeof(To) == 4) {
      return _mm256_castps_si256(Lanes::widen(bits, from));
    } else {
      return _mm256_cvtepu16_epi32(bits);
    }
  }
}

// Columns [0, width) of 8 rows or fewer; `kWhole` where both are 8, and no branch is needed.
template <bool kWhole, typename From, typename To>
inline void transpose_square(To* to, const From* from, std::int64_t stride, int rows, int width) {
  __m256i r[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = kWhole || i < rows ? load_columns<From, To>(from + i * stride, kWhole ? 8 : width)
                              : _mm256_setzero_si256();
  }
  transpose_registers(r);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    if (kWhole || i < width) {
      if constexpr (sizeof(To) == 4) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16 * i), r[i]);
      } else {
        _mm_storeu_si128(
            reinterpret_cast<__m128i*>(to + 16 * i),
            _mm_packus_epi32(_mm256_castsi256_si128(r[i]), _mm256_extracti128_si256(r[i], 1)));
      }
    }
  }
}

template <bool kStream = false, typename From, typename To>
inline void transpose_16(To* to, const From* from, std::int64_t stride, int rows,
                         std::int64_t cols) {
  std::int64_t c = 0;
  if constexpr (sizeof(To) == 2) {
    for (; rows == 16 && c + 8 <= cols; c += 8) {
      transpose_halves(to + 16 * c, from + c, stride);
    }
  }
  for (; c < cols; c += 8) {
    const int width = cols - c < 8 ? static_cast<int>(cols - c) : 8;
    for (int half = 0; half < 16; half += 8) {
      const From* corner = from + half * stride + c;
      if (rows - half >= 8 && width == 8) {
        transpose_square<true>(to + 16 * c + half, corner, stride, 8, 8);
      } else {
        transpose_square<false>(to + 16 * c + half, corner, stride, rows - half, width);
      }
    }
  }
}

inline void end_streaming() {}

}  // namespace
}  // namespace poise::cpu
