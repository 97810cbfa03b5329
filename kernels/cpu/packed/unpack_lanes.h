#pragma once
// The numbers of packed matrices (common/formats/packed_weights.h) over sixteen lanes: one input of the 16 rows
// of a panel at a time. Included after one of lanes_*.h, math_lanes.h and rows_lanes.h.

#include <array>
#include <cstdint>
#include <type_traits>

#include "common/formats/packed_weights.h"
#include "kernels/cpu/lane_kernels.h"
#include "kernels/cpu/packed/bfloat12_lanes.h"

namespace poise::cpu {
namespace {

// Codes are read in pairs: the even input k, whose codes begin at byte_of(k), and the one behind it.
struct Int4Codes {
  static constexpr bool kWhole = true;
  static std::int64_t byte_of(std::int64_t k) { return k / 2 * 16; }
  static Lanes even(const std::uint8_t* pair) { return Lanes::low_int4s(pair); }
  static Lanes odd(const std::uint8_t* pair) { return Lanes::high_int4s(pair); }
};
struct Int8Codes {
  static constexpr bool kWhole = true;
  static std::int64_t byte_of(std::int64_t k) { return k * 16; }
  static Lanes even(const std::uint8_t* pair) {
    return Lanes::int8s(reinterpret_cast<const std::int8_t*>(pair));
  }
  static Lanes odd(const std::uint8_t* pair) { return even(pair + 16); }
};
struct Float8Codes {
  static constexpr bool kWhole = false;
  static constexpr std::array<float, 256> kValues = [] {
    std::array<float, 256> values{};
    for (int i = 0; i < 256; ++i) {
      values[static_cast<std::size_t>(i)] = float8_to_float(static_cast<std::uint8_t>(i));
    }
    return values;
  }();

  static std::int64_t byte_of(std::int64_t k) { return k * 16; }
  static Lanes even(const std::uint8_t* pair) {
    alignas(64) float values[16];
    for (int i = 0; i < 16; ++i) {
      values[i] = kValues[pair[i]];
    }
    return Lanes::load(values);
  }
  static Lanes odd(const std::uint8_t* pair) { return even(pair + 16); }
};

// How the codes of a group become weights, all lanes in a few operations. AnyGroup is the definition; the
// others give its bits where their `holds_for` does.
struct AnyGroup {
  template <typename T>
  static bool holds_for(Lanes, DType) {
    return true;
  }
  explicit AnyGroup(Lanes scales) : scale(scales) {}
  template <typename T>
  Lanes weights(Lanes codes) const {
    return (codes * scale).rounded(static_cast<const T*>(nullptr));
  }
  Lanes scale;
};

// No scale is infinite or not a number, so no product is not a number.
struct FiniteGroup {
  template <typename T>
  static bool holds_for(Lanes scales, DType) {
    return Lanes::at_least(Lanes::all(0x1p100F), Lanes::abs(scales)) == 0xffff;
  }
  explicit FiniteGroup(Lanes scales) : scale(scales) {}
  template <typename T>
  Lanes weights(Lanes codes) const {
    return (codes * scale).rounded_number(static_cast<const T*>(nullptr));
  }
  Lanes scale;
};

// bfloat16 of whole codes, |code - zero| ≤ 255, by bfloat16 scales above 0 and far from the ends of the
// range. The product x has at most 16 significant bits. The float32 nearest to x · (2¹⁶ + 1) has its last bit where
// the bfloat16 of x has it, and x · 2¹⁶ is an even multiple of that bit: taking it away leaves x rounded
// half to even. scale · (2¹⁶ + 1) has 24 bits, so every other step is exact.
struct ShortGroup {
  template <typename T>
  static bool holds_for(Lanes scales, DType stored) {
    return std::is_same_v<T, BFloat16> && stored == DType::bfloat16 &&
           (Lanes::at_least(Lanes::all(0x1p60F), scales) &
            Lanes::at_least(scales, Lanes::all(0x1p-60F))) == 0xffff;
  }
  ShortGroup() = default;
  explicit ShortGroup(Lanes scales)
      : raised(scales * Lanes::all(0x1p16F + 1)), high(scales * Lanes::all(-0x1p16F)) {}
  template <typename T>
  Lanes weights(Lanes codes) const {
    return Lanes::fma(codes, high, codes * raised);
  }
  Lanes raised, high;
};

// One panel, its codes and dtype known.
template <typename Codes, typename T>
class PanelReader {
 public:
  PanelReader(const Matrix& matrix, std::int64_t panel)
      : matrix_(matrix),
        map_(packed_panel(matrix.packed, matrix.cols)),
        data_(static_cast<const std::uint8_t*>(matrix.data) + panel * map_.bytes.n) {
    if (matrix.packed.input_groups != 0) {
      const std::int64_t part = panel * kPackedRows / (matrix.rows / matrix.parts);
      input_groups_ = matrix.input_groups + part * matrix.cols;
    }
  }

  // put(k, weights) for each input in [k, end), in order.
  template <typename Put>
  void read(std::int64_t k, std::int64_t end, Put put) const {
    if (input_groups_ != nullptr) {
      for (; k < end; ++k) {
        const std::int64_t number = input_groups_[k];
        const Lanes codes = k % 2 == 0 ? Codes::even(pair_of(k)) : Codes::odd(pair_of(k));
        put(k, AnyGroup(scales_at(number)).weights<T>(codes - zeros_at(number)));
      }
      return;
    }
    const std::int64_t width = matrix_.packed.group == 0 ? matrix_.cols : matrix_.packed.group;
    while (k < end) {
      const std::int64_t number = k / width;
      const std::int64_t next = (number + 1) * width < end ? (number + 1) * width : end;
      const Lanes scales = scales_at(number);
      if (Codes::kWhole && ShortGroup::holds_for<T>(scales, matrix_.packed.scale_dtype)) {
        read_group(k, next, number, ShortGroup(scales), put);
      } else if (Codes::kWhole && FiniteGroup::holds_for<T>(scales, matrix_.packed.scale_dtype)) {
        read_group(k, next, number, FiniteGroup(scales), put);
      } else {
        read_group(k, next, number, AnyGroup(scales), put);
      }
      k = next;
    }
  }

 private:
  const std::uint8_t* pair_of(std::int64_t k) const { return data_ + Codes::byte_of(k / 2 * 2); }
  Lanes scales_at(std::int64_t number) const {
    Lanes scale = Lanes::zero();
    with_type(matrix_.packed.scale_dtype, data_ + map_.scales,
              [&](const auto* scales) { scale = Lanes::load(scales + number * 16); });
    return scale;
  }
  Lanes zeros_at(std::int64_t number) const {
    return matrix_.packed.zero_points == 0
               ? Lanes::zero()
               : Lanes::int8s(reinterpret_cast<const std::int8_t*>(data_ + map_.zeros) +
                              number * 16);
  }

  template <typename Group, typename Put>
  void read_group(std::int64_t k, std::int64_t end, std::int64_t number, const Group& group,
                  Put put) const {
    if (matrix_.packed.zero_points == 0) {
      read_codes(k, end, put,
                 [&group](Lanes codes) { return group.template weights<T>(codes); });
    } else {
      const Lanes zeros = zeros_at(number);
      read_codes(k, end, put, [&group, zeros](Lanes codes) {
        return group.template weights<T>(codes - zeros);
      });
    }
  }

  template <typename Put, typename Weights>
  void read_codes(std::int64_t k, std::int64_t end, Put put, Weights weights) const {
    if (k % 2 != 0 && k < end) {
      put(k, weights(Codes::odd(pair_of(k))));
      ++k;
    }
    for (; k + 1 < end; k += 2) {
      const Lanes even = weights(Codes::even(pair_of(k)));
      const Lanes odd = weights(Codes::odd(pair_of(k)));
      put(k, even);
      put(k + 1, odd);
    }
    if (k < end) {
      put(k, weights(Codes::even(pair_of(k))));
    }
  }

  const Matrix& matrix_;
  const PackedPanel map_;
  const std::uint8_t* data_;
  const std::uint16_t* input_groups_ = nullptr;
};

// put(k, weights) for the inputs [first, end) of a panel's 16 rows.
template <typename T, typename Put>
inline void read_panel(const Matrix& matrix, std::int64_t panel, std::int64_t first,
                       std::int64_t end, Put put) {
  switch (matrix.packed.codes) {
    case Codes::bfloat12:
      return Bfloat12Reader(matrix, panel).read(first, end, put);
    case Codes::int4:
      return PanelReader<Int4Codes, T>(matrix, panel).read(first, end, put);
    case Codes::float8:
      return PanelReader<Float8Codes, T>(matrix, panel).read(first, end, put);
    default:
      return PanelReader<Int8Codes, T>(matrix, panel).read(first, end, put);
  }
}

// out[(k - first) · 16 + i]: row 16 · panel + i, input k in [first, end), as float32.
inline void unpack_columns(const Matrix& matrix, std::int64_t panel, std::int64_t first,
                           std::int64_t end, float* out) {
  with_type(matrix.dtype, matrix.data, [&](const auto* typed) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(typed)>>;
    read_panel<T>(matrix, panel, first, end,
                  [&](std::int64_t k, Lanes weights) { weights.store(out + (k - first) * 16); });
  });
}

inline void unpack_panel(const Unpack& op, std::int64_t panel) {
  const std::int64_t cols = op.weight.cols;
  with_type(op.weight.dtype, op.out, [&](auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
    read_panel<T>(op.weight, panel, 0, cols, [&](std::int64_t k, Lanes weights) {
      if constexpr (std::is_same_v<T, BFloat16>) {
        weights.store_exact(out + (panel * cols + k) * 16);
      } else {
        weights.store(out + (panel * cols + k) * 16);
      }
    });
  });
}

}  // namespace
}  // namespace poise::cpu
