#pragma once
// Quantised keys and values (common/formats/kv_format.h) over sixteen lanes: rows to codes, and codes to the
// numbers they stand for. Included after rows_lanes.h. A minimum, a maximum and the steps behind them are
// the same in any order of a group's numbers, so lanes change no bit.

#include <bit>
#include <cstdint>
#include <cstring>

#include "common/formats/kv_format.h"
#include "common/units.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

// The smallest number of the type that is not below x ≥ 0.
inline float round_up_to(float x, float*) { return x; }
inline Half round_up_to(float x, Half*) {
  const Half near = to_half(x);
  return to_float(near) < x ? Half{static_cast<std::uint16_t>(near.bits + 1)} : near;
}
inline BFloat16 round_up_to(float x, BFloat16*) {
  const BFloat16 near = to_bfloat16(x);
  return to_float(near) < x ? BFloat16{static_cast<std::uint16_t>(near.bits + 1)} : near;
}
inline float quiet_nan(float*) { return std::bit_cast<float>(0x7fc00000u); }
inline Half quiet_nan(Half*) { return {0x7e00}; }
inline BFloat16 quiet_nan(BFloat16*) { return {0x7fc0}; }

template <typename T>
struct KvGroup {
  T scale, offset;
};

template <typename T>
inline KvGroup<T> measure_group(const T* x, int count, KvFormat format) {
  const Lanes below = Lanes::all(-__builtin_inff());
  Lanes highest = below, lowest = below, odd = Lanes::zero();  // lowest: of -x
  in_sixteens(count, [&](std::int64_t d, int some) {
    const Lanes numbers = load_some(x + d, some);
    highest = Lanes::max(Lanes::first(some, numbers, below), highest);
    lowest = Lanes::max(Lanes::first(some, Lanes::zero() - numbers, below), lowest);
    odd = odd + (numbers - numbers);  // NaN where one is not finite
  });
  const float least = -lowest.largest();
  const float range = (highest.largest() - least) + 0.0f;
  if (!(odd.sum() == 0.0f && range - range == 0.0f)) {
    return {quiet_nan(static_cast<T*>(nullptr)), quiet_nan(static_cast<T*>(nullptr))};
  }
  KvGroup<T> group;
  group.scale =
      round_up_to(range / static_cast<float>(kv_levels(format)), static_cast<T*>(nullptr));
  const Lanes offset = Lanes::all(least + 0.0f);
  offset.store_first(&group.offset, 1);
  return group;
}

// Codes of a group's numbers, a byte each.
template <typename T>
inline void code_group(std::uint8_t* codes, const T* x, int count, KvGroup<T> group,
                       KvFormat format) {
  const float scale = to_float(group.scale);
  if (!(scale > 0.0f)) {  // constant, or no numbers
    std::memset(codes, 0, static_cast<std::size_t>(count));
    return;
  }
  const Lanes divisor = Lanes::all(scale), offset = Lanes::all(to_float(group.offset));
  const Lanes most = Lanes::all(static_cast<float>(kv_levels(format)));
  const Lanes whole = Lanes::all(8388608.0f);  // 2²³: a sum's last bit is 1
  in_sixteens(count, [&](std::int64_t d, int some) {
    const Lanes steps = (load_some(x + d, some) - offset) / divisor;
    const Lanes code = Lanes::where_less(most, steps, most, steps) + whole;
    alignas(64) float sums[16];
    code.store(sums);
    for (int i = 0; i < some; ++i) {
      codes[d + i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(sums[i]));
    }
  });
}

template <typename T>
inline void quantize_kv_head(const QuantizeKv& op, const T* x, std::byte* codes,
                             std::byte* groups) {
  std::uint8_t bytes[kMaxHeadDim + 1];
  for (std::int32_t d = 0; d < op.head_dim; d += kKvGroup) {
    const int count = op.head_dim - d < kKvGroup ? op.head_dim - d : kKvGroup;
    const KvGroup<T> group = measure_group(x + d, count, op.format);
    code_group(bytes + d, x + d, count, group, op.format);
    std::memcpy(groups + d / kKvGroup * static_cast<std::int64_t>(sizeof group), &group,
                sizeof group);
  }
  if (op.format == KvFormat::int8) {
    std::memcpy(codes, bytes, static_cast<std::size_t>(op.head_dim));
    return;
  }
  bytes[op.head_dim] = 0;
  for (std::int32_t d = 0; d < op.head_dim; d += 2) {
    codes[d / 2] = static_cast<std::byte>(bytes[d] | bytes[d + 1] << 4);
  }
}

inline void quantize_kv_row(const QuantizeKv& op, std::int64_t row) {
  const KvRowLayout layout = kv_row_layout(op.kv_heads, op.head_dim, op.dtype, op.format);
  const std::int32_t heads = 2 * op.kv_heads;
  const std::int64_t head_groups = layout.groups * 2 * size_of(op.dtype).n;
  std::byte* const out = op.out + row * layout.row;
  std::byte* const groups = out + layout.groups_at;
  std::memset(out + heads * layout.codes, 0,
              static_cast<std::size_t>(layout.groups_at - heads * layout.codes));
  std::memset(groups + heads * head_groups, 0,
              static_cast<std::size_t>(layout.row - layout.groups_at - heads * head_groups));
  with_type(op.dtype, op.in, [&](const auto* in) {
    const auto* x = in + row * heads * op.head_dim;
    for (std::int32_t head = 0; head < heads; ++head) {
      quantize_kv_head(op, x + std::int64_t{head} * op.head_dim, out + head * layout.codes,
                       groups + head * head_groups);
    }
  });
}

// ---- back

// Sixteen codes, or the first `count`; numbers beyond them are some codes. `d` is a multiple of 16.
inline Lanes load_codes(const std::byte* codes, KvFormat format, std::int64_t d, int count) {
  std::uint8_t some[16] = {};
  if (format == KvFormat::int8) {
    if (count == Lanes::kCount) {
      return Lanes::of_bytes(reinterpret_cast<const std::uint8_t*>(codes + d));
    }
    std::memcpy(some, codes + d, static_cast<std::size_t>(count));
    return Lanes::of_bytes(some);
  }
  if (count == Lanes::kCount) {
    return Lanes::of_half_bytes(reinterpret_cast<const std::uint8_t*>(codes + d / 2));
  }
  std::memcpy(some, codes + d / 2, static_cast<std::size_t>((count + 1) / 2));
  return Lanes::of_half_bytes(some);
}

// The numbers of a head's codes: (head_dim). They are rounded to T, so T loses nothing.
template <typename T>
inline void dequantize_head(T* to, const std::byte* codes, const std::byte* groups,
                            std::int32_t head_dim, KvFormat format) {
  for (std::int32_t first = 0; first < head_dim; first += kKvGroup) {
    KvGroup<T> group;
    std::memcpy(&group, groups, sizeof group);
    groups += sizeof group;
    const Lanes scale = Lanes::all(to_float(group.scale));
    const Lanes offset = Lanes::all(to_float(group.offset));
    const std::int32_t count = head_dim - first < kKvGroup ? head_dim - first : kKvGroup;
    if (format == KvFormat::int4 &&
        Lanes::numbers_of_int4s(to + first, codes + first / 2, count, scale, offset)) {
      continue;
    }
    in_sixteens(count, [&](std::int64_t d, int some) {
      const Lanes number =
          Lanes::fma(load_codes(codes, format, first + d, some), scale, offset);
      if (some == Lanes::kCount) {
        number.store_number(to + first + d);
      } else {
        number.store_first(to + first + d, some);
      }
    });
  }
}

}  // namespace
}  // namespace poise::cpu
