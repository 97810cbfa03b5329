#pragma once
// Matrices kept in codes of 8 or 4 bits, and what number each code stands for. (bfloat12, which keeps
// bfloat16 numbers as they are, has groups and panels of its own: bfloat12.h.) A row's inputs are cut
// into groups; each group of each row has a scale and may have a zero point. The weight is
//
//   w[r, k] = round(scale[r, g] · (code[r, k] - zero[r, g])),  g = the group of input k
//
// where the scale is made float32, difference and product are float32, and `round` is the one
// rounding to the model's DType (common/dtype.h). So a packed matrix means the same numbers on every
// device, and the same as a plain matrix of these numbers. A float8 code is read as its value, and has
// no zero point.
//
// In memory a packed matrix is panels of 16 rows, one behind the other, on the host, on the link and
// on every device alike:
//
//   codes    int8, float8: (cols, 16) bytes
//            int4: (ceil(cols / 2), 16) bytes; the low half of a byte is an even input, the high half
//            the odd one behind it
//   scales   (groups, 16) of `scale_dtype`
//   zeros    (groups, 16) int8, where there are zero points
//
// int8 and zeros are signed. An int4 code is stored as code + 8, which is 0 to 15. Panels need 16
// whole rows: a matrix whose tensors have other numbers of rows stays plain. Pure functions.

#include <bit>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "common/dtype.h"
#include "common/formats/bfloat12.h"
#include "common/units.h"

namespace poise {

enum class Codes : std::uint32_t {
  none = 0,
  int4 = 1,
  int8 = 2,
  float8 = 3,  // e4m3, no infinity
  bfloat12 = 4
};
std::string_view name_of(Codes codes);  // "int4"

struct PackedFormat {
  Codes codes = Codes::none;
  DType scale_dtype = DType::float32;  // bfloat12: that of the numbers, bfloat16
  std::int32_t group =
      0;  // inputs that share a scale, the last group may have fewer; 0: all inputs
  std::uint32_t zero_points = 0;
  // The groups are not of neighbours: a table beside the matrix says which group each input is of
  // (GPTQ's act-order).
  std::uint32_t input_groups = 0;

  bool is_packed() const { return codes != Codes::none; }
  std::int32_t groups(std::int32_t cols) const {
    return group == 0 ? 1 : static_cast<std::int32_t>(ceil_div(cols, group));
  }
  // Whether a loader could have written it.
  bool is_sound() const;

  friend bool operator==(const PackedFormat&, const PackedFormat&) = default;
};
static_assert(std::is_trivially_copyable_v<PackedFormat> && sizeof(PackedFormat) == 20);
inline constexpr PackedFormat kBfloat12{
    .codes = Codes::bfloat12, .scale_dtype = DType::bfloat16, .group = kBfloat12Group};

inline constexpr std::int32_t kPackedRows = 16;  // of a panel
inline constexpr std::int32_t kMinPackedGroup = 8;
inline constexpr std::int32_t kMaxPackedGroup = 1 << 18;

// Where the parts of a panel lie; every offset and the size are multiples of 16.
struct PackedPanel {
  std::int64_t scales, zeros;  // bytes from the panel's start; bfloat12: 0
  Bytes bytes;
};
constexpr PackedPanel packed_panel(const PackedFormat& format, std::int32_t cols) {
  if (format.codes == Codes::bfloat12) {
    return {.scales = 0, .zeros = 0, .bytes = bfloat12_panel(cols).bytes};
  }
  const std::int64_t codes = (format.codes == Codes::int4 ? ceil_div(cols, 2) : cols) * 16;
  const std::int64_t groups = format.group == 0 ? 1 : ceil_div(cols, format.group);
  const std::int64_t zeros = codes + groups * 16 * size_of(format.scale_dtype).n;
  return {.scales = codes,
          .zeros = zeros,
          .bytes = {zeros + (format.zero_points != 0 ? groups * 16 : 0)}};
}

// REQUIRES: rows is a multiple of 16.
constexpr Bytes packed_bytes(const PackedFormat& format, std::int32_t rows, std::int32_t cols) {
  return packed_panel(format, cols).bytes * (rows / kPackedRows);
}

// The value of a float8 code: 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa; all ones behind the
// sign is not a number.
constexpr float float8_to_float(std::uint8_t bits) {
  const std::uint32_t sign = (bits & 0x80u) << 24;
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7f) {
    return std::bit_cast<float>(sign | 0x7fc00000u);
  }
  if (magnitude < 8) {  // subnormal: mantissa · 2⁻⁹
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// Symmetric codes made by rounding to nearest (`--quantization`), of one group of a row. The largest
// magnitude becomes the largest code (127 or 7):
//
//   scale = stored(max |w| / largest), the quotient in float32, `stored` the rounding to scale_dtype
//   code  = w / scale in float32, rounded half to even, at least -largest and at most largest
//
// Where the scale is 0 the codes are 0. Where a weight is not finite, the scale is not a number.
constexpr std::int32_t largest_code(Codes codes) { return codes == Codes::int4 ? 7 : 127; }

}  // namespace poise
