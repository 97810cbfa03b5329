#pragma once
// The softmax over sixteen rows of one key-value head: tile by tile within a slice of the context
// (attention_context.cuh), then slice by slice. Additions and multiplications are written as
// intrinsics, so that no two copies of the code are contracted differently.

#include <cstdint>
#include <limits>

#include "kernels/cuda/attention_context.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr int kAttentionWarps = kAttentionThreads / kWarp;

// What weights are powers of two of, over a score.
__device__ __forceinline__ float score_factor(const Attention& op) {
  return op.scale * 1.4426950408889634f;  // log2 e
}

// How a later slice joins the ones before: both are scaled to the larger of their maxima.
struct SliceMerge {
  float maximum, before, after;

  __device__ __forceinline__ SliceMerge(float old, float later, float factor) {
    maximum = fmaxf(old, later);
    before = power_of_two(__fmul_rn(__fsub_rn(old, maximum), factor));
    after = power_of_two(__fmul_rn(__fsub_rn(later, maximum), factor));
  }
  __device__ __forceinline__ float operator()(float old, float later) const {
    return __fmaf_rn(old, before, __fmul_rn(later, after));
  }
};

// Which of a place's rows a warp has.
struct RowSpan {
  int rows;  // ≤ 0: none
  int first_position, last_position;

  // A bit for each slice of which any of the rows sees a position.
  __device__ unsigned slices_seen(int window) const {
    return rows > 0 ? slices_of(first_seen(first_position, window), last_position) : 0u;
  }
};

// Of a warp. kShare 1: it has the sixteen rows for itself. kShare 4: the block's four warps have them
// together: each scores sixteen of a tile's positions, weighs all, and sums columns of its own. A
// number is made of the same operations in the same order both ways.
//
// Lane 4·g + t holds of rows g and g + 8 the columns 2t and 2t + 1 of every eight.
template <typename T, int kDim, int kShare>
class WarpRows {
  using Sizes = TileSizes<kDim>;
  static constexpr int kScoreTiles = kTilePositions / 8;
  static constexpr int kPairs = (kDim / 16 + kShare - 1) / kShare;  // of eight columns each
  static constexpr int kSumTiles = 2 * kPairs;
  static constexpr float kMostExponent = 8;  // of a weight; float16 ends at 2^16

 public:
  // Slices already merged, while the next one is computed. Not a member: where a warp has sixteen rows
  // for itself there are no registers for it, and it lies in local memory (see end_slice).
  struct Merged {
    float4 sums[kSumTiles];
    float maximum[2], denominator[2];

    __device__ float4& sum(int n) { return sums[n]; }
  };

  __device__ WarpRows(const Attention& op, const AttentionPlace& place)
      : WarpRows(op, place, kShare == 1 ? turn() * kWarpRows : 0) {}

  // `first`: of the place's rows, this warp's first. Not `from_memory`: the queries are loaded later.
  __device__ WarpRows(const Attention& op, const AttentionPlace& place, int first,
                      bool from_memory = true)
      : lane_(threadIdx.x % kWarp),
        part_(kShare == 1 ? 0 : static_cast<int>(threadIdx.x) / kWarp),
        window_(op.window),
        factor_(score_factor(op)) {
    span_.rows = min(kWarpRows, place.rows - first);
    span_.first_position = place.position_of(first);
    span_.last_position = place.position_of(first + span_.rows - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + lane_ / 4 + 8 * half;
      position_[half] = place.position_of(row);
      start_[half] = place.offset_of(op, row) + 2 * (lane_ % 4);
    }
    const T* q = static_cast<const T*>(op.q);
#pragma unroll
    for (int k = 0; from_memory && k < kDim / 16; ++k) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int column = 16 * k + part / 2 * 8;
        const bool exists = has_row(part % 2) && column < op.head_dim;
        q_[k][part] =
            exists ? *reinterpret_cast<const std::uint32_t*>(q + start_[part % 2] + column) : 0;
      }
    }
    begin_slice();
  }

  // Whether any of the rows sees a position of the tile.
  __device__ bool see(int tile) const {
    const int first = tile * kTilePositions;
    return span_.rows > 0 && first <= span_.last_position &&
           first + kTilePositions > first_seen(span_.first_position, window_);
  }

  // Scores of the tile, then its weights; maximum, denominator and sums follow. For kShare 1.
  __device__ void weigh(int tile, SharedAddress keys) {
    float scores[kScoreTiles][4];
    score(scores, keys);
    weigh(tile, scores);
  }

  // The same in two steps, all warps behind the first before any begins the second, and behind the
  // second before any begins the next first. `shared` (kWarpRows, kScorePitch). For kShare 4.
  __device__ void score(float* shared, SharedAddress keys) const {
    constexpr int kMine = kScoreTiles / kShare;
    float scores[kMine][4];
    score(scores, keys + static_cast<unsigned>(8 * kMine * part_ * Sizes::kPitch));
    float* to = shared + lane_ / 4 * kScorePitch + 8 * kMine * part_ + 2 * (lane_ % 4);
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      *reinterpret_cast<float2*>(to + 8 * n) = {scores[n][0], scores[n][1]};
      if (span_.rows > 8) {
        *reinterpret_cast<float2*>(to + 8 * kScorePitch + 8 * n) = {scores[n][2], scores[n][3]};
      }
    }
  }
  __device__ void weigh(int tile, const float* shared) {
    float scores[kScoreTiles][4];
    const float* from = shared + lane_ / 4 * kScorePitch + 2 * (lane_ % 4);
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 a = *reinterpret_cast<const float2*>(from + 8 * n);
      const float2 b = span_.rows > 8
                           ? *reinterpret_cast<const float2*>(from + 8 * kScorePitch + 8 * n)
                           : float2{0, 0};
      scores[n][0] = a.x;
      scores[n][1] = a.y;
      scores[n][2] = b.x;
      scores[n][3] = b.y;
    }
    weigh(tile, scores);
  }

  __device__ void add_values(SharedAddress values) {
    // Matrices: 8 positions × 8 columns, transposed; columns + 8 in the upper half of the lanes.
    const SharedAddress row =
        values + static_cast<unsigned>(lane_ % 16 * Sizes::kPitch + lane_ / 16 * 16);
#pragma unroll
    for (int k = 0; k < kTilePositions / 16; ++k) {
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        if (has_pair(p)) {
          std::uint32_t b[4];
          load_matrices_transposed(
              b, row + static_cast<unsigned>(16 * k * Sizes::kPitch + 32 * pair(p)));
          multiply_add<T>(sums_[2 * p], weights_[k], b[0], b[1]);
          multiply_add<T>(sums_[2 * p + 1], weights_[k], b[2], b[3]);
        }
      }
    }
  }

  // The tile's scores become its weights; maximum and denominator follow. Returns whether the sums of any row must be
  // multiplied by `shrink` before those weights are used: a step of its own, since the tile before may still be added.
  template <bool kBoth>
  __device__ __forceinline__ bool weigh_scores(int tile, float (&scores)[kScoreTiles][4],
                                               float (&shrink)[2]) {
    const int first = tile * kTilePositions;
    // The column of each half's row itself, counted from this lane's first.
    const int last[2] = {position_[0] - first - 2 * (lane_ % 4),
                         position_[1] - first - 2 * (lane_ % 4)};
    const auto forget = [&](auto sees) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!sees(8 * n + i % 2, last[i / 2])) {
            scores[n][i] = -kInfinity;
          }
        }
      }
    };
    if (first + kTilePositions >
        span_.first_position + 1) {  // the first row does not see all of it
      forget([](int column, int last) { return column <= last; });
    }
    if (first < first_seen(span_.last_position, window_)) {  // the last row's window begins later
      forget([this](int column, int last) { return column > last - window_; });
    }
    if (kBoth) {
      return weigh_halves<0, 2>(scores, shrink);
    }
    bool shrinks = weigh_halves<0, 1>(scores, shrink);
    shrink[1] = 1;
    if (span_.rows > 8) {  // one half has them all in decode
      shrinks |= weigh_halves<1, 2>(scores, shrink);
    }
    return shrinks;
  }
  template <bool kBoth>
  __device__ __forceinline__ void shrink_sums(bool shrinks, const float (&shrink)[2]) {
    if (!shrinks) {
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kBoth || half == 0 || span_.rows > 8) {
#pragma unroll
        for (int n = 0; n < kSumTiles; ++n) {
          sums_[n][2 * half] = __fmul_rn(sums_[n][2 * half], shrink[half]);
          sums_[n][2 * half + 1] = __fmul_rn(sums_[n][2 * half + 1], shrink[half]);
        }
      }
    }
  }
  __device__ __forceinline__ void use_weights(const float (&scores)[kScoreTiles][4]) {
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      weights_[n / 2][n % 2 * 2] = pack<T>(scores[n][0], scores[n][1]);
      weights_[n / 2][n % 2 * 2 + 1] = pack<T>(scores[n][2], scores[n][3]);
    }
  }

  // Between weigh_scores and a wait for products. Without a branch that needs what the softmax gave, ptxas moves that
  // wait in front of the softmax, which the products should run beside. The trap is never reached: a denominator is a
  // sum of powers.
  __device__ __forceinline__ void finish_weights() const {
    if (denominator_[0] + denominator_[1] < 0) {
      __trap();
    }
  }

  // For products that four warps make together (prompts/): what they multiply, and where they add.
  __device__ __forceinline__ std::uint32_t (&queries())[kDim / 16][4] { return q_; }
  __device__ __forceinline__ const std::uint32_t (&weights() const)[kTilePositions / 16][4] {
    return weights_;
  }
  __device__ __forceinline__ float (&sums())[kSumTiles][4] { return sums_; }

  // The slice's last tile was added: joins it to the slices before it, and begins the next one that
  // any of the rows sees. Slices in order.
  template <typename SlicesBefore>
  __device__ void end_slice(int slice, SlicesBefore& merged) {
    const unsigned seen = span_.slices_seen(window_);
    if ((seen >> slice & 1u) == 0) {
      return;
    }
    int zero = 0;
    if constexpr (kShare ==
                  1) {  // unknown to the compiler, which so leaves the array in local memory
      asm volatile("mov.u32 %0, 0;\n" : "=r"(zero));
    }
    join(slice, seen, merged, zero);
    if (seen >> (slice + 1) != 0) {
#pragma unroll
      for (int n = 0; n < kSumTiles; ++n) {
        merged.sum(n + zero) = {sums_[n][0], sums_[n][1], sums_[n][2], sums_[n][3]};
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        merged.maximum[half] = maximum_[half];
        merged.denominator[half] = denominator_[half];
      }
      begin_slice();
    }
  }

  // The maximum and denominator of a slice whose last tile is not added yet.
  struct SliceState {
    float maximum[2], denominator[2];
  };
  // The next slice's scores can become weights before this one's last tile is added: its maximum and denominator
  // begin, and this slice's are returned, which keep_slice takes.
  __device__ SliceState begin_next() {
    const SliceState ended{{maximum_[0], maximum_[1]}, {denominator_[0], denominator_[1]}};
    forget_weights();
    return ended;
  }
  // For callers whose first product of a slice replaces the sums, also in rows that do not see that slice. Joins this slice
  // to those before it, and keeps the result in `merged`; if no row sees the slice, does nothing. end_slices follows the
  // last slice.
  template <typename SlicesBefore>
  __device__ void keep_slice(int slice, const SliceState& ended, SlicesBefore& merged) {
    const unsigned seen = span_.slices_seen(window_);
    if ((seen >> slice & 1u) == 0) {
      return;
    }
    const SliceState next{{maximum_[0], maximum_[1]}, {denominator_[0], denominator_[1]}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum_[half] = ended.maximum[half];
      denominator_[half] = ended.denominator[half];
    }
    join(slice, seen, merged);
#pragma unroll
    for (int n = 0; n < kSumTiles; ++n) {
      merged.sum(n) = {sums_[n][0], sums_[n][1], sums_[n][2], sums_[n][3]};
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      merged.maximum[half] = maximum_[half];
      merged.denominator[half] = denominator_[half];
      maximum_[half] = next.maximum[half];
      denominator_[half] = next.denominator[half];
    }
  }
  template <typename SlicesBefore>
  __device__ void end_slices(int last, SlicesBefore& merged) {
    const unsigned seen = span_.slices_seen(window_);
    if ((seen >> last & 1u) != 0) {
      join(last, seen, merged);
      return;
    }
#pragma unroll
    for (int n = 0; n < kSumTiles; ++n) {
      const float4 all = merged.sum(n);
      sums_[n][0] = all.x;
      sums_[n][1] = all.y;
      sums_[n][2] = all.z;
      sums_[n][3] = all.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      denominator_[half] = merged.denominator[half];
    }
  }

  // The same where the 2^cluster_bits blocks of a cluster share the slices: the rows' results go to the
  // blocks that merge them, and the next slice begins. `results` are this block's own.
  __device__ void end_slice(int slice, SliceResults<kDim>* results, unsigned cluster_bits) {
    sum_denominators();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (has_row(half)) {
        const int row = lane_ / 4 + 8 * half;
        SliceResults<kDim>* to =
            of_block_in_cluster(results + (row >> cluster_bits), row & ((1 << cluster_bits) - 1));
#pragma unroll
        for (int n = 0; n < kSumTiles; ++n) {
          if (has_pair(n / 2)) {
            *reinterpret_cast<float2*>(&to->sums[slice][column(n) + 2 * (lane_ % 4)]) = {
                sums_[n][2 * half], sums_[n][2 * half + 1]};
          }
        }
        if (lane_ % 4 == 0 && part_ == 0) {
          to->maximum[slice] = maximum_[half];
          to->denominator[slice] = denominator_[half];
        }
      }
    }
    begin_slice();
  }

  // Behind the end of the last slice.
  __device__ void write_out(const Attention& op) const {
    T* out = static_cast<T*>(op.out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float share = __fdiv_rn(1.0f, denominator_[half]);
#pragma unroll
      for (int n = 0; n < kSumTiles; ++n) {
        if (has_row(half) && column(n) < op.head_dim) {
          *reinterpret_cast<std::uint32_t*>(out + start_[half] + column(n)) = pack<T>(
              __fmul_rn(sums_[n][2 * half], share), __fmul_rn(sums_[n][2 * half + 1], share));
        }
      }
    }
  }

  // The same through shared memory, where the warp has 512 bytes at each of kDim / 8 multiples of kPitch: each row leaves
  // as one copy that runs by itself; free_shared() waits until it has read. For kShare 1, from compute capability 9.0 on.
  template <int kPitch>
  __device__ void write_out(const Attention& op, SharedAddress shared) const {
    static_assert(kShare == 1 && (kDim == 64 || kDim == 128));
    const auto place_of = [&](int row, int vector) {  // eight rows of a vector in different banks
      const int chunk = kDim == 128 ? row * kPitch : row % 8 * kPitch + row / 8 * 256;
      return shared + static_cast<unsigned>(chunk + (row % 8 + vector) * 16);
    };
    const float share[2] = {__fdiv_rn(1.0f, denominator_[0]), __fdiv_rn(1.0f, denominator_[1])};
    const auto both = [&](int n, int half) {
      return pack<T>(__fmul_rn(sums_[n][2 * half], share[half]),
                     __fmul_rn(sums_[n][2 * half + 1], share[half]));
    };
    free_shared();
#pragma unroll
    for (int n = 0; n < kSumTiles; n += 2) {
      store_matrices(place_of(lane_ % kWarpRows, n + lane_ / kWarpRows), both(n, 0), both(n, 1),
                     both(n + 1, 0), both(n + 1, 1));
    }
    show_to_copies();
    __syncwarp();
    // Lane 4·g knows where rows g and g + 8 begin.
    const int from = lane_ % 8 * 4;
    const long long low = __shfl_sync(kAllLanes, static_cast<long long>(start_[0]), from);
    const long long high = __shfl_sync(kAllLanes, static_cast<long long>(start_[1]), from);
    if (lane_ < span_.rows) {
      copy_out(static_cast<T*>(op.out) + (lane_ < 8 ? low : high), place_of(lane_, 0),
               op.head_dim * static_cast<int>(sizeof(T)));
    }
    end_copies_out();
  }
  // Behind it, all lanes may write there again.
  static __device__ void free_shared() {
    wait_copies_out();
    __syncwarp();
  }

 private:
  // Which sixteen rows this warp takes. Where not all of the four have some, it should not be the
  // same ones in the blocks beside it: warp w of every block runs on the same quarter of its
  // multiprocessor.
  static __device__ int turn() {
    const unsigned shift = blockIdx.x * 2654435769u >> 30;
    return static_cast<int>((threadIdx.x / kWarp + shift) % kAttentionWarps);
  }

  __device__ bool has_row(int half) const { return lane_ / 4 + 8 * half < span_.rows; }

  // The p-th pair of eight columns that this warp sums, and whether there is one.
  __device__ int pair(int p) const { return kShare == 1 ? p : p * kShare + part_; }
  __device__ bool has_pair(int p) const { return kDim / 16 % kShare == 0 || pair(p) < kDim / 16; }
  __device__ int column(int n) const { return 16 * pair(n / 2) + n % 2 * 8; }

  __device__ void begin_slice() {
#pragma unroll
    for (int n = 0; n < kSumTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums_[n][i] = 0;
      }
    }
    forget_weights();
  }
  __device__ void forget_weights() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum_[half] = -kInfinity;
      denominator_[half] = 0;
    }
  }

  // The slice, which rows see, to those before it.
  template <typename SlicesBefore>
  __device__ void join(int slice, unsigned seen, SlicesBefore& merged, int zero = 0) {
    sum_denominators();
    if ((seen & ((1u << slice) - 1)) != 0) {
      merge(slice, merged, zero);
    }
  }

  // Scores of 8 · kTiles positions.
  template <int kTiles>
  __device__ __forceinline__ void score(float (&scores)[kTiles][4], SharedAddress keys) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = 0;
      }
    }
    // Matrices: 8 positions × 8 columns; positions + 8 in the upper half of the lanes.
    const SharedAddress row =
        keys +
        static_cast<unsigned>((lane_ / 16 * 8 + lane_ % 8) * Sizes::kPitch + lane_ / 8 % 2 * 16);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        std::uint32_t b[4];
        load_matrices(b, row + static_cast<unsigned>(8 * n * Sizes::kPitch + 32 * k));
        multiply_add<T>(scores[n], q_[k], b[0], b[1]);
        multiply_add<T>(scores[n + 1], q_[k], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void weigh(int tile, float (&scores)[kScoreTiles][4]) {
    float shrink[2];
    const bool shrinks = weigh_scores<false>(tile, scores, shrink);
    shrink_sums<false>(shrinks, shrink);
    use_weights(scores);
  }

  // Of these halves, side by side: the latencies of one are those of the other. A row's maximum is one of its scores, but
  // follows larger ones only where a weight would exceed 2^kMostExponent: so few tiles make sums shrink.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ bool weigh_halves(float (&scores)[kScoreTiles][4],
                                               float (&shrink)[2]) {
    float largest[2], base[2], total[2];
#pragma unroll
    for (int half = kFirst; half < kEnd; ++half) {
      largest[half] = fmaxf(scores[0][2 * half], scores[0][2 * half + 1]);
      total[half] = 0;
      shrink[half] = 1;
    }
#pragma unroll
    for (int n = 1; n < kScoreTiles; ++n) {
#pragma unroll
      for (int half = kFirst; half < kEnd; ++half) {
        largest[half] = fmaxf(largest[half], fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      }
    }
    // Where both are minus infinity, since no position was seen, their difference is no number, which is not larger.
    const auto exceeds = [this](float score, float maximum) {
      return __fmul_rn(__fsub_rn(score, maximum), factor_) > kMostExponent;
    };
    bool exceed = false;
#pragma unroll
    for (int half = kFirst; half < kEnd; ++half) {
      exceed |= exceeds(largest[half], maximum_[half]);
    }
    exceed = __any_sync(kAllLanes, exceed) != 0;
    if (exceed) {
#pragma unroll
      for (int lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
        for (int half = kFirst; half < kEnd; ++half) {
          largest[half] = fmaxf(largest[half], __shfl_xor_sync(kAllLanes, largest[half], lanes));
        }
      }
#pragma unroll
      for (int half = kFirst; half < kEnd; ++half) {
        if (exceeds(largest[half], maximum_[half])) {
          // 0 in a slice's first tile, where the maximum was minus infinity.
          shrink[half] = power_of_two(__fmul_rn(__fsub_rn(maximum_[half], largest[half]), factor_));
          maximum_[half] = largest[half];
          denominator_[half] = __fmul_rn(denominator_[half], shrink[half]);
        }
      }
    }
#pragma unroll
    for (int half = kFirst; half < kEnd; ++half) {
      // Of a row that has not yet seen a position of the slice all weights are 0.
      base[half] = maximum_[half] == -kInfinity ? 0.0f : -__fmul_rn(maximum_[half], factor_);
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int half = kFirst; half < kEnd; ++half) {
        float& a = scores[n][2 * half];
        float& b = scores[n][2 * half + 1];
        a = power_of_two(__fmaf_rn(a, factor_, base[half]));
        b = power_of_two(__fmaf_rn(b, factor_, base[half]));
        total[half] = __fadd_rn(total[half], __fadd_rn(a, b));
      }
    }
#pragma unroll
    for (int half = kFirst; half < kEnd; ++half) {
      denominator_[half] = __fadd_rn(denominator_[half], total[half]);
    }
    return exceed;
  }

  // Of a row's four lanes; all four get it.
  __device__ void sum_denominators() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& total = denominator_[half];
      total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, 1));
      total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, 2));
    }
  }

  // A row that sees nothing of the slice (the others of the sixteen do) keeps what it had; one that saw
  // nothing of those before takes the slice as it is.
  template <typename SlicesBefore>
  __device__ void merge(int slice, SlicesBefore& merged, int zero) {
    bool sees[2], saw[2];
    SliceMerge merges[2] = {{merged.maximum[0], maximum_[0], factor_},
                            {merged.maximum[1], maximum_[1], factor_}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned seen = slices_of(first_seen(position_[half], window_), position_[half]);
      sees[half] = (seen >> slice & 1u) != 0;
      saw[half] = (seen & ((1u << slice) - 1)) != 0;
      const auto joined = [&](float old, float later, float both) {
        return !sees[half] ? old : saw[half] ? both : later;
      };
      denominator_[half] = joined(merged.denominator[half], denominator_[half],
                                  merges[half](merged.denominator[half], denominator_[half]));
      maximum_[half] = joined(merged.maximum[half], maximum_[half], merges[half].maximum);
    }
    if (__all_sync(kAllLanes, sees[0] && saw[0] && sees[1] && saw[1])) {
#pragma unroll
      for (int n = 0; n < kSumTiles; ++n) {
        const float4 all = merged.sum(n + zero);
        sums_[n][0] = merges[0](all.x, sums_[n][0]);
        sums_[n][1] = merges[0](all.y, sums_[n][1]);
        sums_[n][2] = merges[1](all.z, sums_[n][2]);
        sums_[n][3] = merges[1](all.w, sums_[n][3]);
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kSumTiles; ++n) {
      const float4 all = merged.sum(n + zero);
      const float old[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float both = merges[i / 2](old[i], sums_[n][i]);
        sums_[n][i] = !sees[i / 2] ? old[i] : saw[i / 2] ? both : sums_[n][i];
      }
    }
  }

  const int lane_, part_;
  const int window_;
  const float factor_;
  RowSpan span_;
  int position_[2];        // of this lane's two rows
  std::int64_t start_[2];  // of this lane's first numbers in q and out
  std::uint32_t q_[kDim / 16][4];
  std::uint32_t weights_[kTilePositions / 16][4];
  float sums_[kSumTiles][4];
  float maximum_[2];
  float denominator_[2];
};

// The rows of `place` whose slices the cluster's blocks have left to this one. All threads.
template <typename T, int kDim>
__device__ void merge_slices(const Attention& op, const AttentionPlace& place,
                             const SliceResults<kDim>* results) {
  static_assert(kDim <= 2 * kAttentionThreads);
  const int column = 2 * static_cast<int>(threadIdx.x);
  if (column >= op.head_dim) {
    return;
  }
  const float factor = score_factor(op);
  for (int row = place.rank; row < place.rows; row += place.cluster, ++results) {
    const int position = place.position_of(row);
    const unsigned seen = slices_of(first_seen(position, op.window), position);
    float maximum = 0;
    float denominator = 0;
    float2 sums{0, 0};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if ((seen >> slice & 1u) != 0) {
        const float2 later = *reinterpret_cast<const float2*>(&results->sums[slice][column]);
        if ((seen & ((1u << slice) - 1)) == 0) {  // the first
          maximum = results->maximum[slice];
          denominator = results->denominator[slice];
          sums = later;
        } else {
          const SliceMerge merge(maximum, results->maximum[slice], factor);
          maximum = merge.maximum;
          denominator = merge(denominator, results->denominator[slice]);
          sums = {merge(sums.x, later.x), merge(sums.y, later.y)};
        }
      }
    }
    const float share = __fdiv_rn(1.0f, denominator);
    *reinterpret_cast<std::uint32_t*>(static_cast<T*>(op.out) + place.offset_of(op, row) + column) =
        pack<T>(__fmul_rn(sums.x, share), __fmul_rn(sums.y, share));
  }
}

}  // namespace poise::cuda
