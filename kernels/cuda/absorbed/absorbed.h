#pragma once
// The products of absorbed attention: those with a row's activations and those with W_K and W_V. What lies between
// them is in absorbed_attention.cu. A call takes all of the operation's sequences at once: the caller has cut them to what the scratch holds.
// absorbed_tiles.cu has them on tensor cores, absorbed_plain.cu for any type and width in float32.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/kernels.h"

namespace poise::cuda {

// Where the parts of an AbsorbedAttention lie. Of a row's query head the scratch keeps, one behind the other:
//   (hidden_size) float32   the absorbed query, later the sum of weighted activations; tensor cores want each
//                           number as two of 16 bits: all upper parts, then what they leave
//   (16) float32            the two of `Numbers`
//   (head_dim) float32      the sum of weighted values of positions whose keys are there
//   (max_context) float32   scores, then weights, of the stored type
class AbsorbedRoom {
 public:
  struct Numbers {
    float share_of_one;  // a weight's: 1 / denominator
    float absorbed;      // the share of all absorbed positions
  };

  __host__ __device__ explicit AbsorbedRoom(const AbsorbedAttention& op)
      : scratch_(op.scratch),
        heads_(op.attention.heads),
        hidden_(padded(op.w_kv.cols)),
        values_(padded(op.attention.head_dim)),
        row_(hidden_ + kNumbers + values_ + padded(op.attention.max_context)) {}

  std::int64_t row_floats() const { return row_; }
  // `row` counts the operation's sequences.
  __device__ float* sums(std::int64_t row, int head) const {
    return scratch_ + (row * heads_ + head) * row_;
  }
  __device__ Numbers& numbers(std::int64_t row, int head) const {
    return *reinterpret_cast<Numbers*>(sums(row, head) + hidden_);
  }
  __device__ float* values(std::int64_t row, int head) const {
    return sums(row, head) + hidden_ + kNumbers;
  }
  __device__ float* scores(std::int64_t row, int head) const { return values(row, head) + values_; }
  template <typename T>
  __device__ T* weights(std::int64_t row, int head) const {
    return reinterpret_cast<T*>(scores(row, head));
  }

 private:
  static constexpr std::int64_t kNumbers = 16;
  __host__ __device__ static std::int64_t padded(std::int64_t count) {
    return (count + 15) / 16 * 16;
  }

  float* const scratch_;
  const std::int64_t heads_, hidden_, values_, row_;
};

inline constexpr int kAbsorbedBlock = 3;  // ContextBlock::buffer

// A row's context.
struct AbsorbedContext {
  AttentionSequence sequence;
  const ContextBlock* blocks;

  __device__ AbsorbedContext(const AbsorbedAttention& op, std::int64_t row)
      : sequence(op.attention.sequences[row]), blocks(op.attention.blocks + sequence.first_block) {}
  __device__ bool sees(int position) const { return position <= sequence.context; }
  __device__ int block_count() const { return sequence.context / kBlockTokens + 1; }
  __device__ bool absorbs(int block) const { return blocks[block].buffer == kAbsorbedBlock; }
  // The first of a block's activations, or of its keys and values.
  template <typename T>
  __device__ const T* activations(const AbsorbedAttention& op, int block) const {
    return static_cast<const T*>(op.act) +
           std::int64_t{blocks[block].slot} * kBlockTokens * op.w_kv.cols;
  }
  template <typename T>
  __device__ const T* keys(const Attention& op, int block) const {
    const ContextBlock at = blocks[block];
    const void* slots = at.buffer == 0 ? op.slots[0] : at.buffer == 1 ? op.slots[1] : op.slots[2];
    return static_cast<const T*>(slots) +
           std::int64_t{at.slot} * kBlockTokens * 2 * op.kv_heads * op.head_dim;
  }
};

// In the order of their calls: queries absorb W_K; scores of absorbed positions, without q · b_K and scale; sums of
// weighted activations; outputs, of those sums and of what other positions gave.
struct AbsorbedProducts {
  void (*absorb_queries)(const AbsorbedAttention& op, cudaStream_t stream);
  void (*score)(const AbsorbedAttention& op, cudaStream_t stream);
  void (*sum)(const AbsorbedAttention& op, cudaStream_t stream);
  void (*write_out)(const AbsorbedAttention& op, cudaStream_t stream);
};
// On tensor cores. REQUIRES: head_dim and hidden_size multiples of 8.
extern const AbsorbedProducts kAbsorbedFloat16, kAbsorbedBFloat16;
// In float32, of any type and width.
extern const AbsorbedProducts kAbsorbedPlainly;

}  // namespace poise::cuda
