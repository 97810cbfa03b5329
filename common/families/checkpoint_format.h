#pragma once
// How a checkpoint's matrices are quantised: "quantization_config" of its config.json ("compression_config"
// in older files). What is read:
//
//   gptq                 4 and 8 bits, with and without zero points and act-order
//   awq                  4 bits, with and without zero points, the order of its gemm kernels
//   compressed-tensors   pack-quantized (4, 8 bits), int-quantized (8 bits), float-quantized (float8);
//                        groups of layers, if all have one format
//   fp8                  float8 with a scale for a tensor, a row or a block
//
// Everything else is refused with a sentence that names the field and what is supported. Pure.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/files/json_file.h"
#include "common/model_shape.h"

namespace poise {

struct Family;

enum class StoredCodes : std::uint8_t {
  gptq,             // qweight: words of inputs, (in, out); qzeros, scales, g_idx
  awq,              // qweight: words of outputs, (in, out); qzeros, scales
  packed_integers,  // weight_packed: words of inputs, (out, in); weight_scale, weight_zero_point
  bytes,            // weight: int8 or float8, (out, in); weight_scale or weight_scale_inv
};

struct CheckpointFormat {
  StoredCodes stored;
  PackedFormat packed;                // its scale type is what is usual, the tensors decide
  std::int32_t zero_offset = 0;       // gptq: what is added to a stored zero point
  std::int32_t block_rows = 0;        // bytes: rows that share a scale; 0: one
  bool quantizes_inputs = false;      // it asks for that too; inputs are never quantised here
  std::vector<std::string> targets;   // modules that are quantised; empty: all
  std::vector<std::string> left_out;  // modules that stay plain
};

// Nothing where the checkpoint is plain.
std::optional<CheckpointFormat> checkpoint_format(const JsonObject& config);

// The shape with those matrices packed whose modules all are, as far as the config tells.
ModelShape packed_as(const ModelShape& plain, const CheckpointFormat& format, const Family& family);

}  // namespace poise
