#pragma once
// A family of models as a description: how its config.json becomes a ModelShape, and which tensors of a
// checkpoint become which rows of which weight (common/weight_layout.h). One source file for each
// family; the loader, the planner and the executor read what is described here and never ask for a
// family by name. loader/README.md says how to add one. Constant data; any thread may read it.

#include <cstdint>
#include <span>
#include <string_view>

#include "common/model_shape.h"
#include "common/weight_layout.h"

namespace poise {

class JsonObject;

// Which rows of a weight a tensor fills. Two tensors that are one matrix here (W_K above W_V, W_gate
// above W_up) fill a half each.
enum class RowsFilled : std::uint8_t { all, upper, lower };

// Which outputs of a tensor are taken. A fused one has those of queries, keys and values, in this order.
enum class OutputsTaken : std::uint8_t { all, queries, keys_values };

struct TensorName {
  Weight weight;
  std::string_view name;  // behind the prefix; in a layer, behind the layer's number
  RowsFilled rows = RowsFilled::all;
  OutputsTaken outputs = OutputsTaken::all;
};

// Not behind a prefix.
inline constexpr std::string_view kHeadName = "lm_head.weight";

struct Family {
  std::string_view model_type;
  std::string_view architecture;  // of config.json's "architectures": with a head …
  std::string_view headless;      // … and without, for tied models
  // Of "bos_token_id" and "eos_token_id" where config.json does not speak of them; -1: none.
  std::int64_t bos, eos;
  // Fails, naming the field, for what we do not run.
  ModelShape (*shape)(const JsonObject& config);
  // In front of all names but the head's, by the class that saved the model. The first is the usual one.
  std::span<const std::string_view> prefixes;
  std::string_view layers;  // in front of a layer's number
  std::span<const TensorName> outer, layer;
  bool inputs_first = false;  // matrices of the layers are stored (in, out), as Conv1D has them
};

// All of them.
std::span<const Family* const> families();

}  // namespace poise
