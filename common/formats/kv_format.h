#pragma once
// How KV blocks keep keys and values (--kv-cache-dtype): as they are, or as codes of 8 or 4 bits, which
// cross the link in half or nearly a quarter of the bytes. ACT blocks are always kept as they are: K and
// V of every row, new ones too, are made from them, so rounding them would change the model twice, and
// an int8 KV row is about as short as a plain ACT row already. Pure arithmetic; both sides of the shared
// memory and all kernels follow this page.
//
// Each head of a row's K and V is cut into groups of 64 numbers along head_dim; the last group may be
// shorter. A group x of the model's DType has an offset and a scale of that DType, and a code for each
// number. All steps are float32 operations, each rounded once to nearest even; L is 255 or 15:
//
//   range  = (max(x) - min(x)) + 0
//   offset = min(x) + 0, which is exact (a zero is +0)
//   scale  = range / L, rounded up to the DType
//   code   = (x - offset) / scale, rounded to nearest even, at most L;    0 where scale is 0
//   number = code · scale + offset, rounded once (fma), then to the DType
//
// Host cores beside a GPU leave the last rounding out in a model of 16 bits whose heads are a multiple of 32 wide, with
// at most 16 query heads to a key (attention_from_codes in kernels/cpu/kernels_cpu.h). The CPU device never does.
//
// So a number is at most half a scale from x, besides its own rounding, and min(x) is kept exactly: the
// scale is rounded up, so that no code is cut off. A constant group has scale 0 and keeps its value. If
// range is not finite (the group holds an infinity or a NaN, or differences beyond float32), offset and
// scale are NaN and so is every number of the group: it shows in the logits, as it would unquantised.
// A NaN of these is the DType's quiet one without a sign: 0x7fc00000, 0x7e00 or 0x7fc0.
//
//   a token's row in a KV block, of `row` bytes, padded with zeros:
//   | codes of K's heads | codes of V's heads | pad | K's groups: scale, offset … | V's groups … | pad |
//   ^ 0, (2, kv_heads, codes)               groups_at ^ (2, kv_heads, groups, 2) of the DType
//
// A code of 8 bits is a byte. Of 4 bits, number d of a head is in byte d / 2: in its low half if d is
// even; an odd head ends with a low half. Blocks begin at multiples of 16 bytes, and so do rows.

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/dtype.h"
#include "common/units.h"

namespace poise {

enum class KvFormat : std::uint32_t { plain = 0, int8 = 1, int4 = 2 };
inline constexpr KvFormat kKvFormats[] = {KvFormat::plain, KvFormat::int8, KvFormat::int4};

// As --kv-cache-dtype says it.
constexpr std::string_view name_of(KvFormat format) {
  return format == KvFormat::int8 ? "int8" : format == KvFormat::int4 ? "int4" : "auto";
}
constexpr std::optional<KvFormat> kv_format_from(std::string_view name) {
  for (const KvFormat format : kKvFormats) {
    if (name == name_of(format)) {
      return format;
    }
  }
  return std::nullopt;
}

inline constexpr std::int32_t kKvGroup = 64;  // numbers

// The largest code.
constexpr std::int32_t kv_levels(KvFormat format) { return format == KvFormat::int8 ? 255 : 15; }

// Where everything lies in a token's row; bytes.
struct KvRowLayout {
  std::int64_t codes = 0;   // of one head; plain: its numbers
  std::int32_t groups = 0;  // of one head; plain: none
  std::int64_t groups_at = 0;
  std::int64_t row = 0;

  // Of K's or V's `head`: which is 0 for K, 1 for V.
  constexpr std::int64_t codes_of(std::int32_t which, std::int32_t head,
                                  std::int32_t kv_heads) const {
    return (std::int64_t{which} * kv_heads + head) * codes;
  }
  constexpr std::int64_t groups_of(std::int32_t which, std::int32_t head, std::int32_t kv_heads,
                                   DType dtype) const {
    return groups_at + (std::int64_t{which} * kv_heads + head) * groups * 2 * size_of(dtype).n;
  }
};

constexpr KvRowLayout kv_row_layout(std::int32_t kv_heads, std::int32_t head_dim, DType dtype,
                                    KvFormat format) {
  constexpr std::int64_t kAligned = 16;
  const std::int64_t heads = 2 * std::int64_t{kv_heads};
  if (format == KvFormat::plain) {
    const std::int64_t numbers = size_of(dtype).n * head_dim;
    return {.codes = numbers, .groups = 0, .groups_at = heads * numbers, .row = heads * numbers};
  }
  KvRowLayout layout;
  layout.codes = format == KvFormat::int8 ? head_dim : (head_dim + 1) / 2;
  layout.groups = static_cast<std::int32_t>(ceil_div(head_dim, kKvGroup));
  layout.groups_at = round_up(heads * layout.codes, kAligned);
  layout.row = round_up(layout.groups_at + heads * layout.groups * 2 * size_of(dtype).n, kAligned);
  return layout;
}

}  // namespace poise
