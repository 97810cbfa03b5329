#include <algorithm>
#include <array>

#include "common/trouble.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

// Of the run of keys or of values that a slice reads of one position. Those of 64 positions, and of the 64
// that are prefetched meanwhile, share L2.
constexpr std::int64_t kRunBytes = 4096;

// How the queries of sequences are cut into slices. Bits do not depend on it.
struct Cut {
  std::int32_t group, heads, head_parts, tokens, tile_rows, kv_heads_together;

  Cut(const Attention& op, std::int32_t all_tile_rows, int threads)
      : group(op.heads / op.kv_heads),
        heads(std::min(group, kQueryRows)),
        head_parts((group + heads - 1) / heads),
        tokens(kQueryRows / heads),
        tile_rows(all_tile_rows) {
    // Heads that are taken together make longer runs of memory, but fewer slices.
    const std::int64_t heads_each =
        std::min(std::int64_t{op.kv_heads} * op.sequence_count / (4 * threads),
                 kRunBytes / kv_row_layout(op.kv_heads, op.head_dim, op.dtype, op.format).codes);
    kv_heads_together =
        static_cast<std::int32_t>(std::clamp<std::int64_t>(heads_each, 1, op.kv_heads));
  }

  struct Parts {
    std::int32_t tokens, kv_heads;  // of one slice
    std::int64_t token_parts, kv_parts, count;
  };
  Parts parts(const Attention& op, const AttentionSequence& sequence) const {
    Parts parts{.tokens = std::min(tokens, sequence.new_tokens), .kv_heads = 1};
    const std::int32_t rows = parts.tokens * heads;
    if (rows > 0 && takes_heads_together(op, rows, tile_rows)) {
      parts.kv_heads = std::min(kv_heads_together, kQueryRows / rows);
    }
    parts.token_parts = parts.tokens == 0 ? 0 : ceil_div(sequence.new_tokens, parts.tokens);
    parts.kv_parts = ceil_div(op.kv_heads, parts.kv_heads);
    parts.count = parts.token_parts * parts.kv_parts * head_parts;
    return parts;
  }
};

AttentionSlice slice_of(const Attention& op, const Cut& cut, const AttentionSequence& sequence,
                        std::int64_t item) {
  const Cut::Parts parts = cut.parts(op, sequence);
  // The last tokens see most: they go first, so that the work ends evenly.
  const std::int64_t by_token = parts.kv_parts * cut.head_parts;
  const std::int64_t token_part = parts.token_parts - 1 - item / by_token;
  const std::int64_t kv_part = item % by_token / cut.head_parts;
  const auto first_token = static_cast<std::int32_t>(token_part * parts.tokens);
  const auto kv_head = static_cast<std::int32_t>(kv_part * parts.kv_heads);
  const auto first_head = static_cast<std::int32_t>(item % cut.head_parts) * cut.heads;
  return {.op = &op,
          .sequence = &sequence,
          .kv_head = kv_head,
          .kv_heads = std::min(parts.kv_heads, op.kv_heads - kv_head),
          .first_head = first_head,
          .heads = std::min(cut.heads, cut.group - first_head),
          .first_token = first_token,
          .tokens = std::min(parts.tokens, sequence.new_tokens - first_token),
          .scratch = nullptr};
}

// Sequences [first, first + count), few enough that a table of where each one's items begin fits
// on the stack.
constexpr std::int32_t kSequencesAtOnce = 1024;

using Kernel = void (*)(const AttentionSlice&);

void attend(const Attention& op, const Cut& cut, std::int32_t first, std::int32_t count,
            Workers& workers, Kernel kernel) {
  std::array<std::int64_t, kSequencesAtOnce + 1> begin;
  begin[0] = 0;
  for (std::int32_t s = 0; s < count; ++s) {
    begin[static_cast<std::size_t>(s) + 1] =
        begin[static_cast<std::size_t>(s)] + cut.parts(op, op.sequences[first + s]).count;
  }
  std::int64_t* const end = begin.data() + count + 1;
  workers.parallel_for(begin[static_cast<std::size_t>(count)], [&](std::int64_t item, int worker) {
    const auto s = std::upper_bound(begin.data(), end, item) - begin.data() - 1;
    AttentionSlice slice =
        slice_of(op, cut, op.sequences[first + s], item - begin[static_cast<std::size_t>(s)]);
    slice.scratch = reinterpret_cast<float*>(workers.scratch(worker));
    kernel(slice);
  });
}

void attend_all(const Attention& op, Workers& workers, Kernel kernel) {
  static_assert(kAttentionScratchFloats * 4 <= Workers::kScratch.n);
  if (op.sequence_count <= 0) {
    return;
  }
  check(op.head_dim >= 1 && op.head_dim <= kMaxHeadDim, "a head is 1 to 256 wide");
  check(op.kv_heads >= 1 && op.heads % op.kv_heads == 0,
        "query heads share key-value heads evenly");
  const Cut cut(op, active_kernels().tile_rows, workers.threads());
  for (std::int32_t first = 0; first < op.sequence_count; first += kSequencesAtOnce) {
    attend(op, cut, first, std::min(kSequencesAtOnce, op.sequence_count - first), workers, kernel);
  }
}

}  // namespace

void attention(const Attention& op, Workers& workers) {
  attend_all(op, workers, active_kernels().attention_slice);
}

void attention_from_codes(const Attention& op, Workers& workers) {
  check(op.format != KvFormat::plain && op.dtype != DType::float32,
        "only quantised blocks of a type of 16 bits have codes to attend");
  attend_all(op, workers, active_kernels().codes_slice);
}

}  // namespace poise::cpu
