#pragma once
// The inner part of Gemm over sixteen lanes: a tile of rows by panels of 16 outputs, kept in
// registers while the inputs are walked in order. Every output is one chain of fused
// multiply-adds for every tile size: with several passes over the inputs, the chain's value is
// stored and loaded between passes. Included after one of lanes_*.h, math_lanes.h and rows_lanes.h.

#include <cstdint>

#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

// Where a tile reads its inputs: in[k, r] = data[k · kStepK + r · kStepR].
template <int kStepK_, int kStepR_>
struct Inputs {
  static constexpr int kStepK = kStepK_;
  static constexpr int kStepR = kStepR_;
  const float* data;
};

// Some panels of weights, sixteen of one input at a time.
template <typename T>
struct Panels {
  const T* data;
  std::int64_t stride;  // elements from one panel to the next

  const T* at(std::int64_t panel, std::int64_t k) const { return data + panel * stride + 16 * k; }
  Panels from(std::int64_t panel, std::int64_t k) const { return {at(panel, k), stride}; }
};

// Panels to prefetch, of any type whose sixteen numbers fill kStep bytes: so tiles are not compiled for each pair of types.
template <int kStep>
struct PanelsAhead {
  const char* data;
  std::int64_t stride;  // bytes from one panel to the next

  template <typename T>
  explicit PanelsAhead(Panels<T> panels)
      : data(reinterpret_cast<const char*>(panels.data)),
        stride(panels.stride * static_cast<std::int64_t>(sizeof(T))) {
    static_assert(16 * sizeof(T) == kStep);
  }

  const char* at(std::int64_t panel, std::int64_t k) const {
    return data + panel * stride + kStep * k;
  }
  PanelsAhead from(std::int64_t panel) const {
    PanelsAhead other = *this;
    other.data = at(panel, 0);
    return other;
  }
};

// The same where the panels are columns of one row-major matrix.
template <typename T>
struct Columns {
  const T* data;
  std::int64_t step;  // elements from one row to the next

  const T* at(std::int64_t panel, std::int64_t k) const { return data + 16 * panel + step * k; }
  Columns from(std::int64_t panel, std::int64_t k) const { return {at(panel, k), step}; }
};

struct Sums {
  float* data;
  std::int64_t stride;  // from one row to the next
};

// sums[r, 16·p + i] (+)= Σ_k in[k, r] · weight[p, k, i]. Meanwhile kAhead panels of `ahead` are
// prefetched.
template <int kRows, int kPanels, int kAhead, typename In, typename Weight, typename Ahead>
inline void multiply_tile(In in, Weight weight, std::int64_t depth, Sums sums, bool onto,
                          Ahead ahead) {
  Lanes sum[kRows][kPanels];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      sum[r][p] = onto ? Lanes::load(sums.data + r * sums.stride + 16 * p) : Lanes::zero();
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    Lanes w[kPanels];
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      w[p] = Lanes::load(weight.at(p, k));
    }
#pragma GCC unroll 16
    for (int p = 0; p < kAhead; ++p) {
      __builtin_prefetch(ahead.at(p, k), 0, 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Lanes x = Lanes::all(in.data[k * In::kStepK + r * In::kStepR]);
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        sum[r][p] = Lanes::fma(x, w[p], sum[r][p]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      sum[r][p].store(sums.data + r * sums.stride + 16 * p);
    }
  }
}

// Panels side by side in a tile of `rows` rows: as many as registers hold, a power of two.
constexpr int tile_panels(int rows) {
  const int registers = Lanes::kTileRows * Lanes::kTilePanels;
  int panels = 1;
  while (2 * panels * rows <= registers && panels < 8) {
    panels *= 2;
  }
  return panels;
}

// What multiply_panels prefetches: nothing.
struct NothingAhead {
  static constexpr int lines(int) { return 0; }
  const void* at(std::int64_t, std::int64_t) const { return nullptr; }
};

// Any number of panels: whole tiles, then halves of them. For each input of a tile, ahead.lines(panels)
// addresses of `ahead` are prefetched.
template <int kRows, int kPanels, typename In, typename Weight, typename Ahead = NothingAhead>
inline void multiply_panels(In in, Weight weight, std::int64_t panels, std::int64_t depth,
                            Sums sums, bool onto, Ahead ahead = {}) {
  while (panels >= kPanels) {
    multiply_tile<kRows, kPanels, Ahead::lines(kPanels)>(in, weight, depth, sums, onto, ahead);
    weight = weight.from(kPanels, 0);
    sums.data += kPanels * 16;
    panels -= kPanels;
  }
  if constexpr (kPanels > 1) {
    if (panels > 0) {
      multiply_panels<kRows, kPanels / 2>(in, weight, panels, depth, sums, onto, ahead);
    }
  }
}

// Calls fn with the number of rows as a constant. REQUIRES: 1 ≤ rows ≤ kTileRows.
template <int kRows = Lanes::kTileRows, typename Fn>
inline void with_rows(int rows, Fn fn) {
  if (rows == kRows) {
    fn(std::integral_constant<int, kRows>());
  } else if constexpr (kRows > 1) {
    with_rows<kRows - 1>(rows, fn);
  }
}

// A slice's rows are divided evenly: tiles of nearly equal size.
struct Tiles {
  std::int64_t rows, count;

  explicit Tiles(std::int64_t all_rows)
      : rows(all_rows), count((all_rows + Lanes::kTileRows - 1) / Lanes::kTileRows) {}
  std::int64_t first(std::int64_t tile) const { return rows * tile / count; }
  int size(std::int64_t tile) const { return static_cast<int>(first(tile + 1) - first(tile)); }
};

// The inputs of a slice are walked in passes, so that the panels of one pass stay in the cache.
struct Passes {
  std::int64_t cols, count;

  explicit Passes(std::int64_t all_cols)
      : cols(all_cols), count(all_cols == 0 ? 1 : (all_cols + kGemmDepth - 1) / kGemmDepth) {}
  std::int64_t first(std::int64_t pass) const { return cols * pass / count; }
  std::int64_t depth(std::int64_t pass) const { return first(pass + 1) - first(pass); }
};

// packed[k, r] = from[r · stride + k] as float32, for the rows of one tile.
template <typename T>
inline void pack_tile(float* packed, const T* from, std::int64_t stride, int rows,
                      std::int64_t cols) {
  alignas(64) float square[16 * 16];
  for (std::int64_t k = 0; k < cols; k += 16) {
    const int width = cols - k < 16 ? static_cast<int>(cols - k) : 16;
    transpose_16(square, from + k, stride, rows, width);
    for (int i = 0; i < width; ++i) {
      Lanes::load(square + 16 * i).store_first(packed + (k + i) * rows, rows);
    }
  }
}

// Packed inputs of a slice: tile by tile (cols, rows of the tile).
inline void pack_rows(const GemmSlice& slice, const Tiles& tiles) {
  const Rows& in = slice.op->in;
  const std::int64_t cols = slice.op->weight.cols;
  with_type(in.dtype, row_of(in, slice.first_row), [&](const auto* from) {
    for (std::int64_t t = 0; t < tiles.count; ++t) {
      pack_tile(slice.packed + tiles.first(t) * cols, from + tiles.first(t) * in.stride, in.stride,
                tiles.size(t), cols);
    }
  });
}

// Sums of some panels to the output: bias, epilogue, residual, rounding.
inline void finish_rows(const Gemm& op, std::int64_t first_row, std::int64_t rows,
                        std::int64_t first_panel, std::int64_t panels, const float* sums,
                        std::int64_t sums_stride) {
  for (std::int64_t p = 0; p < panels; ++p) {
    const std::int64_t n = 16 * (first_panel + p);
    const int count = op.weight.rows - n < 16 ? static_cast<int>(op.weight.rows - n) : 16;
    const Lanes bias =
        op.bias == nullptr ? Lanes::zero() : load_parameter(op.bias, op.weight.dtype, n, count);
    with_type(op.out.dtype, op.out.data, [&](auto* out) {
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t at = (first_row + r) * op.out.stride + n;
        Lanes value = apply(op.epilogue, Lanes::load(sums + r * sums_stride + 16 * p) + bias);
        if (op.residual != nullptr) {
          value = value + load_some(op.residual + at, count);
        }
        store_some(value, out + at, count);
      }
    });
  }
}

// From this number of tiles on it pays to convert 16-bit panels to float32 once for all tiles.
constexpr std::int64_t kWidenFromTiles = 4;

// The panels of one slice: sums over all inputs, tile by tile, then the output.
template <typename T>
class GemmTask {
  using Prefetched = PanelsAhead<16 * sizeof(T)>;

 public:
  GemmTask(const GemmSlice& slice, const Tiles& tiles)
      : slice_(slice),
        tiles_(tiles),
        cols_(slice.op->weight.cols),
        group_(tile_panels(tiles.size(tiles.count - 1))) {}

  void run() {
    for (std::int64_t p = 0; p < slice_.panels; p += group_) {
      const std::int64_t next =
          p + group_ < slice_.panels ? slice_.first_panel + p + group_ : slice_.next_panel;
      run_group(slice_.first_panel + p, p + group_ < slice_.panels ? group_ : slice_.panels - p,
                next);
    }
  }

 private:
  Panels<T> panels_at(std::int64_t panel, std::int64_t k) const {
    return {static_cast<const T*>(slice_.op->weight.data) + (panel * cols_ + k) * 16, cols_ * 16};
  }

  void run_group(std::int64_t panel, std::int64_t panels, std::int64_t next) {
    const Passes passes(cols_);
    const Sums sums{slice_.sums, 16 * group_};
    for (std::int64_t pass = 0; pass < passes.count; ++pass) {
      const std::int64_t k = passes.first(pass);
      const Panels<T> weight = panels_at(panel, k);
      const Prefetched ahead(pass + 1 < passes.count ? panels_at(panel, passes.first(pass + 1))
                                                     : panels_at(next, 0));
      if (sizeof(T) < sizeof(float) && tiles_.count >= kWidenFromTiles) {
        multiply(widened(weight, panels, passes.depth(pass)), panels, k, passes.depth(pass), sums,
                 ahead);
      } else {
        multiply(weight, panels, k, passes.depth(pass), sums, ahead);
      }
    }
    finish_rows(*slice_.op, slice_.first_row, slice_.rows, panel, panels, sums.data, sums.stride);
  }

  Panels<float> widened(Panels<T> weight, std::int64_t panels, std::int64_t depth) const {
    for (std::int64_t p = 0; p < panels; ++p) {
      for (std::int64_t k = 0; k < depth; ++k) {
        Lanes::load(weight.at(p, k)).store(slice_.wide + (p * kGemmDepth + k) * 16);
      }
    }
    return {slice_.wide, kGemmDepth * 16};
  }

  // One pass: inputs [k, k + depth).
  template <typename Wide>
  void multiply(Panels<Wide> weight, std::int64_t panels, std::int64_t k, std::int64_t depth,
                Sums sums, Prefetched ahead) const {
    for (std::int64_t t = 0; t < tiles_.count; ++t) {
      with_rows(tiles_.size(t), [&](auto constant) {
        constexpr int kRows = decltype(constant)::value;
        constexpr int kPanels = tile_panels(kRows);
        const Inputs<kRows, 1> in{slice_.packed + tiles_.first(t) * cols_ + k * kRows};
        const Sums to{sums.data + tiles_.first(t) * sums.stride, sums.stride};
        if constexpr (std::is_same_v<Wide, T>) {  // others are made for several tiles
          if (panels == kPanels && tiles_.count == 1) {
            multiply_tile<kRows, kPanels, kPanels>(in, weight, depth, to, k > 0, ahead);
            return;
          }
        }
        if (panels != kPanels) {
          multiply_panels<kRows, kPanels>(in, weight, panels, depth, to, k > 0);
        } else {
          // Each tile prefetches one panel; with more tiles than panels, the others repeat the last.
          multiply_tile<kRows, kPanels, 1>(in, weight, depth, to, k > 0,
                                           ahead.from(t < panels ? t : panels - 1));
        }
      });
    }
  }

  const GemmSlice& slice_;
  const Tiles& tiles_;
  const std::int64_t cols_, group_;
};

// Some packed panels side by side, whose codes become weights as they are multiplied: sums over a tile of
// them read pairs of inputs with a Reader. PanelsOfBfloat12 is another such type.
template <typename Codes>
struct PanelsOfCodes {
  const std::uint8_t* data;  // the first panel's
  std::int64_t stride;       // bytes from one panel to the next
  std::int64_t scales;       // bytes from a panel's start to its scales, bfloat16
  std::int64_t inputs;       // of a group

  std::int64_t width() const { return inputs; }
  const std::uint8_t* at(std::int64_t panel, std::int64_t byte) const {
    return data + panel * stride + byte;
  }
  const BFloat16* scales_at(std::int64_t panel, std::int64_t group) const {
    return reinterpret_cast<const BFloat16*>(at(panel, scales)) + group * kPackedRows;
  }

  template <int kPanels>
  class Reader {
   public:
    Reader(const PanelsOfCodes& panels, std::int64_t) : panels_(panels) {}

    void begin_group(std::int64_t group, const PanelsOfCodes& ahead) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        groups_[p] = ShortGroup(Lanes::load(panels_.scales_at(p, group)));
        __builtin_prefetch(ahead.scales_at(p, group), 0, 2);
      }
    }
    // Inputs k, which is even, and k + 1.
    void read(std::int64_t k, const PanelsOfCodes& ahead, Lanes (&even)[kPanels],
              Lanes (&odd)[kPanels]) const {
      const std::int64_t byte = Codes::byte_of(k);
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(ahead.at(p, byte), 0, 2);
        even[p] = groups_[p].template weights<BFloat16>(Codes::even(panels_.at(p, byte)));
        odd[p] = groups_[p].template weights<BFloat16>(Codes::odd(panels_.at(p, byte)));
      }
    }

   private:
    const PanelsOfCodes& panels_;
    ShortGroup groups_[kPanels];
  };
};

// multiply_tile over inputs [first, first + depth) of packed panels, whose scales, if they have any, are all
// ShortGroup's. The weights are also written to `kept`, (panels, kGemmDepth, 16), if it is there. Meanwhile `ahead` is
// prefetched. Two inputs become weights before either is multiplied: else the multiply-adds of each would
// wait for its own conversion. A last input without a pair is read with what lies behind it in the panel, which is
// not multiplied. REQUIRES: first and panels.width() are even.
template <int kRows, int kPanels, typename Weights, typename In>
inline void multiply_codes(In in, const Weights& panels, std::int64_t first, std::int64_t depth,
                           Sums sums, bool onto, float* kept, const Weights& ahead) {
  Lanes sum[kRows][kPanels];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      sum[r][p] = onto ? Lanes::load(sums.data + r * sums.stride + 16 * p) : Lanes::zero();
    }
  }
  const auto multiply = [&](std::int64_t k, const Lanes(&w)[kPanels])
      __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Lanes x = Lanes::all(in.data[k * In::kStepK + r * In::kStepR]);
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        sum[r][p] = Lanes::fma(x, w[p], sum[r][p]);
      }
    }
  };
  typename Weights::template Reader<kPanels> reader(panels, first);
  Lanes even[kPanels], odd[kPanels];
  for (std::int64_t k = 0; k < depth;) {
    const std::int64_t group = (first + k) / panels.width();
    reader.begin_group(group, ahead);
    const std::int64_t behind = (group + 1) * panels.width() - first;
    for (const std::int64_t end = behind < depth ? behind : depth; k < end; k += 2) {
      reader.read(first + k, ahead, even, odd);
      if (kept != nullptr) {
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) {
          even[p].store(kept + (p * kGemmDepth + k) * 16);
          odd[p].store(kept + (p * kGemmDepth + k + 1) * 16);
        }
      }
      multiply(k, even);
      if (k + 1 < depth) {
        multiply(k + 1, odd);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      sum[r][p].store(sums.data + r * sums.stride + 16 * p);
    }
  }
}

// The panels of one slice of a packed weight. Where it is quick (ShortGroup), the last tile makes the
// weights as it multiplies, and keeps them for the others. Elsewhere some inputs of some panels become
// float32 first. The chains are those of GemmTask.
class PackedGemmTask {
 public:
  PackedGemmTask(const GemmSlice& slice, const Tiles& tiles)
      : slice_(slice),
        tiles_(tiles),
        cols_(slice.op->weight.cols),
        group_(tile_panels(tiles.size(tiles.count - 1))) {}

  void run() const {
    for (std::int64_t p = 0; p < slice_.panels; p += group_) {
      const std::int64_t next =
          p + group_ < slice_.panels ? slice_.first_panel + p + group_ : slice_.next_panel;
      run_group(slice_.first_panel + p, p + group_ < slice_.panels ? group_ : slice_.panels - p,
                next);
    }
  }

 private:
  static constexpr std::int64_t kPanelInputs = 512;  // unpacked at a time: 32 KiB
  static_assert(kPanelInputs * 16 <= kGemmWideFloats);
  // Of several tiles the last, the largest, has more than kTileRows / 2 rows, so group_ is at most kTilePanels.
  static_assert(Lanes::kTilePanels * kGemmDepth * 16 <= kGemmWideFloats && kGemmDepth % 2 == 0);

  void run_group(std::int64_t panel, std::int64_t panels, std::int64_t next) const {
    const Sums sums{slice_.sums, 16 * group_};
    if (panels != group_ || !multiply_quickly(panel, next, sums)) {
      unpack_and_multiply(panel, panels, sums);
    }
    finish_rows(*slice_.op, slice_.first_row, slice_.rows, panel, panels, sums.data, sums.stride);
  }

  void unpack_and_multiply(std::int64_t panel, std::int64_t panels, Sums sums) const {
    const std::int64_t most = kPanelInputs / group_;
    std::int64_t k = 0;
    do {
      const std::int64_t end = cols_ - k < most ? cols_ : k + most;
      for (std::int64_t p = 0; p < panels; ++p) {
        unpack_columns(slice_.op->weight, panel + p, k, end, slice_.wide + p * most * 16);
      }
      multiply({slice_.wide, most * 16}, panels, k, end - k, sums, tiles_.count);
      k = end;
    } while (k < cols_);
  }

  // A whole tile's panels; false if something else has to do it, then nothing is done.
  bool multiply_quickly(std::int64_t panel, std::int64_t next, Sums sums) const {
    const Matrix& weight = slice_.op->weight;
    if (weight.dtype != DType::bfloat16 || weight.packed.scale_dtype != DType::bfloat16 ||
        weight.packed.zero_points != 0 || weight.packed.input_groups != 0 ||
        weight.packed.group % 2 != 0) {
      return false;
    }
    switch (weight.packed.codes) {
      case Codes::int8:
        return multiply_short_groups<Int8Codes>(panel, next, sums);
      case Codes::int4:
        return multiply_short_groups<Int4Codes>(panel, next, sums);
      case Codes::bfloat12:
        multiply_pairs(panels_of_bfloat12(panel), panels_of_bfloat12(next), sums);
        return true;
      default:
        return false;
    }
  }

  PanelsOfBfloat12 panels_of_bfloat12(std::int64_t panel) const {
    const Bfloat12Panel map = bfloat12_panel(slice_.op->weight.cols);
    return {static_cast<const std::uint8_t*>(slice_.op->weight.data) + panel * map.bytes.n, map};
  }

  template <typename Codes>
  PanelsOfCodes<Codes> panels_of_codes(std::int64_t panel) const {
    const Matrix& weight = slice_.op->weight;
    const PackedPanel map = packed_panel(weight.packed, weight.cols);
    return {.data = static_cast<const std::uint8_t*>(weight.data) + panel * map.bytes.n,
            .stride = map.bytes.n,
            .scales = map.scales,
            .inputs = weight.packed.group == 0 ? cols_ + cols_ % 2 : weight.packed.group};
  }

  template <typename Codes>
  bool multiply_short_groups(std::int64_t panel, std::int64_t next, Sums sums) const {
    const auto panels = panels_of_codes<Codes>(panel);
    for (std::int64_t p = 0; p < group_; ++p) {
      for (std::int64_t group = 0; group * panels.width() < cols_; ++group) {
        const Lanes scales = Lanes::load(panels.scales_at(p, group));
        if (!ShortGroup::holds_for<BFloat16>(scales, DType::bfloat16)) {
          return false;
        }
      }
    }
    multiply_pairs(panels, panels_of_codes<Codes>(next), sums);
    return true;
  }

  template <typename Weights>
  void multiply_pairs(const Weights& panels, const Weights& next, Sums sums) const {
    const std::int64_t last = tiles_.count - 1;
    const Sums last_sums{sums.data + tiles_.first(last) * sums.stride, sums.stride};
    float* const kept = last == 0 ? nullptr : slice_.wide;
    const std::int64_t most = last == 0 ? cols_ : kGemmDepth;
    std::int64_t k = 0;
    do {
      const std::int64_t depth = cols_ - k < most ? cols_ - k : most;
      with_rows(tiles_.size(last), [&](auto constant) {
        constexpr int kRows = decltype(constant)::value;
        constexpr int kPanels = tile_panels(kRows);  // that is group_
        const Inputs<kRows, 1> in{slice_.packed + tiles_.first(last) * cols_ + k * kRows};
        multiply_codes<kRows, kPanels>(in, panels, k, depth, last_sums, k > 0, kept, next);
      });
      multiply({slice_.wide, kGemmDepth * 16}, group_, k, depth, sums, last);
      k += depth;
    } while (k < cols_);
  }

  // The first `tiles`.
  void multiply(Panels<float> weight, std::int64_t panels, std::int64_t k, std::int64_t depth,
                Sums sums, std::int64_t tiles) const {
    for (std::int64_t t = 0; t < tiles; ++t) {
      with_rows(tiles_.size(t), [&](auto constant) {
        constexpr int kRows = decltype(constant)::value;
        const Inputs<kRows, 1> in{slice_.packed + tiles_.first(t) * cols_ + k * kRows};
        const Sums to{sums.data + tiles_.first(t) * sums.stride, sums.stride};
        multiply_panels<kRows, tile_panels(kRows)>(in, weight, panels, depth, to, k > 0);
      });
    }
  }

  const GemmSlice& slice_;
  const Tiles& tiles_;
  const std::int64_t cols_, group_;
};

inline void gemm_slice(const GemmSlice& slice) {
  const Tiles tiles(slice.rows);
  if (!slice.is_packed) {
    pack_rows(slice, tiles);
  }
  if (slice.op->weight.packed.is_packed()) {
    PackedGemmTask(slice, tiles).run();
    return;
  }
  with_type(slice.op->weight.dtype, slice.op->weight.data, [&](const auto* typed) {
    GemmTask<std::remove_cv_t<std::remove_pointer_t<decltype(typed)>>>(slice, tiles).run();
  });
}

}  // namespace
}  // namespace poise::cpu
