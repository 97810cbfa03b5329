#pragma once
// The table of one instruction set, from the algorithms above it. Included last in each lanes_*.cpp.

#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

constexpr LaneKernels table_of(Isa isa) {
  return {.isa = isa,
          .tile_rows = Lanes::kTileRows,
          .gemm_slice = gemm_slice,
          .attention_slice = attention_slice,
          .codes_slice = codes_slice,
          .absorb_queries = absorb_queries,
          .absorbed_slice = absorbed_slice,
          .absorbed_values = absorbed_values,
          .layer_norm_row = layer_norm_row,
          .rms_norm_row = rms_norm_row,
          .convert_row = convert_row,
          .gated_activation_row = gated_activation_row,
          .rotate_row = rotate_row,
          .quantize_kv_row = quantize_kv_row,
          .embed_row = embed_row,
          .add_position_row = add_position_row,
          .pack_panel = pack_panel,
          .unpack_panel = unpack_panel,
          .scan_logits = scan_logits,
          .group_maxima = group_maxima,
          .weigh_at_least = weigh_at_least,
          .weigh_each = weigh_each,
          .count_at_least = count_at_least,
          .select_at_least = select_at_least};
}

}  // namespace
}  // namespace poise::cpu
