#include "loader/conversion.h"

#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/instruction_sets.h"
#include "common/trouble.h"

namespace poise {
namespace {

template <typename T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, Half>) {
    return to_half(x);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(x);
  } else {
    return x;
  }
}

template <typename From, typename To>
void convert_each(const std::byte* in, std::byte* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    From x;
    std::memcpy(&x, in + i * sizeof x, sizeof x);
    const To y = from_float<To>(to_float(x));
    std::memcpy(out + i * sizeof y, &y, sizeof y);
  }
}

using Loop = void (*)(const std::byte* in, std::byte* out, std::size_t count);

Loop scalar_loop(DType from, DType to) {
  static constexpr Loop kLoops[3][3] = {
      {convert_each<float, float>, convert_each<float, Half>, convert_each<float, BFloat16>},
      {convert_each<Half, float>, convert_each<Half, Half>, convert_each<Half, BFloat16>},
      {convert_each<BFloat16, float>, convert_each<BFloat16, Half>,
       convert_each<BFloat16, BFloat16>}};
  return kLoops[static_cast<int>(from)][static_cast<int>(to)];
}

#if defined(__x86_64__)
#define POISE_WIDE __attribute__((target("avx2,f16c")))

// Eight elements at a time, through float32 as the scalar loops go.
template <typename T>
POISE_WIDE inline __m256 load_eight(const std::byte* in) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(in));
  } else {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
    if constexpr (std::is_same_v<T, Half>) {
      return _mm256_cvtph_ps(bits);
    } else {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
  }
}

POISE_WIDE inline __m128i round_to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i last_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(bits, _mm256_add_epi32(last_kept, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}

template <typename T>
POISE_WIDE inline void store_eight(std::byte* out, __m256 x) {
  if constexpr (std::is_same_v<T, float>) {
    _mm256_storeu_ps(reinterpret_cast<float*>(out), x);
  } else if constexpr (std::is_same_v<T, Half>) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), round_to_bfloat16(x));
  }
}

template <typename From, typename To>
POISE_WIDE void convert_wide(const std::byte* in, std::byte* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    store_eight<To>(out + i * sizeof(To), load_eight<From>(in + i * sizeof(From)));
  }
  convert_each<From, To>(in + i * sizeof(From), out + i * sizeof(To), count - i);
}

Loop wide_loop(DType from, DType to) {
  static constexpr Loop kLoops[3][3] = {
      {nullptr, convert_wide<float, Half>, convert_wide<float, BFloat16>},
      {convert_wide<Half, float>, nullptr, convert_wide<Half, BFloat16>},
      {convert_wide<BFloat16, float>, convert_wide<BFloat16, Half>, nullptr}};
  static const bool has = __builtin_cpu_supports("avx2") != 0 && cpu_has_f16c();
  return has ? kLoops[static_cast<int>(from)][static_cast<int>(to)] : nullptr;
}
#else
Loop wide_loop(DType, DType) { return nullptr; }
#endif

std::size_t elements(DType from, std::span<const std::byte> in, DType to,
                     std::span<std::byte> out) {
  const auto count = in.size() / static_cast<std::size_t>(size_of(from).n);
  check(in.size() == count * static_cast<std::size_t>(size_of(from).n) &&
            out.size() == count * static_cast<std::size_t>(size_of(to).n),
        "a conversion has as many elements on both sides");
  return count;
}

}  // namespace

void convert(DType from, std::span<const std::byte> in, DType to, std::span<std::byte> out) {
  const std::size_t count = elements(from, in, to, out);
  if (from == to) {
    std::memcpy(out.data(), in.data(), in.size());
    return;
  }
  const Loop wide = wide_loop(from, to);
  (wide != nullptr ? wide : scalar_loop(from, to))(in.data(), out.data(), count);
}

namespace detail {

void convert_scalar(DType from, std::span<const std::byte> in, DType to, std::span<std::byte> out) {
  scalar_loop(from, to)(in.data(), out.data(), elements(from, in, to, out));
}

}  // namespace detail
}  // namespace poise
