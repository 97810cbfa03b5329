// Attention for float32, and for heads of a width that tensor cores do not take: a warp to a row of
// one head. Context passes in tiles of 64 positions cut at multiples of 64, two to a lane. A score is
// one chain of fused multiply-adds over head_dim, an output one over positions, in order; what a row
// may not see is left out. Bits follow from positions alone. Query heads of a group read their keys and
// values each for itself, and dequantise them as they read.

#include <limits>

#include "common/units.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_blocks.h"
#include "kernels/cuda/kv/codes.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kWarps = 4;
constexpr int kTile = 64;
constexpr int kEach = kTile / kWarp;  // positions of a lane: lane, lane + 32
constexpr int kMaxDim = 256;
constexpr int kColumns = kMaxDim / kWarp;  // of a lane: lane, lane + 32, …

// Another lane's pointer.
__device__ const char* pointer_of(const char* mine, int lane) {
  return reinterpret_cast<const char*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), lane));
}

// Numbers of one head in a token's row.
template <typename T>
struct PlainHead {
  int kv_head, head_dim;
  std::int64_t kv_dim;

  __device__ PlainHead(const Attention& op, const KvRowLayout&, int head)
      : kv_head(head), head_dim(op.head_dim), kv_dim(std::int64_t{op.kv_heads} * op.head_dim) {}
  __device__ float number(const char* row, int which, int d) const {
    return to_float(reinterpret_cast<const T*>(row)[which * kv_dim + kv_head * head_dim + d]);
  }
};
template <typename T>
struct QuantizedHead {
  int kv_head;
  HeadCodes<T> codes;

  __device__ QuantizedHead(const Attention& op, const KvRowLayout& layout, int head)
      : kv_head(head), codes(op, layout, head) {}
  __device__ float number(const char* row, int which, int d) const {
    return codes.number(row, kv_head, which, d);
  }
};

template <typename T, typename Head>
__global__ void __launch_bounds__(kWarps* kWarp)
    plain_attention_kernel(const Attention op, const KvRowLayout layout) {
  __shared__ float queries[kWarps][kMaxDim];
  const int lane = threadIdx.x % kWarp;
  const std::int64_t item =
      std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const auto head = static_cast<int>(item % op.heads);
  const std::int64_t token = item / op.heads % op.max_new_tokens;
  const std::int64_t sequence_index = item / op.heads / op.max_new_tokens;
  if (sequence_index >= op.sequence_count) {
    return;
  }
  const AttentionSequence sequence = op.sequences[sequence_index];
  if (token >= sequence.new_tokens) {
    return;
  }
  const std::int64_t row = ((sequence.first_row + token) * op.heads + head) * op.head_dim;
  float* q = queries[threadIdx.x / kWarp];
  for (int d = lane; d < op.head_dim; d += kWarp) {
    q[d] = to_float(static_cast<const T*>(op.q)[row + d]);
  }
  __syncwarp();

  const Head kv(op, layout, head / (op.heads / op.kv_heads));
  const auto row_of = [&](int position) {
    const ContextBlock block = op.blocks[sequence.first_block + position / kBlockTokens];
    const auto* slots = static_cast<const char*>(block.buffer == 0   ? op.slots[0]
                                                 : block.buffer == 1 ? op.slots[1]
                                                                     : op.slots[2]);
    return slots +
           (std::int64_t{block.slot} * kBlockTokens + position % kBlockTokens) * layout.row;
  };

  const int end = sequence.context + static_cast<int>(token) + 1;
  const int begin = first_seen(end - 1, op.window);
  float maximum = -kInfinity;
  float denominator = 0;
  float sums[kColumns] = {};
  for (int start = begin / kTile * kTile; start < end; start += kTile) {
    const int count = min(kTile, end - start);
    const int hidden = max(0, begin - start);  // before the window
    float weights[kEach];
    const char* rows[kEach];
    float largest = maximum;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int at = e * kWarp + lane;
      weights[e] = -kInfinity;
      rows[e] = nullptr;
      if (at >= hidden && at < count) {
        rows[e] = row_of(start + at);
        float score = 0;
#pragma unroll 8
        for (int d = 0; d < op.head_dim; ++d) {
          score = fmaf(q[d], kv.number(rows[e], 0, d), score);
        }
        weights[e] = score * op.scale;
        largest = fmaxf(largest, weights[e]);
      }
    }
    largest = over_warp(largest, Larger());
    const float shrink = expf(maximum - largest);
    maximum = largest;
    float total = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int at = e * kWarp + lane;
      weights[e] = at >= hidden && at < count ? expf(weights[e] - maximum) : 0.0f;
      total += weights[e];
    }
    denominator = fmaf(denominator, shrink, over_warp(total, Add()));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sums[c] *= shrink;
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int some = min(kWarp, count - e * kWarp);
#pragma unroll 4
      for (int source = max(0, hidden - e * kWarp); source < some; ++source) {
        const float weight = __shfl_sync(kAllLanes, weights[e], source);
        const char* of = pointer_of(rows[e], source);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (c * kWarp + lane < op.head_dim) {
            sums[c] = fmaf(weight, kv.number(of, 1, c * kWarp + lane), sums[c]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (c * kWarp + lane < op.head_dim) {
      static_cast<T*>(op.out)[row + c * kWarp + lane] = from_float<T>(sums[c] / denominator);
    }
  }
}

}  // namespace

void attend_plainly(const Attention& op, cudaStream_t stream) {
  with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t items = std::int64_t{op.sequence_count} * op.max_new_tokens * op.heads;
    launch("attend",
           op.format == KvFormat::plain ? &plain_attention_kernel<T, PlainHead<T>>
                                        : &plain_attention_kernel<T, QuantizedHead<T>>,
           {.blocks = ceil_div(items, kWarps), .threads = kWarps * kWarp}, stream, op,
           kv_row_layout(op.kv_heads, op.head_dim, op.dtype, op.format));
  });
}

}  // namespace poise::cuda
