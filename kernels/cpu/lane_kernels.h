#pragma once
// What each instruction set provides: the inner parts of the operations, written over 16 lanes and
// compiled once per set (lanes_avx512.cpp, lanes_avx2.cpp, lanes_portable.cpp). The operations
// themselves (gemm.cpp, attention.cpp …) split their work over the threads and call these. Nothing
// here allocates or throws; scratch comes from the caller.

#include <cstdint>

#include "common/kernel_limits.h"
#include "common/units.h"
#include "kernels/cpu/isa.h"
#include "kernels/kernels.h"

namespace poise::cpu {

// Tokens of context whose scores are computed before their softmax. It decides bits
// (attention.cpp), so it is the same for every instruction set.
inline constexpr std::int32_t kChunkTokens = 128;
inline constexpr std::int32_t kQueryRows = 64;  // (token, head of a group) pairs in one work item

// Each number of rows in a tile is compiled by itself, and bits do not depend on it. With POISE_SMALL_TILES there are fewer of
// them: where races alone are looked for (ThreadSanitizer), and in AddressSanitizer's AVX2 set (CMakeLists.txt).
constexpr int tile_rows(int rows) {
#ifdef POISE_SMALL_TILES
  return rows / 3;
#else
  return rows;
#endif
}

// How a Gemm is cut, and what scratch a slice of it needs. Bits do not depend on any of it.
inline constexpr std::int64_t kGemmDepth = 1024;  // inputs in one pass: panels of them stay in L2
inline constexpr std::int64_t kGemmRows = 168;    // of a slice
inline constexpr std::int64_t kGemmPanels = 16;
inline constexpr std::int64_t kGemmPackedFloats = 3 << 18;  // input rows of a slice
inline constexpr std::int64_t kGemmSumsFloats = kGemmRows * 32;
inline constexpr std::int64_t kGemmWideFloats = 2 * 16 * kGemmDepth;

// A rectangle of a Gemm's output for one thread.
struct GemmSlice {
  const Gemm* op;
  std::int64_t first_row, rows;      // rows ≤ kGemmRows, rows · cols ≤ kGemmPackedFloats
  std::int64_t first_panel, panels;  // panels ≤ kGemmPanels
  std::int64_t next_panel;           // where this thread probably continues, for prefetching
  float* packed;                     // scratch (kGemmPackedFloats): the rows' inputs, see pack_rows
  float* sums;                       // scratch (kGemmSumsFloats)
  float* wide;     // scratch (kGemmWideFloats): 16-bit or packed panels made float32
  bool is_packed;  // `packed` holds these rows already, from the slice before
};

// Some queries of one sequence against one key-value head, or against several that are computed
// together; kv_heads · tokens · heads ≤ kQueryRows.
struct AttentionSlice {
  const Attention* op;
  const AttentionSequence* sequence;
  std::int32_t kv_head, kv_heads;
  std::int32_t first_head, heads;    // of the query heads that share each of them
  std::int32_t first_token, tokens;  // of the sequence's new tokens
  float* scratch;                    // kAttentionScratchFloats
};
// Whether a head has few enough rows to be computed together with others (attention_lanes.h).
constexpr bool takes_heads_together(const Attention& op, std::int32_t rows,
                                    std::int32_t tile_rows) {
  return rows <= tile_rows && op.head_dim % 16 == 0;
}
// Whether codes_slice attends from the codes; else it is attention_slice. The shape alone decides, so that bits depend on
// nothing else: heads of whole pairs of sixteen numbers, and query heads that are one part of a slice. It is made for few rows.
constexpr bool takes_codes(const Attention& op) {
  return op.format != KvFormat::plain && op.head_dim % 32 == 0 && op.heads / op.kv_heads <= 16;
}
// Where the rows of a slice (AttentionRows) begin in its scratch, behind keys, values and a block of dequantised ones.
inline constexpr std::int64_t kAttentionRowsBegin =
    (2 * kChunkTokens + kBlockTokens) * kMaxHeadDim;
inline constexpr std::int64_t kAttentionScratchFloats =
    2 * kChunkTokens * kMaxHeadDim  // keys and values of a chunk, as panels
    + 2 * kQueryRows * kMaxHeadDim  // queries, sums
    + kQueryRows * kChunkTokens     // scores
    + 2 * kQueryRows                // maxima, denominators
    + kBlockTokens * kMaxHeadDim;   // a block's keys or values of a head, dequantised

// Work of an AbsorbedAttention: columns of absorbed queries, some heads of one sequence, or the values of a
// key-value head.
struct AbsorbedSlice {
  const AbsorbedAttention* op;
  std::int32_t sequences = 0;  // the first ones, or …
  std::int32_t sequence = 0;   // … this one
  std::int32_t kv_head = 0;
  std::int32_t first_column = 0, columns = 0;
  std::int32_t first_head = 0, heads = 0;  // ≤ tile_rows
  float* scratch = nullptr;                // kAbsorbedScratchFloats
};
inline constexpr std::int64_t kMaxTileRows = 16;
inline constexpr std::int64_t kAbsorbedScratchFloats =
    2 * kMaxTileRows * kMaxNormedRow                   // absorbed queries, sums of activations
    + kMaxTileRows * (kMaxHeadDim + kChunkTokens)      // sums of values, scores
    + 16 * kGemmDepth + kBlockTokens * kMaxNormedRow;  // a block's activations transposed, its rows

// What one pass over a row of logits finds.
struct LogitScan {
  float maximum;        // unspecified where not finite
  std::int32_t argmax;  // lowest id among equals
  bool finite;          // all of them
};
// Logits are weighed, counted and selected in blocks of this many, so that a float32 sum stays
// short; blocks are added in double.
inline constexpr std::int32_t kLogitBlock = 1024;
inline constexpr std::int32_t kLogitGroup = 64;

struct LaneKernels {
  Isa isa;
  std::int32_t tile_rows;  // rows a Gemm tile holds in registers
  void (*gemm_slice)(const GemmSlice& slice);
  void (*attention_slice)(const AttentionSlice& slice);
  void (*codes_slice)(const AttentionSlice& slice);  // of quantised blocks; attention_from_codes
  void (*absorb_queries)(const AbsorbedSlice& slice);   // kv_head, columns
  void (*absorbed_slice)(const AbsorbedSlice& slice);   // one sequence, heads
  void (*absorbed_values)(const AbsorbedSlice& slice);  // kv_head
  void (*layer_norm_row)(const LayerNorm& op, std::int64_t row);
  void (*rms_norm_row)(const RmsNorm& op, std::int64_t row);
  void (*convert_row)(const Convert& op, std::int64_t row);
  void (*gated_activation_row)(const GatedActivation& op, std::int64_t row);
  void (*rotate_row)(const Rotate& op, std::int64_t row);
  void (*quantize_kv_row)(const QuantizeKv& op, std::int64_t row);
  void (*embed_row)(const EmbedTokens& op, std::int64_t row);
  void (*add_position_row)(const AddPositions& op, std::int64_t row);
  // dst, src: starts of the whole matrix; panel: 16 rows of it.
  void (*pack_panel)(void* dst, const void* src, std::int64_t rows, std::int64_t cols, DType dtype,
                     std::int64_t panel);
  // Panel `panel` of the matrix, and of op.out.
  void (*unpack_panel)(const Unpack& op, std::int64_t panel);
  LogitScan (*scan_logits)(const float* logits, std::int32_t count);
  // out[g] = the largest of logits [64·g, 64·g + 64), fewer in the last group.
  void (*group_maxima)(float* out, const float* logits, std::int32_t count);
  // The others take one block: count ≤ kLogitBlock.
  // Σ exp((logits[i] - maximum) · scale) over those with logits[i] ≥ threshold.
  float (*weigh_at_least)(const float* logits, std::int32_t count, float threshold, float maximum,
                          float scale);
  // weights[i] = exp((logits[i] - maximum) · scale), the very numbers weigh_at_least adds.
  void (*weigh_each)(float* weights, const float* logits, std::int32_t count, float maximum,
                     float scale);
  std::int32_t (*count_at_least)(const float* logits, std::int32_t count, float threshold);
  // Their indices, ascending, into `at`; returns how many.
  std::int32_t (*select_at_least)(std::int32_t* at, const float* logits, std::int32_t count,
                                  float threshold);
};

const LaneKernels& portable_kernels();
const LaneKernels& avx2_kernels();    // REQUIRES: the machine has AVX2, FMA and F16C
const LaneKernels& avx512_kernels();  // REQUIRES: the machine has AVX-512 F, BW, DQ and VL
const LaneKernels& active_kernels();

}  // namespace poise::cpu
