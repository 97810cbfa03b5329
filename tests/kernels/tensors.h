#pragma once
// What the kernel tests share: seeded random numbers, arrays of a stored type that can be read
// back as numbers, and every way to run an operation that must give the same bits.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/packed_matrix.h"

namespace poise::test {

inline constexpr DType kAllTypes[] = {DType::float32, DType::float16, DType::bfloat16};

// Half a unit in the last place of `dtype`, relative.
inline double rounding(DType dtype) {
  return dtype == DType::float32 ? 0x1p-24 : dtype == DType::float16 ? 0x1p-11 : 0x1p-8;
}

// Numbers of a stored type.
class Stored {
 public:
  Stored(DType dtype, std::size_t count)
      : dtype_(dtype), bytes_(count * static_cast<std::size_t>(size_of(dtype).n)) {}
  // `values` rounded.
  Stored(DType dtype, const std::vector<float>& values) : Stored(dtype, values.size()) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      set(i, values[i]);
    }
  }

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  DType dtype() const { return dtype_; }
  std::size_t size() const { return bytes_.size() / static_cast<std::size_t>(size_of(dtype_).n); }
  float operator[](std::size_t i) const {
    switch (dtype_) {
      case DType::float32:
        return get<float>(i);
      case DType::float16:
        return to_float(get<Half>(i));
      default:
        return to_float(get<BFloat16>(i));
    }
  }
  void set(std::size_t i, float value) {
    switch (dtype_) {
      case DType::float32:
        return put(i, value);
      case DType::float16:
        return put(i, to_half(value));
      default:
        return put(i, to_bfloat16(value));
    }
  }
  // `count` numbers of `from`, of the same type.
  void copy(std::size_t at, const Stored& from, std::size_t first, std::size_t count) {
    const auto size = static_cast<std::size_t>(size_of(dtype_).n);
    std::memcpy(bytes_.data() + at * size, from.bytes_.data() + first * size, count * size);
  }
  friend bool operator==(const Stored& a, const Stored& b) { return a.bytes_ == b.bytes_; }

 private:
  template <typename T>
  T get(std::size_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <typename T>
  void put(std::size_t i, T value) {
    std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
  }

  DType dtype_;
  std::vector<std::byte> bytes_;
};

inline std::vector<float> normal_values(std::uint32_t seed, std::size_t count, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

// A weight as the device keeps it.
class PackedWeight {
 public:
  PackedWeight(const Stored& rows_by_cols, std::int32_t rows, std::int32_t cols)
      : rows_(rows),
        cols_(cols),
        packed_(rows_by_cols.dtype(), static_cast<std::size_t>(cpu::panel_count(rows)) * 16 *
                                          static_cast<std::size_t>(cols)) {
    cpu::pack_matrix(packed_.data(), rows_by_cols.data(), rows, cols, packed_.dtype());
  }
  Matrix matrix() const { return {packed_.data(), rows_, cols_, packed_.dtype()}; }

 private:
  std::int32_t rows_, cols_;
  Stored packed_;
};

// Runs `fn` under one instruction set and goes back to the best.
template <typename Fn>
void under(cpu::Isa isa, Fn fn) {
  cpu::force_isa(isa);
  fn();
  cpu::force_isa(std::nullopt);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace poise::test
