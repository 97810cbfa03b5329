#pragma once
// Sixteen float32 in one 512-bit register; what each operation means is said in lanes_portable.h.

#include <immintrin.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/formats/bfloat12.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

struct Lanes {
  static constexpr int kCount = 16;
  static constexpr int kTileRows = tile_rows(12);
  static constexpr int kTilePanels = 2;

  __m512 v;

  static __mmask16 first_mask(int count) {
    return static_cast<__mmask16>((1u << (count < 16 ? count : 16)) - 1u);
  }

  static Lanes all(float x) { return {_mm512_set1_ps(x)}; }
  static Lanes zero() { return {_mm512_setzero_ps()}; }

  static __m512 widen(__m256i bits, const Half*) { return _mm512_cvtph_ps(bits); }
  static __m512 widen(__m256i bits, const BFloat16*) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
  template <typename T>
  static Lanes load(const T* from) {
    return {widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), from)};
  }
  static Lanes load_first(const float* from, int count) {
    return {_mm512_maskz_loadu_ps(first_mask(count), from)};
  }
  template <typename T>
  static Lanes load_first(const T* from, int count) {
    return {widen(_mm256_maskz_loadu_epi16(first_mask(count), from), from)};
  }

  static void load_pairs(const std::uint32_t* from, const Half* type, Lanes& firsts,
                         Lanes& seconds) {
    const __m512i pairs = _mm512_loadu_si512(from);
    firsts = {widen(_mm512_cvtepi32_epi16(pairs), type)};
    seconds = {widen(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)), type)};
  }
  static void load_pairs(const std::uint32_t* from, const BFloat16*, Lanes& firsts,
                         Lanes& seconds) {
    const __m512i pairs = _mm512_loadu_si512(from);
    firsts = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    seconds = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))};
  }

  static Lanes of_bytes(__m128i bytes) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))}; }
  static Lanes of_bytes(const std::uint8_t* from) {
    return of_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Lanes of_half_bytes(const std::uint8_t* from) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m128i low = _mm_and_si128(pairs, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi8(15));
    return of_bytes(_mm_unpacklo_epi8(low, high));
  }

  __m256i narrow(Half*) const {
    const __m256i rounded = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // The hardware keeps a NaN's payload, to_half does not.
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m256i quiet = _mm256_or_si256(_mm256_and_si256(rounded, _mm256_set1_epi16(-0x8000)),
                                          _mm256_set1_epi16(0x7e00));
    return _mm256_mask_mov_epi16(rounded, nan, quiet);
  }
  __m256i narrow(BFloat16*) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  void store(float* to) const { _mm512_storeu_ps(to, v); }
  template <typename T>
  void store(T* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(to));
  }
  template <typename T>
  void store_number(T* to) const {
    store(to);
  }
  void store_number(Half* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store_number(BFloat16* to) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
  }
  void store_first(float* to, int count) const { _mm512_mask_storeu_ps(to, first_mask(count), v); }
  template <typename T>
  void store_first(T* to, int count) const {
    _mm256_mask_storeu_epi16(to, first_mask(count), narrow(to));
  }

  Lanes rounded(const float*) const { return *this; }
  Lanes rounded(const Half*) const {
    return {widen(narrow(static_cast<Half*>(nullptr)), static_cast<const Half*>(nullptr))};
  }
  // The bits of narrow's BFloat16, left where they are.
  Lanes rounded(const BFloat16*) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x400000));
    return {_mm512_castsi512_ps(_mm512_and_si512(kept, _mm512_set1_epi32(-0x10000)))};
  }
  template <typename T>
  Lanes rounded_number(const T* type) const {
    return rounded(type);
  }
  Lanes rounded_number(const Half* type) const {
    return {widen(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), type)};
  }

  static __m128i sixteen_bytes(const void* from) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  }
  static Lanes int8s(const std::int8_t* from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen_bytes(from)))};
  }
  // A lookup reads the low four bits of each index alone.
  static Lanes int4s(__m512i indices) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm512_permutexvar_ps(indices, values)};
  }
  static Lanes low_int4s(const std::uint8_t* from) {
    return int4s(_mm512_cvtepu8_epi32(sixteen_bytes(from)));
  }
  static Lanes high_int4s(const std::uint8_t* from) {
    return int4s(_mm512_srli_epi32(_mm512_cvtepu8_epi32(sixteen_bytes(from)), 4));
  }

  static Lanes exponents(const std::uint8_t* from) {
    const __m512i low = _mm512_slli_epi32(_mm512_cvtepu8_epi32(sixteen_bytes(from)), 7);
    return {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(low, 16)))};
  }
  static void bfloat12s(const std::uint8_t* rest, const std::uint8_t* codes, Lanes bases,
                        Lanes& even, Lanes& odd) {
    // Each byte of codes twice, then either half of it to where an exponent lies.
    const __m512i spread = _mm512_add_epi8(
        _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, -64, 0, -64, 1, -64, 1, -64, 2, -64, 2, -64, 3, -64, 3, -64)),
        _mm512_setr_epi32(0, 0, 0, 0, 0x40004, 0x40004, 0x40004, 0x40004, 0x80008, 0x80008, 0x80008,
                          0x80008, 0xc000c, 0xc000c, 0xc000c, 0xc000c));
    const __m512i twice = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen_bytes(codes)), spread);
    const __m512i below = _mm512_and_si512(_mm512_sllv_epi16(twice, _mm512_set1_epi32(0x30007)),
                                           _mm512_set1_epi16(0x780));
    const __mmask32 coded = _mm512_cmplt_epu16_mask(below, _mm512_set1_epi16(kBfloat12Escape << 7));
    const __m512i exponents = _mm512_maskz_sub_epi16(coded, _mm512_castps_si512(bases.v), below);
    const __m512i others =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rest)));
    constexpr int kFirstOrBoth = 0xf8;  // of three: a | (b & c)
    const __m512i pairs =
        _mm512_ternarylogic_epi32(exponents, others, _mm512_set1_epi16(-0x7f81), kFirstOrBoth);
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))};
  }
  void store_exact(BFloat16* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16)));
  }

  // The sixteen numbers of a group are a table, in which 32 codes are looked up at once.
  template <typename T>
  static bool numbers_of_int4s(T* to, const std::byte* codes, int count, Lanes scale,
                               Lanes offset) {
    if (sizeof(T) != 2 || count % 32 != 0) {
      return false;
    }
    alignas(64) T numbers[16];
    const __m512 each = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Lanes{_mm512_fmadd_ps(each, scale.v, offset.v)}.store_number(numbers);
    // A lookup reads five bits of an index: the table stands twice, so the fifth does not count.
    const __m512i table =
        _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(numbers)));
    for (int i = 0; i < count; i += 32) {
      const __m512i pairs = _mm512_cvtepu8_epi32(sixteen_bytes(codes + i / 2));
      const __m512i indices = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
      _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(indices, table));
    }
    return true;
  }

  static Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Lanes abs(Lanes a) { return {_mm512_abs_ps(a.v)}; }
  static Lanes where_less(Lanes a, Lanes b, Lanes yes, Lanes no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
  }
  static Lanes first(int count, Lanes yes, Lanes no) {
    return {_mm512_mask_blend_ps(first_mask(count), no.v, yes.v)};
  }
  static Lanes power_of_two(Lanes n) {
    const __m512 shifted = _mm512_add_ps(n.v, _mm512_set1_ps(8388608.0f + 127.0f));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23))};
  }
  static std::uint32_t at_least(Lanes a, Lanes b) {
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
  }

  float sum() const {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static Lanes sums(const Lanes (&of)[16]) {
    // Of four at a time, 128 bits of each: i, i + 4, i + 8 and i + 12 lie in the order of lanes then.
    __m512 four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 a = halves(of[i].v, of[i + 4].v), b = halves(of[i + 8].v, of[i + 12].v);
      four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    const __m512 a = pairs(four[0], four[1]), b = pairs(four[2], four[3]);
    return {_mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd))};
  }
  static __m512 halves(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  static __m512 pairs(__m512 a, __m512 b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  float largest() const {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
};

// Not friends within the class: g++ 12 compiles those without the target this file is under.
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }

inline float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// Transposes 16 rows of 16 values of 32 bits in registers.
inline void transpose_registers(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i + 0] = _mm512_unpacklo_epi64(t[4 * i + 0], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i + 0], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4g + j] holds, in its 128-bit lane l, column 4l + j of rows 4g … 4g + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);           // lanes 0, 2 of groups 0, 1
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);       // lanes 1, 3
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);  // groups 2, 3
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// Sixteen columns from `from`, as 32-bit values: floats' bits, or 16-bit values widened with zeros
// where the type stays, or with their value where it becomes float.
template <typename From, typename To>
inline __m512i load_columns(const From* from, int count) {
  if constexpr (sizeof(From) == 4) {
    return _mm512_maskz_loadu_epi32(Lanes::first_mask(count), from);
  } else if constexpr (sizeof(To) == 4) {
    return _mm512_castps_si512(Lanes::load_first(from, count).v);
  } else {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(Lanes::first_mask(count), from));
  }
}

// A whole line of packed weights, written past the caches if asked for: it will not be read soon,
// and need not be fetched to be overwritten.
template <bool kStream>
inline void store_line(void* to, __m512i line) {
  if constexpr (kStream) {
    _mm512_stream_si512(static_cast<__m512i*>(to), line);
  } else {
    _mm512_storeu_si512(to, line);
  }
}
// From here on other threads see streamed lines like any store.
inline void end_streaming() { _mm_sfence(); }

// Columns [0, width) of 16 rows or fewer; `kWhole` where both are 16, and no branch is needed.
template <bool kWhole, bool kStream, typename From, typename To>
inline void transpose_square(To* to, const From* from, std::int64_t stride, int rows, int width) {
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    r[i] = kWhole || i < rows ? load_columns<From, To>(from + i * stride, kWhole ? 16 : width)
                              : _mm512_setzero_si512();
  }
  transpose_registers(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (kWhole || i < width) {
      if constexpr (sizeof(To) == 4) {
        store_line<kStream>(to + 16 * i, r[i]);
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16 * i), _mm512_cvtepi32_epi16(r[i]));
      }
    }
  }
}

// 16 rows of 32 columns of 16 bits: pairs of columns travel as one 32-bit value until the end.
template <bool kStream, typename T>
inline void transpose_wide(T* to, const T* from, std::int64_t stride) {
  alignas(64) static constexpr std::uint16_t kApart[32] = {
      0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
      1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i apart = _mm512_load_si512(kApart);
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    r[i] = _mm512_loadu_si512(from + i * stride);
  }
  transpose_registers(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    store_line<kStream>(to + 32 * i, _mm512_permutexvar_epi16(apart, r[i]));
  }
}

template <bool kStream, typename From, typename To>
inline void transpose_columns(To* to, const From* from, std::int64_t stride, int rows,
                              std::int64_t cols) {
  std::int64_t c = 0;
  if constexpr (sizeof(To) == 2 && kStream) {
    for (; rows == 16 && c + 32 <= cols; c += 32) {
      transpose_wide<kStream>(to + 16 * c, from + c, stride);
    }
  }
  for (; c < cols; c += 16) {
    if (rows == 16 && cols - c >= 16) {
      transpose_square<true, kStream>(to + 16 * c, from + c, stride, 16, 16);
    } else {
      const int width = cols - c < 16 ? static_cast<int>(cols - c) : 16;
      transpose_square<false, false>(to + 16 * c, from + c, stride, rows, width);
    }
  }
}

template <bool kStream = false, typename From, typename To>
inline void transpose_16(To* to, const From* from, std::int64_t stride, int rows,
                         std::int64_t cols) {
  if (kStream && reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
    transpose_columns<true>(to, from, stride, rows, cols);
  } else {
    transpose_columns<false>(to, from, stride, rows, cols);
  }
}

}  // namespace
}  // namespace poise::cpu
