#include "loader/sources/bfloat12_panel.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/formats/packed_weights.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::size_t kRows = kPackedRows, kGroup = kBfloat12Group;
constexpr std::int16_t kExponents = 256, kCoded = kBfloat12Escape;

// Vectors of 16 bytes, which every compiler and processor of ours has.
using Bytes16 = std::uint8_t __attribute__((vector_size(16)));
using Words8 = std::int16_t __attribute__((vector_size(16)));
constexpr std::size_t kEach = 8;  // words of a vector

template <typename Vector>
Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// The lower bytes of sixteen words.
Bytes16 narrowed(Words8 first, Words8 second) {
  return __builtin_shufflevector(reinterpret_cast<Bytes16>(first),
                                 reinterpret_cast<Bytes16>(second), 0, 2, 4, 6, 8, 10, 12, 14, 16,
                                 18, 20, 22, 24, 26, 28, 30);
}

Bytes16 lower_interleaved(Bytes16 a, Bytes16 b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
Bytes16 upper_interleaved(Bytes16 a, Bytes16 b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}
Words8 lower_interleaved(Words8 a, Words8 b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
Words8 upper_interleaved(Words8 a, Words8 b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

// One of the log2(kSize) rounds that transpose a square: row i and row i + kSize / 2 are interleaved.
template <typename Vector, std::size_t kSize>
void interleave(const Vector (&rows)[kSize], Vector (&to)[kSize]) {
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kSize / 2; ++i) {
    to[2 * i] = lower_interleaved(rows[i], rows[i + kSize / 2]);
    to[2 * i + 1] = upper_interleaved(rows[i], rows[i + kSize / 2]);
  }
}

// `width` columns of sixteen rows of numbers become `width` rows: to[c][r] = from[r][c]. A vector holds kSize of
// the numbers, and `width` is a multiple of that.
template <typename Vector, std::size_t kSize>
void put_columns(const std::byte* from, std::size_t width, std::byte* to) {
  constexpr std::size_t kNumber = sizeof(Vector) / kSize;
  for (std::size_t row = 0; row < kRows; row += kSize) {
    for (std::size_t column = 0; column < width; column += kSize) {
      Vector square[kSize];
      for (std::size_t i = 0; i < kSize; ++i) {
        square[i] = load<Vector>(from + ((row + i) * width + column) * kNumber);
      }
      Vector other[kSize];
      interleave(square, other);
      interleave(other, square);
      interleave(square, other);
      if constexpr (kSize == 16) {
        interleave(other, square);
      }
      const Vector* const columns = kSize == 16 ? square : other;
      for (std::size_t i = 0; i < kSize; ++i) {
        std::memcpy(to + ((column + i) * kRows + row) * kNumber, &columns[i], sizeof(Vector));
      }
    }
  }
}

// Of one row's group; what is missing at the end of a row is zeros.
struct Group {
  std::array<std::int16_t, kGroup> bits, exponents, codes;
  std::int16_t base;
  int escapes;
};

void encode(Group& group, std::int16_t base) {
  Words8 escapes{};
  for (std::size_t i = 0; i < kGroup; i += kEach) {
    const auto exponents = load<Words8>(&group.exponents[i]);
    const Words8 below = base - exponents;
    const Words8 none = exponents == 0;
    const Words8 coded = (below >= 0) & (below < kCoded) & ~none;
    const Words8 escaped = ~coded & ~none;
    const Words8 codes = (below & coded) | (std::int16_t{kBfloat12Escape} & escaped) |
                         (std::int16_t{kBfloat12NoExponent} & none);
    std::memcpy(&group.codes[i], &codes, sizeof codes);
    escapes -= escaped;
  }
  group.base = base;
  group.escapes = 0;
  for (std::size_t i = 0; i < kEach; ++i) {
    group.escapes += escapes[i];
  }
}

// The one that leaves the fewest escapes, the largest of these.
std::int16_t best_base(const Group& group) {
  std::array<int, kExponents> count{};
  for (const std::int16_t exponent : group.exponents) {
    ++count[static_cast<std::size_t>(exponent)];
  }
  std::int16_t best = 0;
  int most = 0;
  for (std::int16_t base = kExponents - 1; base > 0; --base) {
    if (count[static_cast<std::size_t>(base)] == 0) {
      continue;
    }
    int covered = 0;
    for (std::int16_t code = 0; code < kCoded && code < base; ++code) {
      covered += count[static_cast<std::size_t>(base - code)];
    }
    if (covered > most) {
      most = covered;
      best = base;
    }
  }
  return best;
}

void encode(Group& group) {
  Words8 largest{};
  for (std::size_t i = 0; i < kGroup; i += kEach) {
    const Words8 exponents = load<Words8>(&group.bits[i]) >> 7 & 0xff;
    std::memcpy(&group.exponents[i], &exponents, sizeof exponents);
    const Words8 larger = exponents > largest;
    largest = (exponents & larger) | (largest & ~larger);
  }
  std::int16_t base = 0;
  for (std::size_t i = 0; i < kEach; ++i) {
    base = std::max<std::int16_t>(base, largest[i]);
  }
  encode(group, base);
  if (group.escapes > 0) {
    encode(group, best_base(group));
  }
}

class PanelWriter {
 public:
  PanelWriter(std::span<const std::byte> rows, std::span<std::byte> panel)
      : rows_(rows),
        cols_(rows.size() / kRows / 2),
        panel_(panel),
        map_(bfloat12_panel(static_cast<std::int32_t>(cols_))) {
    check(panel.size() == static_cast<std::size_t>(map_.bytes.n), "a panel is written whole");
  }

  bool write() {
    for (std::size_t first = 0; first < cols_; first += kGroup) {
      write_group(first, std::min(kGroup, cols_ - first));
    }
    const auto room = static_cast<std::size_t>(map_.room);
    if (escapes_.size() > room) {
      return false;
    }
    std::ranges::sort(escapes_);
    escapes_.resize(room, kNoEscape);
    std::memcpy(at(map_.escapes), escapes_.data(), room * sizeof escapes_[0]);
    return true;
  }

 private:
  static constexpr std::size_t kPairs = kGroup / 2;

  std::byte* at(std::int64_t offset) { return panel_.data() + offset; }

  // `count` inputs of all rows.
  void write_group(std::size_t first, std::size_t count) {
    for (std::size_t row = 0; row < kRows; ++row) {
      Group group;
      std::memcpy(group.bits.data(), rows_.data() + (row * cols_ + first) * 2, count * 2);
      std::fill(group.bits.begin() + static_cast<std::ptrdiff_t>(count), group.bits.end(), 0);
      encode(group);
      put_row(group, row);
      *at(map_.bases + static_cast<std::int64_t>(first / kGroup * kRows + row)) =
          static_cast<std::byte>(group.base);
      note_escapes(group, first, row);
    }
    std::array<std::byte, kPairs * kRows * 2> rest, codes;
    put_columns<Words8, 8>(rest_.data(), kPairs, rest.data());
    put_columns<Bytes16, 16>(codes_.data(), kPairs, codes.data());
    const std::size_t bytes = (count + 1) / 2 * kRows;
    std::memcpy(at(static_cast<std::int64_t>(first * kRows)), rest.data(), bytes * 2);
    std::memcpy(at(map_.codes + static_cast<std::int64_t>(first * kRows / 2)), codes.data(), bytes);
  }

  void put_row(const Group& group, std::size_t row) {
    std::array<Bytes16, kGroup / 16> codes;
    for (std::size_t i = 0; i < kGroup; i += 16) {
      const auto rest = [&](std::size_t at) {
        const auto bits = load<Words8>(&group.bits[at]);
        return (bits >> 8 & 0x80) | (bits & 0x7f);
      };
      const Bytes16 bytes = narrowed(rest(i), rest(i + kEach));
      std::memcpy(&rest_[row * kGroup + i], &bytes, sizeof bytes);
      codes[i / 16] =
          narrowed(load<Words8>(&group.codes[i]), load<Words8>(&group.codes[i + kEach]));
    }
    for (std::size_t i = 0; i < kPairs; i += 16) {
      const auto halves = [&](std::size_t at) {  // of two bytes, the even input's first
        const auto pairs = reinterpret_cast<Words8>(codes[at]);
        return pairs | pairs >> 4;
      };
      const Bytes16 bytes = narrowed(halves(i / 8), halves(i / 8 + 1));
      std::memcpy(&codes_[row * kPairs + i], &bytes, sizeof bytes);
    }
  }

  void note_escapes(const Group& group, std::size_t first, std::size_t row) {
    for (std::size_t i = 0; group.escapes > 0 && i < kGroup; ++i) {
      if (group.codes[i] == kBfloat12Escape) {
        escapes_.push_back(escape_at(static_cast<std::int64_t>(first + i),
                                     static_cast<std::int64_t>(row),
                                     static_cast<std::uint32_t>(group.exponents[i])));
      }
    }
  }

  const std::span<const std::byte> rows_;
  const std::size_t cols_;
  const std::span<std::byte> panel_;
  const Bfloat12Panel map_;
  std::array<std::byte, kRows * kGroup> rest_;   // (16, group)
  std::array<std::byte, kRows * kPairs> codes_;  // (16, group / 2)
  std::vector<std::uint32_t> escapes_;
};

}  // namespace

bool pack_bfloat12(std::span<const std::byte> rows, std::span<std::byte> panel) {
  return PanelWriter(rows, panel).write();
}

}  // namespace poise
