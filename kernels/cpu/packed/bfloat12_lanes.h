#pragma once
// The numbers of bfloat12 panels (common/formats/bfloat12.h) over sixteen lanes: one input of the 16 rows of a
// panel at a time. Included after one of lanes_*.h.

#include <bit>
#include <cstdint>

#include "common/formats/bfloat12.h"
#include "kernels/kernels.h"

namespace poise::cpu {
namespace {

// The lanes of one input, to whose escapes' numbers the exponents are added: by those from `escapes` to
// `end` that are of the same input.
[[gnu::noinline]] Lanes with_escapes(Lanes coded, const std::uint32_t* escapes,
                                     const std::uint32_t* end) {
  float numbers[16];
  coded.store(numbers);
  const std::int64_t input = input_of_escape(*escapes);
  for (; escapes < end && input_of_escape(*escapes) == input; ++escapes) {
    float& number = numbers[row_of_escape(*escapes)];
    number = std::bit_cast<float>(std::bit_cast<std::uint32_t>(number) |
                                  exponent_of_escape(*escapes) << 23);
  }
  return Lanes::load(numbers);
}

// A place in a panel's table.
class Escapes {
 public:
  Escapes() = default;
  Escapes(const std::uint8_t* panel, const Bfloat12Panel& map)
      : next_(reinterpret_cast<const std::uint32_t*>(panel + map.escapes)),
        end_(next_ + map.room) {}

  // To the first at input k or behind it.
  void seek(std::int64_t k) {
    std::int64_t count = end_ - next_;
    while (count > 0) {
      const std::int64_t half = count / 2;
      const bool before = input_of_escape(next_[half]) < k;
      next_ += before ? half + 1 : 0;
      count = before ? count - half - 1 : half;
    }
  }
  // The input of this one; beyond all inputs where there is no other.
  std::int64_t input() const { return input_of_escape(next_ < end_ ? *next_ : kNoEscape); }
  // The lanes of input k, whole; then the place is behind its escapes.
  Lanes take(Lanes coded, std::int64_t k) {
    if (input() != k) {
      return coded;
    }
    const Lanes whole = with_escapes(coded, next_, end_);
    while (input() == k) {
      ++next_;
    }
    return whole;
  }

 private:
  const std::uint32_t* next_ = nullptr;
  const std::uint32_t* end_ = nullptr;
};

// One panel.
class Bfloat12Reader {
 public:
  Bfloat12Reader(const Matrix& matrix, std::int64_t panel)
      : map_(bfloat12_panel(matrix.cols)),
        data_(static_cast<const std::uint8_t*>(matrix.data) + panel * map_.bytes.n) {}

  // put(k, weights) for each input in [k, end), in order.
  template <typename Put>
  void read(std::int64_t k, std::int64_t end, Put put) const {
    Escapes escapes(data_, map_);
    escapes.seek(k);
    for (std::int64_t pair = k - k % 2; pair < end;) {
      const std::int64_t group = pair / kBfloat12Group;
      const std::int64_t next = (group + 1) * kBfloat12Group;
      const Lanes bases = Lanes::exponents(data_ + map_.bases + group * 16);
      for (; pair < (next < end ? next : end); pair += 2) {
        Lanes even, odd;
        Lanes::bfloat12s(data_ + pair * 16, data_ + map_.codes + pair * 8, bases, even, odd);
        if (escapes.input() <= pair + 1) [[unlikely]] {
          even = escapes.take(even, pair);
          odd = escapes.take(odd, pair + 1);
        }
        if (pair >= k) {
          put(pair, even);
        }
        if (pair + 1 < end) {
          put(pair + 1, odd);
        }
      }
    }
  }

 private:
  const Bfloat12Panel map_;
  const std::uint8_t* data_;
};

// Some panels side by side, for multiply_codes.
struct PanelsOfBfloat12 {
  const std::uint8_t* data;  // the first panel's
  Bfloat12Panel map;

  std::int64_t width() const { return kBfloat12Group; }
  const std::uint8_t* at(std::int64_t panel, std::int64_t byte) const {
    return data + panel * map.bytes.n + byte;
  }

  template <int kPanels>
  class Reader {
   public:
    Reader(const PanelsOfBfloat12& panels, std::int64_t first) : panels_(panels) {
      for (int p = 0; p < kPanels; ++p) {
        escapes_[p] = Escapes(panels.at(p, 0), panels.map);
        escapes_[p].seek(first);
      }
      find_next();
    }

    void begin_group(std::int64_t group, const PanelsOfBfloat12& ahead) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        bases_[p] = Lanes::exponents(panels_.at(p, panels_.map.bases + group * 16));
        __builtin_prefetch(ahead.at(p, ahead.map.bases + group * 16), 0, 2);
      }
    }
    // Inputs k, which is even, and k + 1.
    void read(std::int64_t k, const PanelsOfBfloat12& ahead, Lanes (&even)[kPanels],
              Lanes (&odd)[kPanels]) {
      const std::int64_t pair = panels_.map.codes + k * 8;
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(ahead.at(p, k * 16), 0, 2);
        __builtin_prefetch(ahead.at(p, pair), 0, 2);
        Lanes::bfloat12s(panels_.at(p, k * 16), panels_.at(p, pair), bases_[p], even[p], odd[p]);
      }
      if (next_ <= k + 1) [[unlikely]] {
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) {
          even[p] = escapes_[p].take(even[p], k);
          odd[p] = escapes_[p].take(odd[p], k + 1);
        }
        find_next();
      }
    }

   private:
    void find_next() {
      next_ = escapes_[0].input();
      for (int p = 1; p < kPanels; ++p) {
        next_ = escapes_[p].input() < next_ ? escapes_[p].input() : next_;
      }
    }

    const PanelsOfBfloat12& panels_;
    Lanes bases_[kPanels];
    Escapes escapes_[kPanels];
    std::int64_t next_;  // the first input with an escape
  };
};

}  // namespace
}  // namespace poise::cpu
